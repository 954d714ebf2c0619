"""A whole model on one device, from the checkpoint that any layout wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from shipway.runtime.average import SECTION
from shipway.runtime.checkpoint_folder import (
    MARKER,
    Manifest,
    check_files,
    checkpoint_folders,
    read_marker,
    record,
    write_marker,
)
from shipway.runtime.exit_codes import Fatal

Weights = Literal["average", "last"]


def choose_checkpoint(folder: Path, passed_over: Callable[[Path, str], None] | None = None) -> Path:
    """`folder` if it is a checkpoint, else the newest whole one in it; raises Fatal when there is none.

    `passed_over` is told each newer checkpoint that cannot be read, and why.
    """
    if (folder / MARKER).exists():
        return folder
    for candidate in checkpoint_folders(folder):
        reason = broken(candidate)
        if reason is None:
            return candidate
        if passed_over is not None:
            passed_over(candidate, reason)
    raise Fatal(f"{folder} has no finished checkpoint: train first, or wait for the first save")


def origin_of(checkpoint: Path) -> str:
    """A checkpoint in words: its run and step where it stands in a run, else its folder."""
    number = checkpoint.name.removeprefix("step-")
    if checkpoint.parent.name != "checkpoints" or not number.isdigit():
        return str(checkpoint)
    return f"{checkpoint.parent.parent}, step {int(number)}"


def broken(folder: Path) -> str | None:
    """Why a checkpoint cannot be read; None when it is whole."""
    found = read_marker(folder)
    return check_files(folder, found, found.files) if isinstance(found, Manifest) else found.reason


def empty_model(module: ModuleType, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The generated model in evaluation mode, not yet filled, in `dtype` but for what it keeps in fp32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model: nn.Module = module.Model()
    finally:
        torch.set_default_dtype(default)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()  # counters are in no checkpoint
    return model.eval()


def load_model(
    module: ModuleType,
    checkpoint: Path,
    device: torch.device,
    dtype: torch.dtype,
    weights: Weights | None = None,
) -> nn.Module:
    """The generated model with a checkpoint's weights; raises Fatal when it is torn or of another model.

    `weights` says which; by default their moving average where the checkpoint has one.
    """
    reason = broken(checkpoint)
    if reason is not None:
        raise Fatal(f"{checkpoint} cannot be read: {reason}")
    model = empty_model(module, device, dtype)
    state = {"model": model.state_dict()}
    if _has_average(checkpoint, weights):
        # Buffers, the balancing biases among them, have no average.
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        state[SECTION] = {name: state["model"].pop(name) for name in names}
    try:
        with _alone():
            dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise Fatal(f"{checkpoint} does not fit this model: {lines[-1] if lines else error}") from error
    return model


def _has_average(checkpoint: Path, weights: Weights | None) -> bool:
    """Whether to read the moving average; raises Fatal when it is asked for and not there."""
    if weights == "last":
        return False
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    found = any(name.startswith(f"{SECTION}.") for name in metadata.state_dict_metadata)
    if weights == "average" and not found:
        raise Fatal(f"{checkpoint} has no moving average of the weights: its plan sets no training.ema")
    return found


def save_weights(model: nn.Module, folder: Path, plan_hash: str) -> None:
    """Write a checkpoint of the model's weights alone, as one process."""
    folder.mkdir(parents=True, exist_ok=True)
    with _alone():
        state = {"model": model.state_dict()}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    files = {path.name: record(path) for path in folder.iterdir() if path.name != MARKER}
    write_marker(folder, Manifest(files, progress={}, layout={}, plan_hash=plan_hash))


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that there is no process group: none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
