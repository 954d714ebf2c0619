"""A layer's backward needs the bytes that are alive when the generated layer runs it, within one per cent."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shipway.compiler.layer_memory import layer_peaks, passed
from shipway.compiler.lower import lower, sources_read
from shipway.compiler.operators.base import Shard
from shipway.runtime.parallel.recompute import apply_recompute
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated
from tests.compiler.operators.models import examples
from tests.compiler.operators.traced_memory import tracing
from tests.compiler.operators.wide_models import wide_models


@dataclass(frozen=True)
class Traced:
    """Bytes, the layer's inputs included."""

    kept: int
    """After forward, without the layer's output."""
    peak: int
    """In backward, gradients of parameters included."""
    log: list[tuple[str, int]]
    """Bytes alive after each operation of backward, to look at where the plan is off."""


class _Ends(torch.autograd.Function):
    """Stands for what follows the layer: it makes the gradients of the layer's outputs."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *outputs: Tensor) -> Tensor:
        ctx.like = outputs[0].new_empty(()).expand(outputs[0].shape)  # type: ignore[attr-defined]
        ctx.count = len(outputs)  # type: ignore[attr-defined]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        like: Tensor = ctx.like  # type: ignore[attr-defined]
        return tuple(like.new_empty(like.shape) for _ in range(ctx.count))  # type: ignore[attr-defined]


def traced(model: Model, layer: int, policy: Recompute, sequences: int, context: int) -> Traced:
    """Forward and backward of one layer of the generated model in bf16."""
    module = generated(model)
    shape = sequences, context, model.width
    received = sources_read(model, layer)
    with pytest.MonkeyPatch.context() as patch, tracing(patch) as alive:
        with alive.ignored():
            whole = _in_bf16(module.Model())
            earlier = [_state(*shape) for _ in range(received[0] - 1 if received else 0)]
            positions = torch.zeros(sequences, context, dtype=torch.int64)
        apply_recompute(whole, policy)
        target = whole.layers[str(layer)]
        given = (
            {"positions": positions}
            if "positions" in inspect.signature(type(target).forward).parameters
            else {}
        )
        x = _state(*shape)
        outputs = target([*earlier, x] if received else x, **given)
        end = _Ends.apply(*(outputs if received else [outputs]))
        del outputs
        kept = alive.now() - end.nbytes
        alive.peak_bytes = 0
        alive.log.clear()
        end.backward()
        return Traced(kept, alive.peak_bytes, list(alive.log))


def _in_bf16(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if not name.endswith(("a_log", "dt_bias", "router.weight")):
            parameter.data = parameter.data.bfloat16()
    return model.train()


def _state(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16).requires_grad_()


def planned_peak(model: Model, layer: int, policy: Recompute, sequences: int, context: int) -> float:
    """Kept bytes and what stands beside them at the peak."""
    part, shard = lower(model).layers[layer], Shard(sequences, context)
    states = part.gradient_states * shard.tokens * model.width * shard.element_bytes
    # Without FSDP the gradients of parameters stay.
    operators = [replace(passed(placed.operator, shard), reduced_apart=False) for placed in part.operators]
    beyond = layer_peaks(operators, states, shard.element_bytes, 0).whole
    if policy != "none":
        beyond = max(beyond, states + part.beside_end(shard))
    return float(part.saved_bytes(shard, "none") + part.left_over(shard, policy) + beyond)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["delta", "latent", "grouped"])
@examples(1)
@given(st.data())
def test_of_drawn_layers(attention: str, policy: Recompute, data: st.DataObject) -> None:
    feed_forward = data.draw(st.sampled_from(["dense", "experts"]))
    model = data.draw(wide_models(attention, feed_forward))
    context = data.draw(st.sampled_from([4096, 16384]))
    expected = traced(model, 1, policy, 2, context)
    kept = lower(model).layers[1].saved_bytes(Shard(2, context), policy)
    assert kept == pytest.approx(expected.kept, rel=0.001)
    assert planned_peak(model, 1, policy, 2, context) == pytest.approx(expected.peak, rel=0.01)
