"""Runs rows of the table, and the one process that each is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parallel.support import check_layout
from shipway.runtime.parity.command import shipway
from shipway.runtime.parity.ranks import Setting, Trace, run_rows
from shipway.runtime.parity.table import ALONE, MODELS, Row
from shipway.runtime.parity.verdict import Verdict, compare
from shipway.schemas.training import Precision


@dataclass(frozen=True)
class Models:
    """Build folders of the table's models, made by the command that users have, when first asked for."""

    folder: Path
    given: Path | None = None
    """A folder to use for every model instead."""
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
        shipway("build", *MODELS[name], "--out", str(target), "--quiet")  # type: ignore[index]
        return target


def judge(rows: Mapping[str, Row], models: Models, device: str, dtype: str = "fp32") -> list[Verdict]:
    """Run rows, those of equal size in one set of processes, and compare each with one process."""
    verdicts = {name: refusal for name, row in rows.items() if (refusal := _refusal(name, row))}
    left = {name: row for name, row in rows.items() if name not in verdicts}
    references = {_reference(row): None for row in left.values()}
    setting = Setting(models.of(list(left.values())), device, Precision.model_validate({"compute": dtype}))
    by_size: dict[int, list[Row]] = {}
    for row in (*references, *left.values()):
        by_size.setdefault(row.layout.world_size, []).append(row)
    found: dict[Row, Trace | str] = {}
    for size in sorted(by_size):
        different = list(dict.fromkeys(by_size[size]))
        found |= zip(different, run_rows(different, setting), strict=True)
    for name, row in left.items():
        verdicts[name] = _verdict(name, row, found[_reference(row)], found[row])
    return [verdicts[name] for name in rows]


def _reference(row: Row) -> Row:
    return replace(row, layout=ALONE)


def _refusal(name: str, row: Row) -> Verdict | None:
    try:
        check_layout(row.layout)
    except Fatal as refusal:
        return Verdict(name, row.layout.world_size, reason=str(refusal), refused=True)
    return None


def _verdict(name: str, row: Row, alone: Trace | str, found: Trace | str) -> Verdict:
    if isinstance(alone, str):
        raise Fatal(f"one process does not run: {alone}")
    if isinstance(found, str):
        return Verdict(name, row.layout.world_size, reason=found)
    return Verdict(name, row.layout.world_size, compare(alone, found))
