"""A copy of the state in host memory, so that training may change what is being written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def stage(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copies of all tensors; sharded ones keep their mesh and placements, so DCP knows their offsets."""
    staged = {section: {name: _copy(t) for name, t in tensors.items()} for section, tensors in state.items()}
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return staged


def _copy(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return _to_host(tensor)
    # DTensor.from_local would move the copy back to the mesh's device.
    return DTensor(_to_host(tensor.to_local()), tensor._spec, requires_grad=False)


def _to_host(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    if local.device.type == "cpu":
        return local.clone()
    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
    return host.copy_(local, non_blocking=True)
