"""Stand-ins for programs of a cluster, where only what is made of their answers matters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(folder: Path, name: str, script: str) -> Path:
    """A program that notes how it is called in NAME.calls beside it, then does as `script` says."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "$*" >> "{folder}/{name}.calls"\n{script}\n')
    path.chmod(0o755)
    return path


def calls(folder: Path, name: str) -> list[str]:
    """The arguments of each call."""
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def first_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of `folder` hide others of their names."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def alone_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only programs of `folder` are to be found."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(folder))
