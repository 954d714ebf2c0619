"""What torch's pipeline schedules refuse, said of a pinned layout with the nearest values they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shipway.compiler.schedule import interleaving_allows, rounds
from shipway.compiler.space import Space, nearest_first
from shipway.compiler.v_orders import least_micro_batches
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import LayoutConstraints, Schedule

CHUNKS: Mapping[Schedule, tuple[int, int | None, str]] = {
    "1f1b": (1, 1, "one chunk"),
    "interleaved_1f1b": (2, None, "at least two chunks"),
    "zbv": (2, 2, "two chunks"),
    "dualpipev": (2, 2, "two chunks"),
}
"""Least and most chunks that a schedule puts on a pipeline rank."""


def schedule_conflicts(pins: LayoutConstraints, path: str) -> Iterator[Diagnostic]:
    """A pinned schedule against the pinned ranks and chunks; `path` leads to the fields of the layout."""
    name, pp, virtual = pins.schedule, pins.pipeline_parallel, pins.virtual_stages
    if name is None or name not in CHUNKS:
        if name == "none" and (pp or 1) > 1:
            yield Diagnostic(
                code="BP402",
                summary=f"a pipeline of {pp} ranks needs a schedule",
                field=path + "schedule",
                legal=tuple(CHUNKS),
                help="Leave it out to let the search choose.",
            )
        return
    least, most, words = CHUNKS[name]
    if pp == 1:
        yield Diagnostic(
            code="BP402",
            summary=f"{name} runs pipelines of more than one rank, pipeline_parallel is 1",
            field=path + "schedule",
            legal=("none",),
            help="Raise pipeline_parallel, or leave the schedule out.",
        )
    if virtual is not None and (virtual < least or (most is not None and virtual > most)):
        yield Diagnostic(
            code="BP402",
            summary=f"{name} puts {words} on every pipeline rank, virtual_stages is {virtual}",
            field=path + "virtual_stages",
            legal=(str(least),) if most else ("2", "3", "4"),
            help="Leave virtual_stages out, or choose another schedule.",
        )


def micro_batches_refused(space: Space, held: dict[str, int], count: int) -> str | None:
    """Why a schedule of torch's does not take so many micro-batches, with the nearest numbers it takes."""
    pp, name = held.get("pipeline_parallel", 1), space.constraints.schedule
    if pp == 1:
        return None
    least = least_micro_batches(name, pp) if name else pp
    if count < least:
        return (
            f"{name} over {pp} ranks needs at least {least} micro-batches, there are {count}:"
            " raise the global batch, or lower data parallel or the micro-batch"
        )
    interleaved = name == "interleaved_1f1b" or (name is None and held.get("virtual_stages", 1) > 1)
    settled = "micro_batch" in held and ("data_parallel_shard" in held or "data_parallel_replicate" in held)
    if not interleaved or not settled or interleaving_allows(pp, count):
        return None
    legal = [n for n in range(pp, 2 * count) if interleaving_allows(pp, n)]
    return (
        f"interleaved_1f1b deals micro-batches to {pp} ranks in {rounds(pp, count)} equal rounds, which"
        f" {count} do not make; it takes {', '.join(nearest_first(legal, count)[:4])}"
    )
