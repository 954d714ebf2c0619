from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.tokenizers import ByteLevel, make_tokenizer
from shipway.schemas.training import BytesTokenizer, FileTokenizer

TEXT = "def function(argument): return argument + 1\n" * 20


def write_tokenizer(path: Path, special: list[str], *, truncated: bool = False) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if truncated:
        tokenizer.enable_truncation(max_length=5)
        tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteLevel()
    (tokens,) = tokenizer.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([tokenizer.begin, *tokens.tolist(), tokenizer.end, tokenizer.padding]) == text


def test_bytes_have_259_tokens() -> None:
    tokenizer = make_tokenizer(BytesTokenizer(), Path())
    assert (tokenizer.vocabulary, tokenizer.end, tokenizer.padding) == (259, 257, 258)


def test_a_file_encodes_whole_documents_whatever_its_last_user_set(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a.json", ["<|endoftext|>"], truncated=True)
    tokenizer = make_tokenizer(FileTokenizer(path="a.json"), tmp_path)
    long, short = tokenizer.encode([TEXT, "x"])
    assert tokenizer.decode(long.tolist()) == TEXT
    assert tokenizer.decode(short.tolist()) == "x"
    assert len(long) < len(TEXT) / 2
    assert tokenizer.end not in long
    assert max(long) < tokenizer.vocabulary <= 300


def test_the_end_token_may_be_named_and_changes_the_hash(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a.json", ["</s>", "<stop>"])
    usual = make_tokenizer(FileTokenizer(path="a.json"), tmp_path)
    named = make_tokenizer(FileTokenizer(path="a.json", end_of_document="<stop>"), tmp_path)
    assert (usual.end, named.end) == (0, 1)
    assert usual.hash != named.hash


def test_mistakes_are_explained(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a.json", ["<x>"])
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(DataError, match="none of the usual end tokens"):
        make_tokenizer(FileTokenizer(path="a.json"), tmp_path)
    with pytest.raises(DataError, match="has no token '<y>'"):
        make_tokenizer(FileTokenizer(path="a.json", end_of_document="<y>"), tmp_path)
    with pytest.raises(DataError, match="is not a Hugging Face tokenizer file"):
        make_tokenizer(FileTokenizer(path="b.json"), tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        make_tokenizer(FileTokenizer(path="c.json"), tmp_path)
