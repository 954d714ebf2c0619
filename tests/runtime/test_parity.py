"""The parity table: a part of it is proven here, and a fault would be seen, in fp32 as in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shipway.runtime import gradients
from shipway.runtime.build_folder import import_model
from shipway.runtime.mesh import MeshPool
from shipway.runtime.parallel.data import fsdp_modules
from shipway.runtime.parity import ranks
from shipway.runtime.parity.__main__ import main
from shipway.runtime.parity.judge import FP32, Models, References, judge
from shipway.runtime.parity.ranks import Trace
from shipway.runtime.parity.report import keep, proven_before
from shipway.runtime.parity.table import ALONE, ROWS, Row
from shipway.runtime.parity.verdict import LATER, OWN_NORM, SCALE, TOLERANCES, Verdict, compare
from shipway.runtime.trainer import Trainer
from shipway.schemas.capability import CAPABILITY
from shipway.schemas.training import Precision
from tests.runtime.ranks import run_ranks

CORE = ("fsdp 2, ep 2", "tp 2, ep 2", "cp 2", "fsdp 2, selective recomputation")
TOLERANCE = TOLERANCES["cpu", "fp32"]
BF16 = Precision()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Built once for all tests here."""
    return Models(tmp_path_factory.mktemp("models"))


def test_quick_core_of_the_table_is_proven(models: Models) -> None:
    told: list[str] = []
    verdicts = judge({name: ROWS[name] for name in CORE}, models, lambda v: told.append(v.name))
    assert not {v.name: v.reason or v.differences for v in verdicts if not v.proven}
    assert all({"router", "experts", "loss", "norm", "loads"} <= v.differences.keys() for v in verdicts)
    assert sorted(told) == sorted(CORE)


@contextmanager
def experts_doubled() -> Iterator[None]:
    """Expert gradients are summed twice (pytorch#160285)."""
    finish = Trainer._finish_gradients

    def twice(self: Trainer) -> Tensor:
        for name, parameter in self.model.named_parameters().items():
            if ".experts." in name:
                parameter.grad *= 2
        return finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_finish_gradients", twice)
        yield


@contextmanager
def norm_without_experts_of_others() -> Iterator[None]:
    """The expert-parallel axis is left out of the norm (Megatron-LM#5916)."""
    axes = gradients.sharded_axes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "sharded_axes", lambda p: () if p.ndim == 3 else axes(p))
        yield


@contextmanager
def router_averaged() -> Iterator[None]:
    """Data-parallel ranks average the gradient of the router, which they should sum."""
    build = ranks.build_parallel_model

    def averaged(*arguments: object, **options: object) -> object:
        model = build(*arguments, **options)  # type: ignore[arg-type]
        for part in model.parts:
            for module in fsdp_modules(part):
                if hasattr(module, "balance_bias"):
                    module.set_gradient_divide_factor(2.0)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "build_parallel_model", averaged)
        yield


FAULTS: dict[Callable, set[str]] = {
    experts_doubled: {SCALE, "experts"},
    norm_without_experts_of_others: {OWN_NORM},
    router_averaged: {SCALE, "router"},
}


def _traces(build: Path, row: Row, precision: Precision, faults: list[Callable]) -> list[Trace]:
    """Of a row as it is, and with each fault."""
    module, pool = import_model(build), MeshPool(torch.device("cpu"))
    found = [ranks.trace(module, row, pool, precision, steps=1)]
    for fault in faults:
        with fault():
            found.append(ranks.trace(module, row, pool, precision, steps=1))
    return found


@pytest.fixture(scope="module")
def bf16(models: Models) -> tuple[References, list[Trace]]:
    """One process in fp32 and bf16; and two in bf16, as they are and with each fault."""
    row = ROWS["fsdp 2, ep 2"]
    alone = replace(row, layout=ALONE)
    build = models.of([row])[row.model]
    (exact,), (own,) = (run_ranks(_traces, 1, build, alone, dtype, [])[0] for dtype in (FP32, BF16))
    found = run_ranks(_traces, 2, build, row, BF16, list(FAULTS))[0]
    return References(TOLERANCES["cpu", "bf16"], {alone: exact}, {alone: own}), found


def test_bf16_layout_errs_as_one_process_does_and_faults_are_seen(
    bf16: tuple[References, list[Trace]],
) -> None:
    references, (healthy, *faulty) = bf16
    verdict = references.verdict("as it is", ROWS["fsdp 2, ep 2"], healthy)
    assert verdict.proven, verdict
    for (fault, columns), trace in zip(FAULTS.items(), faulty, strict=True):
        seen = references.verdict(fault.__name__, ROWS["fsdp 2, ep 2"], trace)
        off = {c for c, value in seen.differences.items() if value > seen.bounds[c]}
        assert columns <= off, (fault.__name__, seen)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_no_gradient_of_any_one_parameter_can_be_lost_halved_or_doubled_in_bf16(
    bf16: tuple[References, list[Trace]], factor: float
) -> None:
    references, (healthy, *_) = bf16
    (exact,) = references.exact.values()
    assert isinstance(exact, Trace)
    live = [name for name, gradient in exact.gradients.items() if gradient.norm() > 1e-9]
    for name in live[::9]:
        changed = healthy.gradients | {name: factor * healthy.gradients[name]}
        verdict = references.verdict(name, ROWS["fsdp 2, ep 2"], replace(healthy, gradients=changed))
        assert not verdict.proven, name


def test_every_axis_that_is_called_proven_is_in_the_table() -> None:
    for axis in CAPABILITY.axes:
        if axis.proven:
            degrees = [getattr(row.layout, axis.field) for row in ROWS.values()]
            assert max(degrees) > 1, axis.name


@pytest.mark.parametrize("field", ["schedule", "recompute", "zero", "offload"])
def test_whatever_the_planner_offers_is_in_the_table(field: str) -> None:
    offered = {
        "schedule": CAPABILITY.schedules,
        "recompute": CAPABILITY.recompute,
        "offload": CAPABILITY.offload,
        "zero": CAPABILITY.zero + CAPABILITY.zero_with_pipeline,
    }
    assert {getattr(row.layout, field) for row in ROWS.values()} >= set(offered[field])


def test_schedules_that_fp8_does_not_run_are_neither_proven_nor_off(tmp_path: Path) -> None:
    (verdict,) = judge({"pp 2, zbv": ROWS["pp 2, zbv"]}, Models(tmp_path, dtype="fp8"))
    assert verdict.refused
    assert "schedule zbv" in verdict.reason


EXPERT = "layers.1.feed_forward.experts.gate"
TRACE = Trace([2.0, 1.5], [2.0, 2.5], {"1": [3, 1]}, {EXPERT: torch.ones(4)}, {"experts": 2.0})


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        (replace(TRACE, losses=[2.001, 1.5]), {"loss"}),
        (replace(TRACE, norms=[2.002, 2.5]), {"norm", OWN_NORM}),
        (replace(TRACE, group_norms={"experts": 2.1}), {OWN_NORM}),
        (replace(TRACE, norms=[2.0, 2.6]), {LATER}),
        (replace(TRACE, norms=[2.0, float("nan")]), {LATER}),
        (replace(TRACE, loads={"1": [2, 2]}), {"loads"}),
        (replace(TRACE, gradients={EXPERT: 2 * torch.ones(4)}), {"experts", SCALE, OWN_NORM}),
        (replace(TRACE, gradients={EXPERT: torch.full((4,), torch.nan)}), {"experts", SCALE, OWN_NORM}),
        (replace(TRACE, gradients={}), {"experts", SCALE, OWN_NORM}),
    ],
)
def test_difference_is_seen_in_its_column(changed: Trace, columns: set[str]) -> None:
    differences = compare(TRACE, changed)
    bounds = TOLERANCE.bounds(differences, {})
    assert not Verdict("x", 1, differences, bounds).proven
    assert {name for name, value in differences.items() if not value <= bounds[name]} == columns


def test_one_process_that_errs_too_much_itself_proves_nothing() -> None:
    bounds = TOLERANCES["cpu", "bf16"].bounds({"router": 0.1}, {"router": 0.4})
    verdict = Verdict("x", 2, {"router": 0.1}, bounds)
    assert not verdict.proven
    assert verdict.word == "cannot be told: router may be off by 8.0e-01"


def test_kept_table_holds_the_rows_of_every_run(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    one = {"loss": 1e-5}
    keep(path, [Verdict("a", 1, {"loss": 0.0}, one), Verdict("b", 2, reason="lost")], "cpu", "fp32")
    keep(path, [Verdict("b", 2, {"loss": 1.0}, one, {"loss": 0.25}, "hybrid, packed")], "cpu", "fp32")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["layout"], row["proven"]) for row in rows] == [("a", True), ("b", False)]
    written = path.with_suffix(".md").read_text()
    assert "| b | 2 | off: loss by 1.0e+00 | 1e+00 |" in written
    assert "| hybrid, packed | 2e-01 |" in written
    assert proven_before(path) == {"a"}


def test_no_row_is_begun_when_time_is_up(models: Models) -> None:
    assert judge({name: ROWS[name] for name in CORE}, models, until=0.0) == []


def test_unknown_layout_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "tp 3"])
    assert "tp 2, ep 2" in capsys.readouterr().err
