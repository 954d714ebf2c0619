"""Modules whose parameters are sharded by tensor or expert parallel, computing with this rank's part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class LocalView:
    """A module whose sharded parameters read as this rank's part; all else is the module's own.

    Passed as `self` to the generated forward, so that model code sees plain tensors. The gradient of
    a part is a sharded gradient: nothing is communicated.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def local_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that the model's code gives `module`, with local parameters."""
    return type(module).forward(LocalView(module), *args, **kwargs)  # type: ignore[arg-type]


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dimension: int) -> None:
    """Replace a parameter by this rank's even part of it along `dimension`; the values must be undrawn.

    The parameter becomes a DTensor, so that FSDP, optimizers and checkpoints know what it is a part of.
    """
    whole: Tensor = getattr(module, name)
    part = whole.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous()
    sharded = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
    setattr(module, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
