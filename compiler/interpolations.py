"""Interpolations, resolved one by one so that each failure has its place and both its ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shipway.compiler.documents import KeyPath
from shipway.compiler.provenance import Provenance, dotted, shown
from shipway.compiler.suggest import did_you_mean
from shipway.schemas.diagnostics import Diagnostic

DEEPEST = 64
"""Sections below each other; only an interpolation of a section around it goes deeper."""


@dataclass
class Resolution:
    """Turns an OmegaConf container into plain data."""

    provenance: Provenance
    diagnostics: list[Diagnostic] = field(default_factory=list)
    unknown: list[KeyPath] = field(default_factory=list)
    """Paths whose value could not be had."""
    _known: list[str] = field(default_factory=list)

    def resolve(self, config: DictConfig) -> dict[str, Any]:
        """Plain data; what could not be resolved is null and in `unknown`."""
        self._known = list(_all_keys(OmegaConf.to_container(config, resolve=False), ""))
        data = self._node(config, ())
        assert isinstance(data, dict)
        return data

    def _node(self, node: Any, path: KeyPath) -> Any:
        if not isinstance(node, (DictConfig, ListConfig)):
            return node
        if node._is_none():
            return None
        if len(path) > DEEPEST:
            if not self.unknown or self.unknown[-1][: len(path) - 2] != path[:-2]:
                self._report(
                    f"an interpolation at {dotted(path[:4])} leads into the section around it", path[:4]
                )
            self.unknown.append(path)
            return None
        keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
        values = {key: self._value(node, key, (*path, key)) for key in keys}
        return list(values.values()) if isinstance(node, ListConfig) else values

    def _value(self, node: Any, key: Any, path: KeyPath) -> Any:
        if OmegaConf.is_missing(node, key):
            name = dotted(path)
            self._report(
                f"`{name}` is `???`: a value that you must give",
                path,
                code="BP022",
                help_text=f"Write it in the file, or add the override {name}=...",
            )
            self.unknown.append(path)
            return None
        if OmegaConf.is_interpolation(node, key):
            raw: Any = OmegaConf.to_container(node, resolve=False)
            self.provenance.refer(path, str(raw[key]))
        try:
            child = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            self._unresolved(path, error)
            self.unknown.append(path)
            return None
        return self._node(child, path)

    def _unresolved(self, path: KeyPath, error: BaseException) -> None:
        origin = self.provenance.origin(path)
        text = origin.reference or "this interpolation"
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        because = [f"`{dotted(path)}` is {shown(text)}"]
        help_text = ""
        missing = [dotted(target) for target in origin.targets if dotted(target) not in self._known]
        if isinstance(error, RecursionError) or "Recursive interpolation" in cause:
            summary = f"the interpolation {text} leads back to itself"
            because += self.provenance.trace(path)[1:]
        elif missing and "key" in cause.lower():
            summary = f"{text} names `{missing[0]}`, which does not exist"
            help_text = did_you_mean(missing[0], self._known)
        else:
            summary = f"{text} cannot be resolved"
            because.append(cause)
        self._report(summary, path, because=tuple(because), help_text=help_text)

    def _report(
        self,
        summary: str,
        path: KeyPath,
        *,
        code: str = "BP021",
        because: tuple[str, ...] = (),
        help_text: str = "",
    ) -> None:
        self.diagnostics.append(
            Diagnostic(
                code=code,
                summary=summary,
                field=dotted(path),
                where=self.provenance.location(path),
                because=because,
                help=help_text,
            )
        )


def _all_keys(value: Any, prefix: str) -> Iterator[str]:
    """Every dotted path of plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield prefix + str(key)
        yield from _all_keys(item, f"{prefix}{key}.")
