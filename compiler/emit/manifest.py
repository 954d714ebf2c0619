"""The manifest of a build folder: what Shipway wrote, so that what a user edited can be told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath

from shipway.compiler.frozen import frozen

MANIFEST = ".shipway-manifest.json"


@frozen
class Manifest:
    """Hashes of the files of a build folder."""

    plan_hash: str
    files: Mapping[str, str]
    """SHA-256 by path within the folder."""

    @classmethod
    def of(cls, plan_hash: str, texts: Mapping[str, str]) -> Manifest:
        """The manifest of files with these texts."""
        return cls(plan_hash, {path: _hash(text.encode()) for path, text in texts.items()})

    def wrote(self, path: str, content: bytes) -> bool:
        """Whether Shipway wrote this content there."""
        return self.files.get(path) == _hash(content)

    def text(self) -> str:
        """Canonical JSON."""
        data = {"format": 1, "plan": self.plan_hash, "files": dict(self.files)}
        return json.dumps(data, sort_keys=True, indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; an empty one where none can be read: then every file is the user's."""
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        files = {path: str(value) for path, value in data["files"].items() if _inside(path)}
        return Manifest(str(data["plan"]), files)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return Manifest("", {})


def _inside(path: str) -> bool:
    return not PurePath(path).is_absolute() and ".." not in PurePath(path).parts


def _hash(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
