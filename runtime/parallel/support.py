"""Refuses a layout that this runtime cannot run, before anything is built."""

from __future__ import annotations

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.layout import Layout

UNSUPPORTED = {
    "pipeline_parallel": "pipeline parallel",
    "context_parallel": "context parallel",
    "tensor_parallel": "tensor parallel",
}


def check_layout(layout: Layout) -> None:
    """Raise Fatal naming every axis of the layout that cannot be run yet, and the way out."""
    asked = {field: getattr(layout, field) for field in UNSUPPORTED if getattr(layout, field) > 1}
    if asked:
        words = ", ".join(f"{UNSUPPORTED[field]} {degree}" for field, degree in asked.items())
        way_out = ", ".join(f"{field}: 1" for field in asked)
        raise Fatal(f"the runtime cannot run {words}; plan with training.layout {{{way_out}}}")
