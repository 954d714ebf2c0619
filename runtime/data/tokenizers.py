"""From text to tokens: UTF-8 bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.errors import DataError
from shipway.schemas.training import BytesTokenizer, FileTokenizer

if TYPE_CHECKING:
    import tokenizers

Tokens = NDArray[np.int32]


class Tokenizer(Protocol):
    """Text in, token ids out; `hash` names the mapping, so that packed shards can be held against it."""

    vocabulary: int
    """Ids run from 0 to vocabulary - 1."""
    end: int
    """Put after every document."""
    padding: int
    """Fills what no document can; its label is always ignored."""
    hash: str

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each text, without any begin or end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens; special tokens are left out."""


class ByteLevel:
    """UTF-8 bytes as tokens 0 to 255, then begin (256), end (257) and padding (258)."""

    vocabulary = 259
    begin = 256
    end = 257
    padding = 258
    hash = "bytes-259"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """One token per byte."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes; what is not UTF-8 becomes the replacement character."""
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class HuggingFaceFile:
    """A `tokenizer.json`, through the `tokenizers` library."""

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        self._tokenizer = _read_tokenizer(path)
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.end = _end_token(self._tokenizer, path, end_of_document)
        # Padding never reaches the loss, so a file without a padding token may reuse the end token.
        padding = self._tokenizer.token_to_id("<pad>")
        self.padding = self.end if padding is None else padding
        content = self._tokenizer.to_str(pretty=False) + f"\0{self.end}"
        self.hash = "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each text; the library uses several threads for several texts."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens."""
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=True))


def make_tokenizer(config: BytesTokenizer | FileTokenizer, folder: Path) -> Tokenizer:
    """The tokenizer a blueprint names; relative paths are looked up in `folder`. Raises DataError."""
    if isinstance(config, BytesTokenizer):
        return ByteLevel()
    return HuggingFaceFile(folder / Path(config.path).expanduser(), config.end_of_document)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    import tokenizers  # the byte tokenizer needs none of it

    if not path.is_file():
        raise DataError(f"tokenizer file {path} does not exist")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise DataError(f"{path} is not a Hugging Face tokenizer file: {error}") from error
    # A file may carry truncation or padding from its last use; both would alter documents in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


_USUAL_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")


def _end_token(tokenizer: tokenizers.Tokenizer, path: Path, name: str | None) -> int:
    candidates = _USUAL_END_TOKENS if name is None else (name,)
    for candidate in candidates:
        token = tokenizer.token_to_id(candidate)
        if token is not None:
            return int(token)
    if name is not None:
        raise DataError(f"{path} has no token {name!r}; set `end_of_document` to one of its tokens")
    usual = ", ".join(_USUAL_END_TOKENS)
    raise DataError(f"{path} has none of the usual end tokens ({usual}); name one in `end_of_document`")
