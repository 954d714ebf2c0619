"""JSON Lines: one object per line, with the text in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.sources.lines import Lines, decode_utf8
from shipway.runtime.data.storage import File, Storage, fingerprint


class JsonLines:
    """One record per line; blank lines are empty records."""

    blocks = None

    def __init__(self, storage: Storage, files: Sequence[File], text_field: str, cache: Path | None) -> None:
        self._lines = Lines(storage, files, cache)
        self._text_field = text_field
        self.count = self._lines.count
        self.fingerprint = fingerprint(files, "json lines", text_field)

    def read(self, index: int) -> str:
        """The record's text; raises CorruptRecord for bad UTF-8, bad JSON, or a field that is no text."""
        content, place = self._lines.read(index)
        line = decode_utf8(content, place.file, lambda: place.line)
        if not line.strip():
            return ""
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CorruptRecord(str(place), f"not JSON: {error}") from error
        text = record.get(self._text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise CorruptRecord(str(place), f"no text in field {self._text_field!r}")
        return _without_surrogates(text, str(place))


def _without_surrogates(text: str, where: str) -> str:
    r"""JSON can spell half a character (\ud83d alone), which no UTF-8 text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorruptRecord(where, f"not Unicode text: {error.reason}") from error
    return text
