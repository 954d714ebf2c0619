"""Layouts on another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import fit_layout
from shipway.runtime.parallel.support import check_layout
from shipway.schemas.layout import Layout

PLANNED = Layout(data_parallel_shard=4, tensor_parallel=2, micro_batch=2, micro_batches=3)
SEQUENCES = 24


def test_planned_number_of_ranks_changes_nothing() -> None:
    assert fit_layout(PLANNED, 8, SEQUENCES) is PLANNED


@pytest.mark.parametrize(("ranks", "shard", "micro_batches"), [(4, 2, 6), (2, 1, 12), (24, 12, 1)])
def test_fewer_or_more_ranks_keep_the_step(ranks: int, shard: int, micro_batches: int) -> None:
    fitted = fit_layout(PLANNED, ranks, SEQUENCES)
    assert (fitted.data_parallel, fitted.micro_batches) == (shard, micro_batches)
    assert fitted.data_parallel * fitted.micro_batch * fitted.micro_batches == SEQUENCES


@pytest.mark.parametrize("ranks", [3, 10])
def test_impossible_number_of_ranks_names_the_possible_ones(ranks: int) -> None:
    with pytest.raises(Fatal, match="it can run on 2, 4, 6, 8, 12, 24"):
        fit_layout(PLANNED, ranks, SEQUENCES)


def test_data_parallel_layouts_run() -> None:
    check_layout(Layout(data_parallel_shard=4, data_parallel_replicate=2))


@pytest.mark.parametrize(
    ("changes", "way_out"), [({"schedule": "none"}, "schedule: one of 1f1b"), ({"zero": 3}, "zero: 1")]
)
def test_pipeline_that_the_runtime_has_not_is_refused_with_the_way_out(
    changes: dict[str, Any], way_out: str
) -> None:
    wanted = {"pipeline_parallel": 2, "schedule": "1f1b", "zero": 1, **changes}
    with pytest.raises(Fatal, match=way_out):
        check_layout(Layout(**wanted))
