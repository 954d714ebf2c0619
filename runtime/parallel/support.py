"""Refuses a layout that this runtime cannot run, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.layout import Layout
from shipway.schemas.model import Model

UNSUPPORTED = {
    "pipeline_parallel": "pipeline parallel",
}


def check_layout(layout: Layout) -> None:
    """Raise Fatal naming every axis of the layout that cannot be run yet, and the way out."""
    asked = {field: getattr(layout, field) for field in UNSUPPORTED if getattr(layout, field) > 1}
    if asked:
        words = ", ".join(f"{UNSUPPORTED[field]} {degree}" for field, degree in asked.items())
        way_out = ", ".join(f"{field}: 1" for field in asked)
        raise Fatal(f"the runtime cannot run {words}; plan with training.layout {{{way_out}}}")


def check_model(layout: Layout, model: Model, context_tokens: int) -> None:
    """Raise Fatal naming all that tensor parallel would have to split and cannot, with the legal degrees."""
    degree = layout.tensor_parallel
    if degree == 1:
        return
    if model.vision is not None:
        raise Fatal(
            "the runtime cannot run tensor parallel with a vision tower: plan with tensor_parallel: 1"
        )
    sizes = dict(tensor_parallel_sizes(model, context_tokens // layout.context_parallel))
    wrong = [f"{count} {what}" for what, count in sizes.items() if count % degree]
    if wrong:
        legal = [str(d) for d in range(1, degree) if all(count % d == 0 for count in sizes.values())]
        raise Fatal(
            f"tensor_parallel {degree} does not divide {', '.join(wrong)}; below it {', '.join(legal)} would do"
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
        yield (
            "inner columns of the shared experts",
            units.experts.shared_inner_width or units.experts.inner_width,
        )
