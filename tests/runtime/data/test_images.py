"""Pictures: their patches, their places in rows, and what damage costs."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.image_documents import ImageDocuments
from shipway.runtime.data.loader import Loader, StageShape
from shipway.runtime.data.mixture import Mixture
from shipway.runtime.data.packing import IGNORED, PADDING
from shipway.runtime.data.patches import ImageFormat, patchify
from shipway.runtime.data.sources.image_folder import ImageFolder
from shipway.runtime.data.sources.rendered_text import RenderedText
from shipway.runtime.data.sources.streams import Sources, open_sources
from shipway.runtime.data.storage import LocalStorage, open_storage
from shipway.runtime.data.stream import Split
from shipway.runtime.data.tokenizers import ByteLevel
from shipway.runtime.data.whole_stream import WholeDocumentStream
from shipway.schemas.training import Data
from tests.runtime.data.streams import numbered_texts, stream
from tests.templates.generated import variant

FORMAT = ImageFormat(patch=14, merge=2, token=300)


def write_pictures(folder: Path, count: int = 12) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        height, width = generator.integers(20, 90, size=2)
        pixels = generator.integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number}\n")


def pictures(folder: Path, corrupt_limit: float = 0.0) -> WholeDocumentStream:
    documents = ImageDocuments(ImageFolder(LocalStorage(), str(folder)), ByteLevel(), FORMAT, 1024)
    return WholeDocumentStream("pictures", documents, 0, Split(), corrupt_limit)


def loader(folder: Path, rank: int = 0, size: int = 1, corrupt_limit: float = 0.0) -> Loader:
    streams = {"pictures": pictures(folder, corrupt_limit), "text": stream(numbered_texts(40), "text")}
    sources = Sources(streams, ByteLevel.padding, FORMAT)
    shape = StageShape("s", 64, 8, 1, 100)
    return Loader(shape, sources, Mixture({"pictures": 0.5, "text": 0.5}), {}, rank, size, 0)


@given(height=st.integers(1, 300), width=st.integers(1, 300), largest=st.integers(4, 64))
def test_a_picture_takes_a_token_per_started_cell_and_never_more_than_allowed(
    height: int, width: int, largest: int
) -> None:
    assert FORMAT.tokens(height, width) == -(-height // 28) * -(-width // 28)
    fitted = FORMAT.fitted(height, width, largest)
    assert FORMAT.tokens(*fitted) <= largest
    if FORMAT.tokens(height, width) <= largest and height * width <= largest * 28**2:
        assert fitted == (height, width)


def test_patches_are_rows_of_squares_channels_first() -> None:
    pixels = np.arange(28 * 56 * 3, dtype=np.uint32).reshape(28, 56, 3).astype(np.uint8)
    cut = patchify(pixels, FORMAT)
    assert (cut.rows, cut.columns) == (2, 4)
    third = cut.values[1 * 4 + 2].reshape(3, 14, 14)
    expected = pixels[14:28, 28:42].transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(third, expected, atol=1e-6)


def test_a_picture_is_filled_up_to_whole_cells_with_its_own_edge() -> None:
    cut = patchify(np.full((29, 10, 3), 255, dtype=np.uint8), FORMAT)
    assert (cut.rows, cut.columns) == (4, 2)
    assert (cut.values == 1.0).all()


def test_made_pictures_are_as_large_as_announced_and_show_their_words() -> None:
    records = RenderedText(200, seed=0)
    shapes = set()
    for index in range(20):
        height, width = records.size(index)
        pixels = records.pixels(index, height, width)
        assert pixels.shape == (height, width, 3)
        assert (pixels == 0).any()
        shapes.add((height, width))
        longest = max(records.caption(index).split("\n"), key=len)
        # The longest line reaches the right margin, and nothing is cut off beyond it.
        scale = 1 + index % 2
        assert (pixels[:, : width - 3 * scale] == 0).any(axis=(0, 2)).nonzero()[0].max() > (
            6 * len(longest) * scale * 0.8
        )
        assert not (pixels[:, width - 3 * scale :] == 0).any()
    assert len(shapes) > 10
    assert len({records.caption(i) for i in range(200)}) > 190
    assert (RenderedText(5, 0).pixels(3, 40, 50) == RenderedText(5, 0).pixels(3, 40, 50)).all()


def test_made_pictures_hold_no_more_lines_and_words_than_asked() -> None:
    captions = [RenderedText(300, 0, lines=2, words=1).caption(i) for i in range(300)]
    assert {len(caption.split("\n")) for caption in captions} == {1, 2}
    assert not any(" " in caption for caption in captions)


def test_pictures_are_never_cut_and_every_one_is_read_once_per_epoch(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    source = pictures(tmp_path)
    seen: list[int] = []
    while len(seen) < 24:
        pieces = source.take(64)
        assert sum(len(piece.tokens) for piece in pieces) <= 64
        for piece in pieces:
            assert piece.picture is not None
            placeholders = int((piece.tokens == FORMAT.token).sum())
            assert placeholders == piece.picture.rows * piece.picture.columns // 4
            text = ByteLevel().decode(piece.tokens[placeholders:].tolist())
            assert text == f"picture {piece.document}"
            seen.append(piece.document)
    assert sorted(seen[:12]) == sorted(seen[12:24]) == list(range(12))


def test_rows_are_whole_with_padding_and_placeholders_are_no_labels(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    for batch in loader(tmp_path).next_step():
        assert batch.tokens.shape == (1, 64)
        assert int(batch.cu_seqlens[-1]) == 64
        assert not (batch.labels == FORMAT.token).any()
        for sample, start in zip(batch.samples, batch.cu_seqlens[:-1].tolist(), strict=True):
            labels = batch.labels[0, start : start + sample.length]
            if sample.document == PADDING:
                assert (labels == IGNORED).all()
            elif sample.source == "pictures":
                placeholders = int((batch.tokens[0, start : start + sample.length] == 300).sum())
                assert int((labels != IGNORED).sum()) == sample.length - placeholders
        _check_images(batch)


def _check_images(batch: Batch) -> None:
    """Every micro-batch has images, and their embeddings are as many as the placeholders, or one blank."""
    assert batch.images is not None
    assert batch.images.patches.size(0) == int(batch.images.grids.prod(1).sum())
    embeddings = batch.images.patches.size(0) // 4
    placeholders = int((batch.tokens == FORMAT.token).sum())
    assert embeddings == placeholders or (placeholders, embeddings) == (0, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_pictures_too_are_the_same_stream_at_every_degree_and_after_a_resume(
    tmp_path: Path, size: int
) -> None:
    write_pictures(tmp_path)
    one = loader(tmp_path)
    expected = [one.next_step() for _ in range(6)]
    state = None
    for step in range(6):
        ranks = [loader(tmp_path, rank, size) for rank in range(size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        batches = [batch for rank in ranks for batch in rank.next_step()]
        for got, wanted in zip(batches, expected[step], strict=True):
            assert torch.equal(got.tokens, wanted.tokens)
            assert torch.equal(got.images.patches, wanted.images.patches)
            assert got.token_hash == wanted.token_hash
        states = [rank.state_dict() for rank in ranks]
        for each in states:
            each.pop("stream_hash")
        assert all(each == states[0] for each in states)
        state = {**states[0], "stream_hash": ""}


def test_captions_may_be_listed_and_pictures_lie_in_object_storage(tmp_path: Path) -> None:
    write_pictures(tmp_path / "p", 3)
    listed = [{"file": "01.png", "caption": "from the list"}]
    (tmp_path / "p/captions.jsonl").write_text("\n".join(json.dumps(entry) for entry in listed))
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "p"), "/p", recursive=True)
    try:
        local, remote = (
            ImageFolder(LocalStorage(), str(tmp_path / "p")),
            ImageFolder(*open_storage("memory://p", tmp_path)),
        )
        for folder in (local, remote):
            assert [folder.caption(i) for i in range(3)] == ["picture 0", "from the list", "picture 2"]
        assert local.size(2) == remote.size(2)
        assert (local.pixels(2, 30, 40) == remote.pixels(2, 30, 40)).all()
    finally:
        memory.rm("/p", recursive=True)


def test_a_picture_without_caption_or_header_is_a_corrupt_record(tmp_path: Path) -> None:
    write_pictures(tmp_path, 3)
    (tmp_path / "01.txt").unlink()
    (tmp_path / "02.png").write_bytes(b"no picture")
    folder = ImageFolder(LocalStorage(), str(tmp_path))
    with pytest.raises(CorruptRecord, match=r"01\.png: no caption"):
        folder.caption(1)
    with pytest.raises(CorruptRecord, match=r"02\.png: not a readable picture"):
        folder.size(2)
    with pytest.raises(DataError, match=r"[12] unreadable records"):
        pictures(tmp_path).skip_rows(64, 10)


def test_damaged_pixels_leave_a_blank_without_labels_in_their_place(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    sound = loader(tmp_path).next_step()
    path = tmp_path / "05.png"
    path.write_bytes(path.read_bytes()[:-800] + bytes(800))
    tolerant = loader(tmp_path, corrupt_limit=0.5)
    steps = [tolerant.next_step() for _ in range(4)]
    for batch, wanted in zip(steps[0], sound, strict=True):
        assert torch.equal(batch.tokens, wanted.tokens)
    starts = [
        (batch, start, sample.length)
        for step in steps
        for batch in step
        for sample, start in zip(batch.samples, batch.cu_seqlens[:-1].tolist(), strict=True)
        if (sample.source, sample.document) == ("pictures", 5)
    ]
    assert starts
    for batch, start, length in starts:
        assert (batch.labels[0, start : start + length] == IGNORED).all()
    with pytest.raises(DataError, match="1 pictures have damaged pixels"):
        for _ in loader(tmp_path):
            pass


def test_the_model_must_see_and_its_image_token_be_no_text(tmp_path: Path) -> None:
    data = Data.from_data({"sources": {"drawn": {"kind": "rendered_text", "pictures": 50}}})
    with pytest.raises(DataError, match="'drawn' has images, and the model has no `vision`"):
        open_sources(data, {"drawn": 1.0}, 0, tmp_path, Split())
    with pytest.raises(DataError, match=r"vocabulary 61; set model.vocabulary to at least 259"):
        open_sources(data, {"drawn": 1.0}, 0, tmp_path, Split(), variant("vision"))
    with pytest.raises(DataError, match="image token 258 is a token of text too"):
        open_sources(data, {"drawn": 1.0}, 0, tmp_path, Split(), variant("vision", vocabulary=259))
    sources = open_sources(data, {"drawn": 1.0}, 0, tmp_path, Split(), variant("vision", vocabulary=260))
    assert sources.image == ImageFormat(patch=4, merge=2, token=259)
