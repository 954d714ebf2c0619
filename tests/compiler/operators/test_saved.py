"""Bytes kept for backward are what autograd keeps of the generated model, within one per cent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from shipway.compiler.evaluate import STAGED_STATES
from shipway.compiler.lower import LoweredModel, lower
from shipway.compiler.operators.base import Shard
from shipway.runtime.parallel.offload import HostInputs, apply_offloaded_recompute
from shipway.runtime.parallel.recompute import apply_recompute
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated, initialised
from tests.compiler.operators.measure import held_bytes, saved_bytes
from tests.compiler.operators.models import examples, models

PRECISIONS = [torch.float32, torch.bfloat16]
contexts = st.sampled_from([96, 128, 130])


def plain_shard(sequences: int, context: int, dtype: torch.dtype) -> Shard:
    return Shard(sequences, context, element_bytes=dtype.itemsize, implementation="plain")


def stated_bytes(lowered: LoweredModel, shard: Shard, policy: Recompute) -> float:
    return sum(part.saved_bytes(shard, policy) for _, part in lowered.placed_parts())


def stated_for_module(lowered: LoweredModel, path: str, shard: Shard) -> float:
    """Bytes of the operators that stand at or under `path` in the first layer."""
    return sum(
        tensor.bytes
        for placed in lowered.layers[0].operators
        if placed.path == path or placed.path.startswith(f"{path}.")
        for tensor in placed.operator.saved(shard, "none")
    )


def kept_by(module: nn.Module, width: int, context: int, dtype: torch.dtype) -> int:
    """Bytes that a sublayer keeps of two sequences, its input included where it keeps that."""
    source = torch.randn(2, context, width, dtype=dtype, requires_grad=True)
    positions = torch.arange(context).expand(2, context)

    def forward() -> Tensor:
        x = source * 1  # made here, as the norm before it would
        rotated = "positions" in module.forward.__code__.co_varnames
        return module(x, positions=positions) if rotated else module(x)

    return saved_bytes(forward, module.parameters())


@pytest.mark.parametrize("kind", ["delta", "latent", "grouped"])
@examples(12)
@given(st.data())
def test_attention(kind: str, data: st.DataObject) -> None:
    model = data.draw(models(attention=(kind,), layers=1))
    context, dtype = data.draw(contexts), data.draw(st.sampled_from(PRECISIONS))
    layer = initialised(generated(model).Model(), dtype).layers["0"]
    stated = stated_for_module(lower(model), "attention", plain_shard(2, context, dtype))
    assert stated == pytest.approx(kept_by(layer.attention, model.width, context, dtype), rel=0.01)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@examples(15)
@given(st.data())
def test_feed_forward(kind: str, data: st.DataObject) -> None:
    model = data.draw(models(feed_forward=(kind,), layers=1))
    context, dtype = data.draw(contexts), data.draw(st.sampled_from(PRECISIONS))
    layer = initialised(generated(model).Model(), dtype).layers["0"]
    stated = stated_for_module(lower(model), "feed_forward", plain_shard(2, context, dtype))
    assert stated == pytest.approx(kept_by(layer.feed_forward, model.width, context, dtype), rel=0.01)


@examples(12)
@given(models(), contexts, st.sampled_from(PRECISIONS))
def test_whole_model(model: Model, context: int, dtype: torch.dtype) -> None:
    module = initialised(generated(model).Model(), dtype)
    tokens = torch.randint(0, model.vocabulary, (2, context))
    kept = saved_bytes(lambda: module(tokens, tokens), module.parameters())
    assert stated_bytes(lower(model), plain_shard(2, context, dtype), "none") == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@examples(8)
@given(models(), contexts)
def test_recomputation_as_the_runtime_applies_it(policy: Recompute, model: Model, context: int) -> None:
    module = initialised(generated(model).Model())
    apply_recompute(module, policy)
    tokens = torch.randint(0, model.vocabulary, (2, context))
    held = held_bytes(lambda: module(tokens, tokens))
    stated = stated_bytes(lower(model), plain_shard(2, context, torch.float32), policy)
    ids = 8 * tokens.numel()  # made by the data loader, not by the model
    assert stated == pytest.approx(held + ids, rel=0.01)


@examples(4)
@given(models(), contexts)
def test_what_waits_in_host_memory(model: Model, context: int) -> None:
    assume(model.residual.kind != "full")
    module = initialised(generated(model).Model())
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        pack = HostInputs.pack

        def counting(inputs: HostInputs, tensor: Tensor) -> Any:
            kept = pack(inputs, tensor)
            sent.append(0 if kept is tensor else tensor.nbytes)
            return kept

        patch.setattr(HostInputs, "pack", counting)
        apply_offloaded_recompute(module, torch.device("cpu"))
        tokens = torch.randint(0, model.vocabulary, (2, context))
        held = held_bytes(lambda: module(tokens, tokens))
    lowered, shard = lower(model), plain_shard(2, context, torch.float32)
    hidden = 2 * context * model.width * 4
    moved = sum(part.movable_states for _, part in lowered.placed_parts()) * hidden
    assert sum(sent) == moved
    # Here host and device are one: what waits is held too, and those that still leave, twice.
    leaving = min(STAGED_STATES * hidden, moved)
    held += 8 * tokens.numel()  # ids, made by the data loader
    assert stated_bytes(lowered, shard, "full") == pytest.approx(held - leaving, rel=0.02)


@examples(8)
@given(models(layers=1, vision=True), st.sampled_from(PRECISIONS), st.integers(1, 3))
def test_vision(model: Model, dtype: torch.dtype, images: int) -> None:
    assert model.vision is not None
    module = initialised(generated(model).Model(), dtype)
    side = 4 * model.vision.merge
    patches = images * side * side
    pixels = torch.randn(patches, 3 * model.vision.patch**2, dtype=dtype)
    grids = torch.tensor([[side, side]] * images)
    kept = saved_bytes(lambda: module.vision(pixels, grids), module.parameters())
    shard = Shard(
        1,
        128,
        element_bytes=dtype.itemsize,
        implementation="plain",
        patches=patches,
        patches_per_image=side * side,
    )
    part = lower(model).vision
    assert part is not None
    assert part.saved_bytes(shard, "none") == pytest.approx(kept, rel=0.01)
