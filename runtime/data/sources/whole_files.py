"""Text files in which each file is one record."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.storage import File, LocalStorage, Storage, fingerprint


class WholeFiles:
    """One record per file, UTF-8."""

    blocks = None

    def __init__(self, storage: Storage, files: Sequence[File]) -> None:
        self.count = len(files)
        self.fingerprint = fingerprint(files, "whole files")
        self._storage = storage
        self._files = files

    def read(self, index: int) -> str:
        """The file's text; raises CorruptRecord when it is not UTF-8 or cannot be read."""
        file = self._files[index]
        try:
            content = self._storage.read(file.path, 0, file.size_bytes)
        except OSError as error:
            raise CorruptRecord(file.path, str(error)) from error
        return decode_utf8(content, file.path)


def decode_utf8(content: bytes, where: str, first_line: int = 1) -> str:
    """Text of `content`; raises CorruptRecord that names the line of the first bad byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise CorruptRecord(f"{where}:{line}", f"not UTF-8: {error.reason}") from error


def python_stdlib() -> WholeFiles:
    """The running Python's standard library: every .py file that is UTF-8, installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    storage = LocalStorage()
    files = storage.list(str(root), skip=frozenset({"site-packages", "dist-packages", "__pycache__"}))
    files = [file for file in files if file.name.endswith(".py") and _is_utf8(file.path)]
    return WholeFiles(storage, files)


def _is_utf8(path: str) -> bool:
    """Some of the library's tests are files in other encodings, on purpose."""
    try:
        Path(path).read_bytes().decode()
    except (UnicodeDecodeError, OSError):
        return False
    return True
