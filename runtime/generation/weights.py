"""A whole model on one device, from the checkpoint that any layout wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from shipway.runtime.checkpoint_folder import Manifest, check_files, checkpoint_folders, read_marker
from shipway.runtime.exit_codes import Fatal


def newest_checkpoint(root: Path) -> Path:
    """The newest whole checkpoint below `root`; raises Fatal when there is none."""
    for folder in checkpoint_folders(root):
        if broken(folder) is None:
            return folder
    raise Fatal(f"{root} has no finished checkpoint: train first, or wait for the first save")


def broken(folder: Path) -> str | None:
    """Why a checkpoint cannot be read; None when it is whole."""
    found = read_marker(folder)
    return check_files(folder, found, found.files) if isinstance(found, Manifest) else found.reason


def load_model(module: ModuleType, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The generated model in evaluation mode, its weights in `dtype` but for those it keeps in fp32.

    Raises Fatal when the checkpoint is torn or of another model.
    """
    reason = broken(checkpoint)
    if reason is not None:
        raise Fatal(f"{checkpoint} cannot be read: {reason}")
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
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so we ask
            state = {"model": model.state_dict()}
            dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise Fatal(f"{checkpoint} does not fit this model: {lines[-1] if lines else error}") from error
    return model.eval()
