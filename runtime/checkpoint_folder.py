"""A checkpoint on disk: which folders are finished and whole, which are torn, which may go.

    checkpoints/step-00000120/   .metadata, __0_0.distcp, ...   written by torch's distributed checkpoint
                                 complete.json                  written last: files, checksums, progress

A folder without a marker, or with a file that differs from it, is torn: it is reported and passed over.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARKER = "complete.json"
MARKER_FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What the completion marker says."""

    files: Mapping[str, FileRecord]
    progress: Mapping[str, Any]
    """Plain state: stage, steps, tokens, data position, optimizer step."""
    layout: Mapping[str, Any]
    """Layout that wrote it, for the record; any layout can read it."""
    plan_hash: str


@dataclass(frozen=True)
class Torn:
    """A folder that cannot be used, and why."""

    folder: Path
    reason: str


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint taken after `step` optimizer steps of the whole programme."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Inverse of `folder_of`."""
    return int(folder.name.removeprefix("step-"))


def checkpoint_folders(root: Path) -> list[Path]:
    """All checkpoint folders, newest first, whole or not."""
    return sorted((f for f in root.glob("step-*") if f.name[5:].isdigit()), key=step_of, reverse=True)


def record(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileRecord(size, crc)


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Declare a checkpoint finished: everything in it is on disk before the marker has its name."""
    for name in manifest.files:
        _sync(folder / name)
    data = {"format": MARKER_FORMAT, **asdict(manifest)}
    draft = folder / (MARKER + ".draft")
    draft.write_text(json.dumps(data, indent=1, sort_keys=True))
    _sync(draft)
    draft.rename(folder / MARKER)
    _sync(folder)


def read_marker(folder: Path) -> Manifest | Torn:
    """The marker's content, or why there is none; file contents are not looked at."""
    try:
        data = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return Torn(folder, "it was not finished: there is no completion marker")
    except (OSError, ValueError) as error:
        return Torn(folder, f"its completion marker cannot be read: {error}")
    if data.get("format") != MARKER_FORMAT:
        return Torn(folder, f"its marker has format {data.get('format')}, this version reads {MARKER_FORMAT}")
    files = {name: FileRecord(**entry) for name, entry in data["files"].items()}
    return Manifest(files, data["progress"], data["layout"], data["plan_hash"])


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Why a checkpoint is torn, looking at `names` of its files; None when they are as written."""
    for name in names:
        expected = manifest.files[name]
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected.bytes:
            return f"{name} has {size} bytes, {expected.bytes} were written"
        if record(folder / name).crc32 != expected.crc32:
            return f"{name} differs from what was written (checksum)"
    return None


def remove_old(root: Path, keep_last: int) -> None:
    """Delete finished checkpoints but the last `keep_last`, and torn ones older than those kept."""
    finished = [f for f in checkpoint_folders(root) if isinstance(read_marker(f), Manifest)]
    kept = finished[:keep_last]
    for folder in checkpoint_folders(root):
        if folder not in kept and kept and step_of(folder) < step_of(kept[0]):
            # The marker goes first, so that a half-deleted folder is never taken for a whole one.
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
