"""Refuses a layout that this runtime cannot run, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.capability import CAPABILITY, capability
from shipway.schemas.layout import Layout
from shipway.schemas.model import Model
from shipway.schemas.training import Precision

BF16 = Precision()


def check_layout(layout: Layout, precision: Precision = BF16) -> None:
    """Raise Fatal naming what of the layout this runtime cannot run, and the way out."""
    _check_offload(layout)
    can = capability(precision)
    if layout.pipeline_parallel == 1:
        return
    asked = "the runtime cannot run pipeline parallel with"
    if layout.schedule not in can.schedules:
        legal = ", ".join(can.schedules)
        raise Fatal(
            f"{asked} schedule {layout.schedule}; plan with training.layout {{schedule: one of {legal}}}"
        )
    if layout.zero not in can.zero_with_pipeline:
        raise Fatal(f"{asked} zero {layout.zero}; plan with training.layout {{zero: 1}}")


def _check_offload(layout: Layout) -> None:
    if layout.offload not in CAPABILITY.offload:
        legal = ", ".join(CAPABILITY.offload)
        raise Fatal(
            f"the runtime does not offload {layout.offload};"
            f" plan with training.layout {{offload: one of {legal}}}"
        )
    if layout.offloads_activations and layout.recompute != "full":
        raise Fatal(
            "activations go to the host only where whole layers are recomputed:"
            " plan with training.layout {offload: activations, recompute: full}"
        )


def check_model(layout: Layout, model: Model, context_tokens: int) -> None:
    """Raise Fatal naming all that would have to be split and cannot, with the legal degrees."""
    _check_heads(layout, model)
    degree = layout.tensor_parallel
    if degree == 1:
        return
    sizes = dict(tensor_parallel_sizes(model, context_tokens // layout.context_parallel))
    wrong = [f"{count} {what}" for what, count in sizes.items() if count % degree]
    if wrong:
        legal = [str(d) for d in range(1, degree) if all(count % d == 0 for count in sizes.values())]
        raise Fatal(
            f"tensor_parallel {degree} does not divide {', '.join(wrong)};"
            f" below it {', '.join(legal)} would do"
        )


def _check_heads(layout: Layout, model: Model) -> None:
    delta, ranks = model.attention.delta, layout.context_parallel
    if delta is None or ranks == 1 or layout.delta_context == "state":
        return
    heads = delta.heads // layout.tensor_parallel
    if heads % ranks:
        raise Fatal(
            f"context parallel {ranks} cannot exchange the {heads} delta-attention heads of a rank:"
            " plan with training.layout {delta_context: state}"
        )


def tensor_parallel_sizes(model: Model, tokens: int) -> Iterator[tuple[str, int]]:
    """What tensor parallel splits, and how many there are of it."""
    yield "tokens of a sequence", tokens
    yield "tokens of the vocabulary", model.vocabulary
    attention, units = model.attention, model.feed_forward
    if attention.delta:
        yield "delta-attention heads", attention.delta.heads
    if attention.latent:
        yield "latent-attention heads", attention.latent.heads
    if attention.grouped:
        yield "key and value heads", attention.grouped.kv_heads
    if units.dense_inner_width:
        yield "inner columns of the dense units", units.dense_inner_width
    if units.experts and units.experts.shared:
        inner = units.experts.shared_inner_width or units.experts.inner_width
        yield "inner columns of the shared experts", units.experts.shared * inner
