"""Files that appear whole or not at all: a full disk leaves what was there before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def write_files(texts: Mapping[Path, str], *, modes: Mapping[Path, int] | None = None) -> None:
    """Write all texts beside their places, then move them there.

    Makes folders that are missing. Raises OSError; where a text cannot be written, none has moved, and
    neither drafts nor new folders stay. A device or pipe is written to as it is.
    """
    drafts = {place: _draft(place) for place in texts if place.is_file() or not place.exists()}
    made: list[Path] = []
    try:
        for place, draft in drafts.items():
            _make_folder(draft.parent, made)
            _write(draft, texts[place], place, (modes or {}).get(place))
        for place, draft in drafts.items():
            os.replace(draft, place.resolve())
    except BaseException:
        with contextlib.suppress(OSError):
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder that is not empty is left
            for folder in reversed(made):
                folder.rmdir()
        raise
    for place in texts.keys() - drafts.keys():
        place.write_bytes(texts[place].encode())


def write_file(place: Path, text: str) -> None:
    """Write one file so that readers see the old one or the new one, never a part; raises OSError."""
    write_files({place: text})


def _draft(place: Path) -> Path:
    """Beside the file itself, also where `place` is a link to it."""
    real = place.resolve()
    return real.with_name(f".{real.name}.new")


def _write(draft: Path, text: str, place: Path, mode: int | None) -> None:
    try:
        draft.write_bytes(text.encode())
    except OSError as error:
        error.filename = str(place)  # what the user knows of
        raise
    if mode is not None:
        draft.chmod(mode)
    elif place.exists():
        shutil.copymode(place, draft)


def _make_folder(folder: Path, made: list[Path]) -> None:
    if not folder.is_dir():
        if folder.parent != folder:
            _make_folder(folder.parent, made)
        folder.mkdir(exist_ok=True)
        made.append(folder)
