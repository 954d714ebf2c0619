"""`python -m shipway.runtime.data pack | inspect`: what `shipway data` runs.

Prints one JSON object per line to stdout (progress, then the result) when --json is given, else
text; exit code 2 for a mistake in what was asked, which --json has as an object of diagnostics.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from shipway.runtime.complaint import WrongUsage, complain
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.pack import Packed, Packing, pack
from shipway.runtime.data.shards import PackedDocuments, open_shards
from shipway.runtime.data.sources.open import open_records
from shipway.runtime.data.storage import open_storage
from shipway.runtime.data.tokenizers import Tokenizer, make_tokenizer
from shipway.schemas.training import (
    BytesTokenizer,
    FilesSource,
    FileTokenizer,
    HuggingFaceSource,
    PythonStdlibSource,
)

_PREVIEW_TOKENS = 64
_PROGRESS_SECONDS = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    as_json = "--json" in arguments
    try:
        options = _parser().parse_args(arguments)
        (_pack if options.command == "pack" else _inspect)(options)
    except WrongUsage as error:
        complain(str(error), code="CL001", as_json=as_json)
        return 2
    except DataError as error:
        complain(str(error), code="DA001", as_json=as_json)
        return 2
    except BrokenPipeError:  # the reader has gone; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(argparse.ArgumentParser):
    """Leaves it to `main` to say what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raise WrongUsage."""
        raise WrongUsage(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shipway data", description="Pre-tokenised shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="tokenise a source into memory-mapped shards")
    packing.add_argument("source", help="file, folder or URL of text; or python_stdlib")
    packing.add_argument("--out", type=Path, required=True, help="folder for the shards")
    packing.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json")
    packing.add_argument("--end-of-document", help="token put after each document")
    packing.add_argument("--text-field", default="text")
    packing.add_argument("--documents", choices=["file", "line"], default="file", help="in .txt files")
    packing.add_argument("--split", help="split of a Hugging Face dataset")
    packing.add_argument("--shard-tokens", type=int, default=Packing.shard_tokens)
    packing.add_argument("--part", type=_part, default=(0, 1), help="k/n: the k-th of n parts, from 0")
    packing.add_argument("--corrupt-limit", type=float, default=Packing.corrupt_limit)
    inspecting = commands.add_parser("inspect", help="say what shards hold")
    inspecting.add_argument("path", help="folder of shards, or one .idx file")
    inspecting.add_argument("--tokenizer", help="show the beginning of a document with this tokenizer")
    inspecting.add_argument("--end-of-document")
    inspecting.add_argument("--document", type=int, default=0, help="which document to show")
    for command in (packing, inspecting):
        command.add_argument("--json", action="store_true", dest="as_json")
    return parser


def _part(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(number) for number in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3/64") from None
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"part {part} of {parts} does not exist; parts count from 0")
    return part, parts


def _tokenizer(name: str, end: str | None) -> Tokenizer:
    config = BytesTokenizer() if name == "bytes" else FileTokenizer(path=name, end_of_document=end)
    return make_tokenizer(config, Path.cwd())


def _source(options: argparse.Namespace) -> PythonStdlibSource | FilesSource | HuggingFaceSource:
    if options.source == "python_stdlib":
        return PythonStdlibSource()
    path = Path(options.source)
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return HuggingFaceSource(path=options.source, split=options.split, text_field=options.text_field)
    return FilesSource(path=options.source, text_field=options.text_field, documents=options.documents)


def _pack(options: argparse.Namespace) -> None:
    tokenizer = _tokenizer(options.tokenizer, options.end_of_document)
    records = open_records(_source(options), Path.cwd())
    part, parts = options.part
    packing = Packing(options.shard_tokens, part, parts, options.corrupt_limit)
    result, shown = Packed(), time.monotonic()
    for result in pack(records, tokenizer, options.out, packing, options.source):
        if options.as_json:
            print(json.dumps(asdict(result)), flush=True)
        elif time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"{result.read:,} of {result.records:,} records", file=sys.stderr)
    if options.as_json:
        return
    for problem in result.problems:
        print(f"skipped {problem}", file=sys.stderr)
    print(
        f"{options.out}: {result.tokens:,} tokens of {result.documents:,} documents in"
        f" {len(result.shards)} shard{'s' * (len(result.shards) != 1)},"
        f" {len(result.problems)} unreadable records skipped"
    )


def _inspect(options: argparse.Namespace) -> None:
    storage, root = open_storage(options.path, Path.cwd())
    documents = open_shards(storage, root)
    preview = _preview(documents, options) if options.tokenizer else None
    if options.as_json:
        shards = [{"name": shard.name, **asdict(shard.header)} for shard in documents.shards]
        print(json.dumps({"shards": shards, "preview": preview}))
        return
    for shard in documents.shards:
        header = shard.header
        print(
            f"{shard.name}: {header.tokens:,} tokens of {header.documents:,} documents"
            f" ({header.tokens / header.documents:,.0f} each), {header.dtype}, vocabulary"
            f" {header.vocabulary:,}, tokenizer {header.tokenizer[:20]}, {header.corrupt} unreadable records"
            f" left out, from {header.source}"
        )
    if preview is not None:
        print(f"document {options.document}: {preview!r}")


def _preview(documents: PackedDocuments, options: argparse.Namespace) -> str:
    tokenizer = _tokenizer(options.tokenizer, options.end_of_document)
    documents.check_tokenizer(tokenizer)
    if not 0 <= options.document < documents.count:
        raise DataError(
            f"there is no document {options.document}; they count from 0 to {documents.count - 1}"
        )
    return tokenizer.decode(documents.tokens(options.document, 0, _PREVIEW_TOKENS).tolist())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
