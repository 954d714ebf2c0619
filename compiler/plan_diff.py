"""What changed from one plan to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from shipway.compiler.frozen import frozen
from shipway.compiler.provenance import shown
from shipway.schemas.plan import Plan

Sign = Literal["+", "~", "-"]


@frozen
class Change:
    """One value that differs."""

    sign: Sign
    path: str
    old: Any = None
    new: Any = None

    def words(self) -> str:
        """One line, in the way of infrastructure tools."""
        match self.sign:
            case "+":
                return f"+ {self.path}: {shown(self.new)}"
            case "-":
                return f"- {self.path}: {shown(self.old)}"
        return f"~ {self.path}: {shown(self.old)} → {shown(self.new)}"

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"change": self.sign, "path": self.path, "old": self.old, "new": self.new}


def differences(old: Any, new: Any, path: str = "") -> Iterator[Change]:
    """Leaves that differ between two plain values, in order; named list entries are matched by name."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            below = f"{path}.{key}" if path else str(key)
            if key not in new:
                yield from _whole("-", old[key], below)
            elif key not in old:
                yield from _whole("+", new[key], below)
            else:
                yield from differences(old[key], new[key], below)
    elif isinstance(old, list) and isinstance(new, list) and _named(old) and _named(new):
        yield from differences({e["name"]: e for e in old}, {e["name"]: e for e in new}, path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{path}.{index}")
    elif old != new:
        yield Change("~", path, old, new)


def _named(entries: list[Any]) -> bool:
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return len(names) == len(entries) > 0 and len(set(names)) == len(names) and None not in names


def _whole(sign: Sign, value: Any, path: str) -> Iterator[Change]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _whole(sign, item, f"{path}.{key}")
    else:
        yield Change(sign, path, old=value if sign == "-" else None, new=value if sign == "+" else None)


def plan_differences(old: Plan, new: Plan) -> list[Change]:
    """What a reader of plans wants to know: the blueprint, and of each stage what was decided."""
    return list(differences(_essence(old), _essence(new)))


def _essence(plan: Plan) -> dict[str, Any]:
    data = plan.model_dump(mode="json")
    stages = []
    for stage in data["stages"]:
        memory = stage["memory"]
        kept = ("name", "layout", "devices_used", "step_seconds", "tokens_per_second", "mfu", "hours", "cost")
        stages.append(
            {key: stage[key] for key in kept}
            | {
                "memory": {
                    "peak_bytes": memory["peak_bytes"],
                    "verdict": memory["verdict"],
                    "items": [{"name": i["name"], "bytes": i["bytes"]} for i in memory["items"]],
                }
            }
        )
    return {
        "name": data["name"],
        "shipway": data["shipway"],
        "calibration": data["calibration"],
        "blueprint": data["blueprint"],
        "parameters": {key: data["parameters"][key] for key in ("total", "active")},
        "stages": stages,
        "totals": data["totals"],
        "warnings": data["warnings"],
    }
