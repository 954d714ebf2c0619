"""Folders of safetensors shards with their index and config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shipway.runtime.exit_codes import Fatal

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Size after which a new shard begins, as the hub's own tools have it."""


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write named tensors and their config; returns the files. The index is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    shards, total = list(_shards(tensors, shard_bytes)), 0
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: t.contiguous() for name, t in shard.items()}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    files = [CONFIG, *dict.fromkeys(where.values()), *([INDEX] if len(shards) > 1 else [])]
    return [folder / file for file in files]


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@dataclass(frozen=True)
class PublishedFolder:
    """Published files that tensors are read from by name."""

    folder: Path
    config: Mapping[str, Any]
    where: Mapping[str, str]
    """File of each tensor."""

    def read(self, name: str) -> Tensor:
        """One tensor; raises KeyError when the folder has none of that name."""
        with safe_open(self.folder / self.where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def open_folder(folder: Path) -> PublishedFolder:
    """Open a folder; raises Fatal when it is none of published weights."""
    if not folder.is_dir():
        raise Fatal(f"{folder} " + ("is no folder" if folder.exists() else "does not exist"))
    weights = INDEX if (folder / INDEX).exists() else SINGLE
    if missing := [name for name in (CONFIG, weights) if not (folder / name).exists()]:
        raise Fatal(f"{folder} is no folder of published weights: it has no {' and no '.join(missing)}")
    try:
        config = json.loads((folder / CONFIG).read_text())
        if weights == INDEX:
            where = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            with safe_open(folder / SINGLE, framework="pt") as file:
                where = dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Fatal(f"{folder} is no folder of published weights: {error}") from error
    return PublishedFolder(folder, config, where)
