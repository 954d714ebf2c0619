"""Runs rows of the table, and the one process that each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parallel.support import check_layout
from shipway.runtime.parity.command import shipway
from shipway.runtime.parity.ranks import Setting, Trace, run_rows
from shipway.runtime.parity.table import ALONE, IN_FP8, MODELS, Row
from shipway.runtime.parity.verdict import Verdict, compare
from shipway.schemas.training import Precision


@dataclass(frozen=True)
class Models:
    """Build folders of the table's models, made by the command that users have, when first asked for."""

    folder: Path
    given: Path | None = None
    """A folder to use for every model instead."""
    dtype: str = "fp32"
    _built: dict[str, Path] = field(default_factory=dict)

    def of(self, rows: Sequence[Row]) -> dict[str, Path]:
        """The build folder of every model that rows use."""
        names = {row.model for row in rows}
        if self.given:
            return dict.fromkeys(names, self.given)
        with ThreadPoolExecutor() as pool:
            missing = sorted(names - self._built.keys())
            self._built.update(zip(missing, pool.map(self._build, missing), strict=True))
        return self._built

    def _build(self, name: str) -> Path:
        target = self.folder / name
        in_fp8 = IN_FP8 if self.dtype == "fp8" else ()
        shipway("build", *MODELS[name], *in_fp8, "--out", str(target), "--quiet")  # type: ignore[index]
        return target


AT_ONCE = 6
"""Rows that are judged before their verdicts are told."""


def judge(
    rows: Mapping[str, Row],
    models: Models,
    device: str,
    dtype: str = "fp32",
    tell: Callable[[Sequence[Verdict]], None] = lambda verdicts: None,
) -> list[Verdict]:
    """Run rows, those of equal size in one set of processes, and compare each with one process.

    `tell` is given the verdicts of some rows as soon as they are known.
    """
    by_size = sorted(rows, key=lambda name: rows[name].layout.world_size)
    traces: dict[Row, Trace | str] = {}
    verdicts: dict[str, Verdict] = {}
    for start in range(0, len(by_size), AT_ONCE):
        some = {name: rows[name] for name in by_size[start : start + AT_ONCE]}
        found = _judge(some, models, device, dtype, traces)
        tell(list(found.values()))
        verdicts |= found
    return [verdicts[name] for name in rows]


def _judge(
    rows: Mapping[str, Row], models: Models, device: str, dtype: str, traces: dict[Row, Trace | str]
) -> dict[str, Verdict]:
    """Of some rows; `traces` holds what was run before, and gets what is run now."""
    precision = Precision.model_validate({"compute": dtype})
    verdicts = {name: refusal for name, row in rows.items() if (refusal := _refusal(name, row, precision))}
    left = {name: row for name, row in rows.items() if name not in verdicts}
    references = {_reference(row): None for row in left.values()}
    setting = Setting(models.of(list(left.values())), device, precision)
    by_size: dict[int, dict[Row, None]] = {}
    for row in (*references, *left.values()):
        if row not in traces:
            by_size.setdefault(row.layout.world_size, {})[row] = None
    for different in by_size.values():
        traces |= zip(different, run_rows(list(different), setting), strict=True)
    for name, row in left.items():
        verdicts[name] = _verdict(name, row, traces[_reference(row)], traces[row])
    return verdicts


def _reference(row: Row) -> Row:
    return replace(row, layout=ALONE)


def _refusal(name: str, row: Row, precision: Precision) -> Verdict | None:
    try:
        check_layout(row.layout, precision)
    except Fatal as refusal:
        return Verdict(name, row.layout.world_size, reason=str(refusal), refused=True)
    return None


def _verdict(name: str, row: Row, alone: Trace | str, found: Trace | str) -> Verdict:
    if isinstance(alone, str):
        raise Fatal(f"one process does not run: {alone}")
    if isinstance(found, str):
        return Verdict(name, row.layout.world_size, reason=found)
    return Verdict(name, row.layout.world_size, compare(alone, found))
