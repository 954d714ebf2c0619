"""Which checkpoints on disk count."""

from __future__ import annotations

from pathlib import Path

import pytest

from shipway.runtime.checkpoint_folder import (
    MARKER,
    Manifest,
    Torn,
    check_files,
    checkpoint_folders,
    folder_of,
    read_marker,
    record,
    remove_old,
    write_marker,
)


def finished(root: Path, step: int) -> Path:
    folder = folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 4)
    files = {"__0_0.distcp": record(folder / "__0_0.distcp")}
    write_marker(folder, Manifest(files, {"step": step}, {}, "sha256:1"))
    return folder


def reason(folder: Path) -> str | None:
    found = read_marker(folder)
    return found.reason if isinstance(found, Torn) else check_files(folder, found, found.files)


def test_finished_checkpoint_reads_back(tmp_path: Path) -> None:
    folder = finished(tmp_path, 7)
    found = read_marker(folder)
    assert isinstance(found, Manifest)
    assert found.progress == {"step": 7}
    assert reason(folder) is None


def damage_truncate(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"short")


def damage_flip(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[100] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def damage_remove(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def damage_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"format": 1, "fil')


def damage_unfinished(folder: Path) -> None:
    (folder / MARKER).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_truncate, "5 bytes, 1024 were written"),
        (damage_flip, "checksum"),
        (damage_remove, "missing"),
        (damage_marker, "cannot be read"),
        (damage_unfinished, "not finished"),
    ],
)
def test_torn_checkpoint_says_why(tmp_path: Path, damage: object, words: str) -> None:
    folder = finished(tmp_path, 1)
    damage(folder)  # type: ignore[operator]
    assert words in (reason(folder) or "")


def test_old_checkpoints_go_and_torn_ones_older_than_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        finished(tmp_path, step)
    damage_unfinished(folder_of(tmp_path, 2))
    in_progress = folder_of(tmp_path, 5)
    in_progress.mkdir()
    remove_old(tmp_path, keep_last=2)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == [
        "step-00000005",
        "step-00000004",
        "step-00000003",
    ]
