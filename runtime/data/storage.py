"""Files by path or by URL: local ones through the operating system, `s3://` and the like through fsspec."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from shipway.runtime.data.errors import DataError


@dataclass(frozen=True)
class File:
    """One file of a source."""

    path: str
    """What `Storage` opens."""
    name: str
    """Path relative to the source's root: what fingerprints and messages speak of."""
    size_bytes: int
    version: str = ""
    """Modification time or entity tag: changes with the content, and when the file moves."""


class Storage(Protocol):
    """Reads parts of files; safe to use from several threads."""

    def list(self, root: str, skip: frozenset[str] = frozenset()) -> Sequence[File]:
        """The file `root`, or all files below the folder `root`, sorted by name; raises DataError.

        Hidden files and folders, and folders named in `skip`, are left out.
        """

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes start..stop-1, fewer where the file ends before."""

    def open(self, path: str) -> IO[bytes]:
        """A seekable file for reading."""


class LocalStorage:
    """The operating system's files."""

    def list(self, root: str, skip: frozenset[str] = frozenset()) -> Sequence[File]:
        """One walk over the tree."""
        path = Path(root)
        if path.is_file():
            return [_local_file(str(path), path.name)]
        if not path.is_dir():
            raise DataError(f"{root} does not exist")
        found = []
        for folder, folders, names in os.walk(path):
            folders[:] = [f for f in folders if not _is_hidden(f) and f not in skip]
            inside = Path(folder).relative_to(path)
            for name in names:
                if not _is_hidden(name):
                    found.append(_local_file(os.path.join(folder, name), (inside / name).as_posix()))
        return sorted(found, key=lambda file: file.name)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """One positioned read."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, stop - start, start)
        finally:
            os.close(descriptor)

    def open(self, path: str) -> IO[bytes]:
        """Python's own file."""
        return open(path, "rb")


class RemoteStorage:
    """Whatever fsspec speaks: s3://, gs://, abfs://, memory://, ... (each needs its own package)."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def list(self, root: str, skip: frozenset[str] = frozenset()) -> Sequence[File]:
        """One listing of everything below the root."""
        inside = self._filesystem._strip_protocol(root).rstrip("/")
        found = self._filesystem.find(inside, detail=True)
        if not found:
            raise DataError(f"{root} does not exist, or holds nothing that can be listed")
        files = [
            File(path, _relative(path, inside), int(info["size"]), str(info.get("ETag") or info.get("mtime")))
            for path, info in found.items()
        ]
        return sorted((f for f in files if not _is_left_out(f.name, skip)), key=lambda file: file.name)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """One range request."""
        return bytes(self._filesystem.cat_file(path, start=start, end=stop))

    def open(self, path: str) -> IO[bytes]:
        """fsspec's buffered file."""
        file: IO[bytes] = self._filesystem.open(path, "rb")
        return file


def open_storage(path: str, folder: Path) -> tuple[Storage, str]:
    """The storage behind `path`, and the path to give it; local paths are relative to `folder`.

    Raises DataError when the URL's scheme is unknown or its package is not installed.
    """
    if "://" not in path:
        return LocalStorage(), str(folder / Path(path).expanduser())
    import fsspec  # only remote sources need it

    scheme = path.split("://", 1)[0]
    try:
        filesystem, _ = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot reach {scheme}:// storage: {error}") from error
    return RemoteStorage(filesystem), path


def fingerprint(files: Iterable[File], *options: object) -> str:
    """Hash of names and sizes, and of whatever else decides what the records are."""
    digest = hashlib.sha256("\0".join(str(option) for option in options).encode())
    for file in files:
        digest.update(f"{file.name}\t{file.size_bytes}\n".encode())
    return digest.hexdigest()[:16]


def _relative(path: str, root: str) -> str:
    inside = path[len(root) :].lstrip("/") if path.startswith(root) else path
    return inside or path.rsplit("/", 1)[-1]


def _local_file(path: str, name: str) -> File:
    status = os.stat(path)
    return File(path, name, status.st_size, str(status.st_mtime_ns))


def _is_left_out(name: str, skip: frozenset[str]) -> bool:
    parts = name.split("/")
    return any(_is_hidden(part) for part in parts) or not skip.isdisjoint(parts[:-1])


def _is_hidden(name: str) -> bool:
    """Also what writers leave beside their output, such as _SUCCESS and .crc files."""
    return name.startswith((".", "_SUCCESS"))
