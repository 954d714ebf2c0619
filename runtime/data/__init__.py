"""Packed token streams that resume exactly, at any change of the data-parallel degree.

One global order of rows per stage, of which each rank takes a slice; see `loader.py` for the rule
and docs/data.md for why no library's loader is used. torchdata's StatefulDataLoader and Hugging
Face's IterableDataset keep a state per rank that fits no other number of ranks. MosaicML Streaming
and grain's ElasticIterator do resume at another degree, but only over samples of fixed number:
documents packed into rows of one length, with the rest carried over, are not. Well-kept libraries do
the reading: pyarrow (Parquet, Arrow), fsspec (object storage), tokenizers, Pillow.

`batch.py` what the trainer receives, `loader.py` whose turn it is, `stream.py` one source end to end,
`packing.py` rows, `mixture.py` shares, `order.py` and `permutation.py` shuffles without a list,
`documents.py` what a source must offer, `sources/` the kinds of source, `shards.py` and `pack.py`
pre-tokenised shards, `patches.py` and `image_documents.py` pictures.
"""
