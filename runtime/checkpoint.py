"""Saving and restoring all state of a run through torch's distributed checkpoint, in any layout.

Saving copies the state, then writes in a background thread that talks over a gloo group of its own.
A save waits for the one before it, so that back-to-back saves cannot meet. Tensors go through DCP,
which reshards on load; everything else is plain data in the completion marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from shipway.runtime.checkpoint_folder import (
    MARKER,
    FileRecord,
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
from shipway.runtime.checkpoint_staging import stage
from shipway.runtime.distributed import HostGroups
from shipway.runtime.exit_codes import Fatal, Retryable
from shipway.schemas.layout import Layout

State = dict[str, dict[str, Tensor]]


@dataclass
class Checkpointer:
    """Writes and reads the checkpoints of one run."""

    root: Path
    groups: HostGroups
    keep_last: int
    asynchronous: bool
    plan_hash: str
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _pending: Future[None] | None = None

    def save(self, step: int, state: State, progress: Mapping[str, Any], layout: Layout) -> None:
        """Save `state` (sections of named tensors) and plain `progress`; every rank must call it.

        Returns once the state is copied, or, when not asynchronous, written. Raises Retryable when
        this save, or the background save before it, could not be written.
        """
        self.wait()
        staged = stage(state)
        folder = folder_of(self.root, step)
        self._pending = self._executor.submit(self._write, folder, staged, progress, layout)
        if not self.asynchronous:
            self.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight is over and could not be written; `wait` says why."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait for the save in flight, if any; raises Retryable when it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, CheckpointException, RuntimeError) as error:
            raise Retryable(f"a checkpoint could not be written to {self.root}: {_reason(error)}") from error

    def close(self) -> None:
        """Wait for the save in flight and stop the background thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _write(self, folder: Path, state: State, progress: Mapping[str, Any], layout: Layout) -> None:
        group = self.groups.checkpoint
        rank = dist.get_rank()
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARKER).unlink(missing_ok=True)
        dist.barrier(group)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
        mine = {path.name: record(path) for path in folder.glob(f"__{rank}_*")}
        if rank == 0:
            mine[".metadata"] = record(folder / ".metadata")
        gathered: list[dict[str, FileRecord]] | None = [{}] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=group)
        if gathered is not None:
            files = {name: entry for part in gathered for name, entry in part.items()}
            manifest = Manifest(files, progress, layout.model_dump(mode="json"), self.plan_hash)
            write_marker(folder, manifest)
            remove_old(self.root, self.keep_last)
        dist.barrier(group)

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest whole checkpoint, verified by all ranks together; None when there is none.

        Ranks read disjoint files. Torn checkpoints are reported by rank 0 and passed over.
        """
        for folder in self._agreed_folders():
            found = read_marker(folder)
            reason = found.reason if isinstance(found, Torn) else self._verify(folder, found)
            reason = self._first_reason(reason)
            if reason is None and isinstance(found, Manifest):
                return folder, found
            if dist.get_rank() == 0:
                print(f"checkpoint {folder.name} is passed over: {reason}", flush=True)
        return None

    def restore(self, folder: Path, state: State) -> None:
        """Read tensors into `state` in place, whatever layout wrote them; raises Fatal with the reason."""
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), process_group=self.groups.checkpoint)
        except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise Fatal(f"{folder} cannot be restored into this model: {_reason(error)}") from error

    def saved_names(self, folder: Path) -> set[str]:
        """Names of all tensors in a checkpoint, `section.name`."""
        return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)

    def _agreed_folders(self) -> list[Path]:
        """Rank 0's view of the folders, so that all ranks walk the same list."""
        names = [[f.name for f in checkpoint_folders(self.root)] if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(names, src=0, group=self.groups.control)
        return [self.root / name for name in names[0]]

    def _verify(self, folder: Path, manifest: Manifest) -> str | None:
        names = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        return check_files(folder, manifest, names)

    def _first_reason(self, reason: str | None) -> str | None:
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason, group=self.groups.control)
        return next((r for r in reasons if r is not None), None)


def _reason(error: BaseException) -> str:
    """The innermost message of an error that DCP has wrapped rank by rank."""
    if isinstance(error, CheckpointException):
        for rank, (failure, _) in sorted(error.failures.items()):
            return f"rank {rank}: {type(failure).__name__}: {failure}"
    return f"{type(error).__name__}: {error}"


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Random state of this rank, under names of its own."""
    rank = dist.get_rank()
    state = {f"cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Undo `rng_state`."""
    rank = dist.get_rank()
    torch.set_rng_state(state[f"cpu.{rank}"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"cuda.{rank}"], device)
