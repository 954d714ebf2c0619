"""Data parallel: FSDP2 over dp_shard x cp, replicas above it, gradient sums that follow micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import Mesh
from shipway.runtime.shards import local_tensor
from shipway.schemas.training import Precision

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FP32_SUFFIXES = ("a_log", "dt_bias")
"""Vectors that stay in fp32 whatever the compute precision. FSDP casts a whole group to one dtype, so
they are left out of it: replicated, a few hundred kilobytes a layer, their gradients summed apart."""


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that FSDP does not manage, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.rsplit(".", 1)[-1] in FP32_SUFFIXES
    }


def apply_fsdp(model: nn.Module, mesh: Mesh, precision: Precision) -> None:
    """Shard every layer as a group of its own, routed experts over their own mesh, the rest at the root.

    zero 3 frees gathered layers after forward; 2 keeps them until backward, 1 over all micro-batches of a
    step. Router scores are computed from fp32 weights.
    """
    compute, reduce = DTYPES[precision.activations], DTYPES[precision.gradients]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    reshard = mesh.layout.zero == 3
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": policy,
        "ignored_params": set(replicated_parameters(model).values()),
        "shard_placement_fn": partial(_placement, mesh.size("fsdp")),
    }
    for layer in all_layers(model).values():
        feed_forward = layer.feed_forward
        if hasattr(feed_forward, "experts"):
            fully_shard(
                feed_forward.experts,
                mesh=mesh.expert_fsdp,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=partial(_placement, mesh.size("expert_shard")),
            )
            fully_shard(feed_forward.router, mesh=mesh.fsdp, mp_policy=exact, reshard_after_forward=reshard)
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    if mesh.size("dp_replicate") * mesh.size("fsdp") * mesh.size("expert_shard") == 1:
        return  # nothing is averaged among one, and dividing by one would cost a copy of every gradient
    for module in fsdp_modules(model):
        # The loss is divided by the global count of tokens, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def all_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers by name, those inside prediction modules too."""
    predictions = getattr(model, "prediction", None) or ()
    further = {f"prediction.{i}": prediction.layer for i, prediction in enumerate(predictions)}
    return dict(model.layers.items()) | further


def _placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """FSDP's dimension of a parameter: the first, unless it is split already and unevenly so.

    What is sharded twice along one dimension must divide evenly, and so must any dimension but the first.
    A stack of fewer experts than ranks takes any dimension that does, rather than be padded with experts.
    """
    split = {p.dim for p in parameter.placements} if isinstance(parameter, DTensor) else set()
    first = local_tensor(parameter).shape[0]
    if first % ranks == 0 or (0 not in split and (parameter.ndim < 3 or first >= ranks)):
        return Shard(0)
    for dimension in range(1, parameter.ndim):
        if dimension not in split and parameter.shape[dimension] % ranks == 0:
            return Shard(dimension)
    if 0 not in split:
        return Shard(0)
    raise Fatal(
        f"{ranks} ranks cannot share a block of shape {tuple(local_tensor(parameter).shape)} evenly:"
        " choose another data_parallel_shard, tensor_parallel or expert_parallel"
    )


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Modules that FSDP manages a group for."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that no backward will free, after a forward on its own."""
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, zero: int, last: bool) -> None:
    """Say before a micro-batch's forward what its backward reduces and frees.

    Under zero 2 and 3 every micro-batch reduces into the shard, so that no whole gradient outlives its
    layer; replicas are summed once, after the last. Under zero 1 gradients add up whole, and parameters
    stay gathered, until the last micro-batch reduces and frees them.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if zero == 1:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    else:
        model.set_requires_all_reduce(last)


def reduce_replicated(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Sum the gradients of parameters that FSDP does not manage over the data-parallel axes."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if not gradients or mesh.size("fsdp") * mesh.size("dp_replicate") == 1:
        return
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    flat = torch.cat([g.reshape(-1) for g in local])
    for axis in ("fsdp", "dp_replicate"):
        if mesh.size(axis) > 1:
            dist.all_reduce(flat, group=mesh.group(axis))
    for gradient, part in zip(local, flat.split([g.numel() for g in local]), strict=True):
        gradient.copy_(part.view_as(gradient))
