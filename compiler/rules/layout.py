"""Rules of pinned layouts: what a parallel degree must divide, and what the runtime runs.

The search offers legal layouts only; these rules say of a pinned one why it is not, and what would be.
"""

from __future__ import annotations

from typing import Any

from shipway.compiler.documents import KeyPath
from shipway.compiler.provenance import shown
from shipway.compiler.rules.report import Report
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import LayoutConstraints
from shipway.schemas.training import PretrainStage

CONTEXT_SLICE = 64
"""A context-parallel slice is a whole number of delta-rule chunks of this many tokens."""


def check_layouts(blueprint: Blueprint, report: Report) -> None:
    """The pinned layout of every stage."""
    training = blueprint.training
    for index, stage in enumerate(training.stages):
        own: KeyPath = ("training", "stages", index)
        pinned, path = stage.layout, (*own, "layout")
        if pinned == "auto":
            pinned, path = training.layout, ("training", "layout")
        size, size_path = stage.micro_batch, (*own, "micro_batch")
        if size is None:
            size, size_path = training.micro_batch, ("training", "micro_batch")
        pins = LayoutConstraints() if pinned == "auto" else pinned
        if pins.micro_batch is not None:
            size, size_path = pins.micro_batch, (*path, "micro_batch")
        if pins != LayoutConstraints() or size != "auto":
            _StageLayout(blueprint, stage, own, pins, path, report).check(size, size_path)


class _StageLayout:
    """One stage's pins, with what they must divide."""

    def __init__(
        self,
        blueprint: Blueprint,
        stage: PretrainStage,
        own: KeyPath,
        pins: LayoutConstraints,
        path: KeyPath,
        report: Report,
    ) -> None:
        self.blueprint = blueprint
        self.cluster = blueprint.cluster
        self.model = blueprint.model
        self.stage = stage
        self.own = own
        self.pins = pins
        self.path = path
        self.report = report
        self.sequences = stage.global_batch // stage.context

    def check(self, size: int | str, size_path: KeyPath) -> None:
        """All rules."""
        self._check_capability()
        self._check_tensor()
        self._check_context()
        self._check_experts()
        self._check_pipeline()
        self._check_devices()
        self._check_data(size, size_path)

    def _limits(self, axis: str) -> list[tuple[str, int]]:
        from shipway.compiler.lower import lower

        lowered = lower(self.model)
        limits = {
            (limit.what, limit.value)
            for _, part in lowered.placed_parts()
            for limit in part.limits()
            if limit.axis == axis
        }
        return sorted(limits)

    def _check_capability(self) -> None:
        from shipway.schemas.capability import CAPABILITY

        for field, legal in (("schedule", CAPABILITY.schedules), ("recompute", CAPABILITY.recompute)):
            value = getattr(self.pins, field)
            if value is not None and value not in (*legal, "none"):
                self.report.add(
                    "BP404",
                    (*self.path, field),
                    f"the runtime does not run {field} `{value}`",
                    legal=legal,
                    help_text="Choose one that it runs, or leave it to the search.",
                )
        for axis in ("pp", "dp_replicate", "cp", "tp", "ep"):
            names = {
                "pp": "pipeline",
                "dp_replicate": "data",
                "cp": "context",
                "tp": "tensor",
                "ep": "expert",
            }
            field = f"{names[axis]}_parallel" + ("_replicate" if axis == "dp_replicate" else "")
            degree = getattr(self.pins, field)
            if degree and degree > 1 and CAPABILITY.support(axis) is None:
                self.report.add(
                    "BP404", (*self.path, field), f"the runtime does not run {field} above 1", legal=(1,)
                )
        self._check_zero(CAPABILITY)

    def _check_zero(self, capability: Any) -> None:
        zero, pipeline = self.pins.zero, self.pins.pipeline_parallel
        legal = capability.zero_with_pipeline if pipeline and pipeline > 1 else capability.zero
        if zero is not None and zero not in legal:
            self.report.add(
                "BP404",
                (*self.path, "zero"),
                f"the runtime does not run ZeRO level {zero}"
                + (" under a pipeline" if pipeline and pipeline > 1 else ""),
                values={(*self.path, "pipeline_parallel"): pipeline} if pipeline else {},
                legal=legal,
                help_text="Choose one that it runs, or leave it to the search.",
            )

    def _check_tensor(self) -> None:
        degree = self.pins.tensor_parallel
        if degree is None or degree == 1:
            return
        limits = self._limits("tp")
        domain = self.cluster.link_domain or self.cluster.devices_per_node
        domain = min(domain, self.cluster.devices)
        broken = [f"{shown(value)} {what}" for what, value in limits if value % degree]
        if self.stage.context % degree:
            broken.append(f"a context of {shown(self.stage.context)}")
        if domain % degree:
            broken.append(f"the {domain} devices joined by scale-up links")
        legal = [
            d
            for d in _divisors(domain)
            if self.stage.context % d == 0 and all(value % d == 0 for _, value in limits)
        ]
        self._divide("tensor_parallel", degree, broken, legal)

    def _check_context(self) -> None:
        degree = self.pins.context_parallel
        if degree is None or degree == 1:
            return
        context = self.stage.context

        def whole(d: int) -> bool:
            return d == 1 or (context % (2 * d) == 0 and context // d % CONTEXT_SLICE == 0)

        broken = []
        if not whole(degree):
            broken.append(
                f"a context of {shown(context)} into 2 x {degree} slices of whole chunks of {CONTEXT_SLICE} tokens"
            )
        if self.cluster.devices % degree:
            broken.append(f"{shown(self.cluster.devices)} devices")
        legal = [d for d in _divisors(self.cluster.devices) if whole(d)]
        step = 2 * degree * CONTEXT_SLICE
        lengths = tuple(dict.fromkeys((context // step * step, -(-context // step) * step)))
        extra = f" Nearest contexts that it divides: {', '.join(shown(n) for n in lengths if n)}."
        self._divide("context_parallel", degree, broken, legal, extra if not whole(degree) else "")

    def _check_experts(self) -> None:
        degree = self.pins.expert_parallel
        if degree is None or degree == 1:
            return
        experts = self.model.feed_forward.experts
        if experts is None or "experts" not in self.model.feed_forward_kinds():
            self.report.add(
                "BP402",
                (*self.path, "expert_parallel"),
                f"expert_parallel {degree} has nothing to spread: the model has no experts",
                legal=(1,),
                help_text="Leave it out.",
            )
            return
        broken = [f"{experts.routed} routed experts"] if experts.routed % degree else []
        region = self._region()
        if region is not None and region % degree:
            broken.append(f"the {region} ranks of data_parallel_shard x context_parallel x tensor_parallel")
        room = region or self.cluster.devices
        legal = [d for d in _divisors(experts.routed) if room % d == 0]
        if region is None and self.cluster.devices % degree:
            broken.append(f"{shown(self.cluster.devices)} devices")
        self._divide("expert_parallel", degree, broken, legal)

    def _region(self) -> int | None:
        pins = self.pins
        if pins.data_parallel_shard is None or pins.context_parallel is None or pins.tensor_parallel is None:
            return None
        return pins.data_parallel_shard * pins.context_parallel * pins.tensor_parallel

    def _check_pipeline(self) -> None:
        pipeline, virtual = self.pins.pipeline_parallel, self.pins.virtual_stages or 1
        if pipeline is None:
            return
        if pipeline * virtual > self.model.layers:
            self.report.add(
                "BP402",
                (*self.path, "pipeline_parallel"),
                f"{self.model.layers} layers cannot fill {pipeline} pipeline ranks"
                + (f" x {virtual} virtual stages" if virtual > 1 else ""),
                values={("model", "layers"): self.model.layers},
                legal=tuple(d for d in _divisors(self.cluster.devices) if d * virtual <= self.model.layers),
                help_text="Every model chunk needs a layer.",
            )
        elif self.cluster.devices % pipeline:
            legal = [d for d in _divisors(self.cluster.devices) if d * virtual <= self.model.layers]
            self._divide("pipeline_parallel", pipeline, [f"{shown(self.cluster.devices)} devices"], legal)
        if pipeline > 1 and self.model.tied_embeddings:
            self.report.add(
                "BP404",
                (*self.path, "pipeline_parallel"),
                "a pipeline cannot hold tied embeddings: the table is on its first and its last rank",
                values={("model", "tied_embeddings"): True},
                legal=(1,),
                help_text="Untie the embeddings, or do without a pipeline.",
            )

    def _check_devices(self) -> None:
        names = (
            "pipeline_parallel",
            "data_parallel_replicate",
            "data_parallel_shard",
            "context_parallel",
            "tensor_parallel",
        )
        pinned = {name: getattr(self.pins, name) for name in names if getattr(self.pins, name)}
        product = 1
        for degree in pinned.values():
            product *= degree
        if product > self.cluster.devices:
            largest = max(pinned, key=lambda name: pinned[name])
            self.report.add(
                "BP403",
                (*self.path, largest),
                f"the pinned degrees need {shown(product)} devices, and the cluster has "
                f"{shown(self.cluster.devices)}",
                values={(*self.path, name): degree for name, degree in pinned.items()},
                help_text="Lower a degree, or take a larger cluster.",
            )

    def _check_data(self, size: int | str, size_path: KeyPath) -> None:
        shard, replicate = self.pins.data_parallel_shard, self.pins.data_parallel_replicate
        data = (shard or 1) * (replicate or 1)
        name = "data_parallel_shard" if (shard or 0) >= (replicate or 0) else "data_parallel_replicate"
        if self.sequences % data:
            self._divide(
                name,
                data,
                [f"the {shown(self.sequences)} sequences of one step"],
                [d for d in _divisors(self.sequences) if d <= self.cluster.devices],
            )
        elif isinstance(size, int) and (self.sequences // data) % size:
            self.report.add(
                "BP402",
                size_path,
                f"a micro-batch of {size} does not divide the {shown(self.sequences // data)} sequences that "
                + ("a data-parallel rank has in one step" if data > 1 else "one step has"),
                values={
                    (*self.own, "global_batch"): self.stage.global_batch,
                    (*self.own, "context"): self.stage.context,
                },
                legal=_near(size, _divisors(self.sequences // data)),
                help_text="Change micro_batch, or raise global_batch.",
            )

    def _divide(self, field: str, degree: int, broken: list[str], legal: list[int], extra: str = "") -> None:
        if not broken:
            return
        self.report.add(
            "BP402",
            (*self.path, field),
            f"{field} {degree} does not divide {', '.join(broken)} (stage `{self.stage.name}`)",
            legal=_near(degree, legal),
            help_text="Choose a legal degree, or leave it to the search." + extra,
        )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _near(value: int, legal: list[int]) -> tuple[int, ...]:
    return tuple(sorted(legal, key=lambda d: (abs(d - value), d)))
