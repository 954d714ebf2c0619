"""Runs rows of the table, and the one process that each is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parallel.support import check_layout
from shipway.runtime.parity.command import shipway
from shipway.runtime.parity.ranks import Setting, Trace, run_rows
from shipway.runtime.parity.table import ALONE, IN_FP8, Row, overrides
from shipway.runtime.parity.verdict import TOLERANCES, Tolerance, Verdict, compare
from shipway.schemas.training import Precision

FP32 = Precision.model_validate({"compute": "fp32"})


@dataclass(frozen=True)
class Models:
    """Build folders of the table's models, made by the command that users have where they are not there."""

    folder: Path
    device: str = "cpu"
    dtype: str = "fp32"

    def of(self, rows: Iterable[Row]) -> dict[str, Path]:
        """The build folder of every model that rows use."""
        names = sorted({row.model for row in rows})
        with ThreadPoolExecutor() as pool:
            return dict(zip(names, pool.map(self._build, names), strict=True))

    def _build(self, name: str) -> Path:
        in_fp8 = IN_FP8 if self.dtype == "fp8" else ()
        target = self.folder / "-".join((name, self.device, *(("fp8",) if in_fp8 else ())))
        if not (target / "plan.json").exists():
            asked = overrides(name, self.device)  # type: ignore[arg-type]
            shipway("build", *asked, *in_fp8, "--out", str(target), "--quiet")
        return target


def judge(
    rows: Mapping[str, Row],
    models: Models,
    tell: Callable[[Verdict], None] = lambda verdict: None,
    until: float = math.inf,
) -> list[Verdict]:
    """Run rows, those of equal size in one set of processes, and compare each with one process.

    `tell` is given every verdict as soon as it is known. Rows that are not through by `until`
    (time.monotonic) have none.
    """
    device, dtype = models.device, models.dtype
    precision = Precision.model_validate({"compute": dtype})
    verdicts = {name: refusal for name, row in rows.items() if (refusal := _refusal(name, row, precision))}
    for refusal in verdicts.values():
        tell(refusal)
    left = {name: row for name, row in rows.items() if name not in verdicts}
    builds, tolerance = models.of(left.values()), TOLERANCES[device, dtype]
    # On GPUs fp32 is for exactness: the faster kernels multiply it in reduced precision.
    setting = Setting(builds, device, precision, plain=dtype == "fp32")
    alone = list(dict.fromkeys(_alone(row) for row in left.values()))
    exactly = replace(setting, precision=FP32, plain=True)
    exact = dict(zip(alone, run_rows(alone, exactly, until), strict=False)) if tolerance.of_own else {}
    references = References(tolerance, exact)
    for job, found in _run([*((None, row) for row in alone), *left.items()], setting, until):
        name, row = job
        if name is None:
            references.own[row] = found
            continue
        verdicts[name] = references.verdict(name, row, found)
        tell(verdicts[name])
    return [verdicts[name] for name in rows if name in verdicts]


@dataclass(frozen=True)
class References:
    """One process on each model and batch."""

    tolerance: Tolerance
    exact: Mapping[Row, Trace | str]
    """In fp32, where bounds are multiples of its error in the dtype that is judged."""
    own: dict[Row, Trace | str] = field(default_factory=dict)
    """In that dtype."""

    def verdict(self, name: str, row: Row, found: Trace | str) -> Verdict:
        """Of what a row gave."""
        alone, ranks = _alone(row), row.layout.world_size
        own = self.own[alone]
        exact = self.exact.get(alone, "no time was left for it in fp32") if self.tolerance.of_own else own
        if isinstance(own, str) or isinstance(exact, str):
            why = own if isinstance(own, str) else exact
            return Verdict(name, ranks, reason=f"one process does not run: {why}")
        if isinstance(found, str):
            return Verdict(name, ranks, reason=found)
        off = compare(exact, own) if self.tolerance.of_own else {}
        differences = compare(exact, found)
        bounds = self.tolerance.bounds(differences, off)
        return Verdict(name, ranks, differences, bounds, off, case=f"{row.model}, {row.batch}")


Job = tuple[str | None, Row]
"""A row and its name; a reference has none."""


def _run(jobs: Iterable[Job], setting: Setting, until: float) -> Iterator[tuple[Job, Trace | str]]:
    """What each gives, those of one process first: all of one size in one set of processes."""
    by_size: dict[int, list[Job]] = {}
    for job in jobs:
        by_size.setdefault(job[1].layout.world_size, []).append(job)
    for _, some in sorted(by_size.items()):
        yield from zip(some, run_rows([row for _, row in some], setting, until), strict=False)


def _alone(row: Row) -> Row:
    return replace(row, layout=ALONE)


def _refusal(name: str, row: Row, precision: Precision) -> Verdict | None:
    try:
        check_layout(row.layout, precision)
    except Fatal as refusal:
        return Verdict(name, row.layout.world_size, reason=str(refusal), refused=True)
    return None
