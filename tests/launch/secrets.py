"""A secret in the environment of whoever launches, and a search for it in everything that was written."""

from __future__ import annotations

from pathlib import Path

SECRET = "not-to-be-written-anywhere-7f3a"


def files_with(secret: str, folder: Path) -> list[Path]:
    """Files below `folder` that have the secret in them."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if secret.encode() in path.read_bytes()]
