"""Rules of the model section."""

from __future__ import annotations

from typing import Any

from shipway.compiler.documents import KeyPath
from shipway.compiler.rules.report import Report
from shipway.schemas.model import (
    BoundedDecay,
    DeltaAttention,
    Experts,
    GroupedAttention,
    LatentAttention,
    LayerPattern,
    Model,
    QuantileBalancing,
    RotaryPosition,
)

LARGEST_EXPONENT = 88.7
"""ln(3.39e38): the largest exponent whose exponential bf16 and fp32 hold."""
DECAY_TILE = 16
"""Tokens of a secondary tile in the chunkwise delta rule (arXiv 2510.26692; Kimi K3, 2.1.1)."""

MOST_LAYERS = 10_000
"""Beyond any model; a mistyped number must not fill the memory with layers."""
MOST_LEGAL = 4096
"""Largest legal value that is looked for."""

ATTENTION: KeyPath = ("model", "attention")
FEED_FORWARD: KeyPath = ("model", "feed_forward")


def check_model(model: Model, report: Report) -> None:
    """All rules of the model section."""
    if model.layers > MOST_LAYERS:
        report.add(
            "BP104",
            ("model", "layers"),
            f"{model.layers:,} layers are more than Shipway plans",
            legal=(f"1 to {MOST_LAYERS:,}",),
        )
        return
    _check_mix(model, (*ATTENTION, "mix"), model.attention.mix, report)
    _check_mix(model, (*FEED_FORWARD, "mix"), model.feed_forward.mix, report)
    _check_dimensions(model, report)
    if model.attention.delta is not None:
        _check_delta(model.attention.delta, report)
    if model.attention.latent is not None:
        _check_latent(model.attention.latent, report)
    if model.attention.grouped is not None:
        _check_grouped(model.attention.grouped, report)
    if model.feed_forward.experts is not None:
        _check_experts(model.feed_forward.experts, model, report)


def _kinds(mix: LayerPattern[Any] | tuple[Any, ...]) -> dict[str, KeyPath]:
    """Each kind in a mix with the place that names it first."""
    found: dict[str, KeyPath] = {}
    if isinstance(mix, tuple):
        for index, kind in enumerate(mix):
            found.setdefault(kind, (index,))
        return found
    for part in ("head", "pattern", "tail"):
        for index, kind in enumerate(getattr(mix, part)):
            found.setdefault(kind, (part, index))
    return found


def _check_mix(model: Model, path: KeyPath, mix: LayerPattern[Any] | tuple[Any, ...], report: Report) -> None:
    layers: dict[KeyPath, Any] = {("model", "layers"): model.layers}
    if isinstance(mix, tuple):
        if len(mix) != model.layers:
            report.add(
                "BP201",
                path,
                f"the list names {len(mix)} layers, and the model has {model.layers}",
                values=layers,
                help_text=f"Give the list {model.layers} entries, or set model.layers to {len(mix)}.",
            )
        return
    fixed = len(mix.head) + len(mix.tail)
    period, middle = len(mix.pattern), model.layers - fixed
    if middle >= 0 and middle % period == 0:
        return
    below = fixed + max(middle // period, 0) * period
    legal = tuple(count for count in (below, below + period) if count > 0)
    report.add(
        "BP201",
        (*path, "pattern"),
        f"a pattern of {period} does not fill the {max(middle, 0)} layers that are left of {model.layers}"
        + (f" after a head of {len(mix.head)} and a tail of {len(mix.tail)}" if fixed else ""),
        values=layers,
        legal=tuple(f"layers: {count}" for count in legal),
        help_text="Change model.layers, or make up the difference in `head` or `tail`.",
    )


def _check_dimensions(model: Model, report: Report) -> None:
    """Each kind in the mix has its dimensions, and the other way round."""
    attention = {kind: (*ATTENTION, kind) for kind in ("delta", "latent", "grouped")}
    given = {kind: getattr(model.attention, kind) for kind in attention}
    _match(model.attention.mix, (*ATTENTION, "mix"), attention, given, report)
    feed_forward = {
        "dense": (*FEED_FORWARD, "dense_inner_width"),
        "experts": (*FEED_FORWARD, "experts"),
    }
    given = {"dense": model.feed_forward.dense_inner_width, "experts": model.feed_forward.experts}
    _match(model.feed_forward.mix, (*FEED_FORWARD, "mix"), feed_forward, given, report)


def _match(
    mix: LayerPattern[Any] | tuple[Any, ...],
    path: KeyPath,
    sections: dict[str, KeyPath],
    given: dict[str, Any],
    report: Report,
) -> None:
    used = _kinds(mix)
    for kind, section in sections.items():
        name = ".".join(map(str, section))
        if kind in used and given[kind] is None:
            report.add(
                "BP200",
                (*path, *used[kind]),
                f"the mix names `{kind}`, but `{name}` is missing",
                help_text=f"Add {name}, or take {kind} out of the mix.",
            )
        elif kind not in used and given[kind] is not None:
            report.add(
                "BP202",
                section,
                f"`{name}` gives dimensions, but no layer of the mix is `{kind}`",
                severity="warning",
                help_text="Take the section out, or name the kind in the mix.",
            )


def _check_delta(delta: DeltaAttention, report: Report) -> None:
    path: KeyPath = (*ATTENTION, "delta")
    if delta.value_heads is not None and delta.value_heads % delta.heads:
        report.add(
            "BP203",
            (*path, "value_heads"),
            f"{delta.value_heads} value heads are no multiple of {delta.heads} heads",
            values={(*path, "heads"): delta.heads},
            legal=tuple(delta.heads * factor for factor in _nearest_factors(delta.value_heads, delta.heads)),
            help_text="Give the value heads a multiple of the heads.",
        )
    decay = delta.decay
    if not isinstance(decay, BoundedDecay):
        report.add(
            "BP207",
            (*path, "decay", "kind"),
            "the decay has no lower bound, so the chunkwise algorithm needs a slower path",
            severity="warning",
            help_text="Take `kind: bounded` unless you reproduce a model that was published so.",
        )
    elif -decay.minimum * DECAY_TILE > LARGEST_EXPONENT:
        lowest = LARGEST_EXPONENT / DECAY_TILE
        report.add(
            "BP206",
            (*path, "decay", "minimum"),
            f"a decay of {decay.minimum:g} over a tile of {DECAY_TILE} tokens reaches "
            f"exp({-decay.minimum * DECAY_TILE:g}), beyond what bf16 and fp32 hold (exp({LARGEST_EXPONENT}))",
            because=(f"|minimum| x {DECAY_TILE} = {-decay.minimum * DECAY_TILE:g} > {LARGEST_EXPONENT}",),
            legal=(f"from -{lowest:.2f} to below 0",),
            help_text="Kimi K3 takes -5.",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, MOST_LEGAL) + 1) if number % d == 0]


def _nearest_factors(number: int, unit: int) -> tuple[int, ...]:
    low = max(number // unit, 1)
    return (low, low + 1)


def _check_rotary(position: Any, width: int, what: str, path: KeyPath, report: Report) -> None:
    if isinstance(position, RotaryPosition) and (width % 2 or width == 0):
        report.add(
            "BP208",
            path,
            f"{what} of {width} cannot be rotated: rotary embedding turns pairs of channels",
            legal=tuple(w for w in (width - 1, width + 1) if w > 0) if width else (64,),
            help_text="Make it even, or set `position: {kind: none}`.",
        )


def _check_latent(latent: LatentAttention, report: Report) -> None:
    path: KeyPath = (*ATTENTION, "latent")
    _check_rotary(latent.position, latent.rope_width, "a rope_width", (*path, "rope_width"), report)


def _check_grouped(grouped: GroupedAttention, report: Report) -> None:
    path: KeyPath = (*ATTENTION, "grouped")
    _check_rotary(grouped.position, grouped.head_width, "a head_width", (*path, "head_width"), report)
    if grouped.heads % grouped.kv_heads:
        divisors = _divisors(grouped.heads)
        report.add(
            "BP203",
            (*path, "kv_heads"),
            f"{grouped.kv_heads} key-value heads do not divide {grouped.heads} heads",
            values={(*path, "heads"): grouped.heads},
            legal=tuple(sorted(divisors, key=lambda d: (abs(d - grouped.kv_heads), d))),
            help_text="Choose a divisor of the heads.",
        )


def _check_experts(experts: Experts, model: Model, report: Report) -> None:
    path: KeyPath = (*FEED_FORWARD, "experts")
    quantile = isinstance(experts.balancing, QuantileBalancing)
    most = experts.routed - 1 if quantile else experts.routed
    if experts.active > most:
        reason = " (quantile balancing compares each token's choice with the next best)" if quantile else ""
        report.add(
            "BP204",
            (*path, "active"),
            f"a token cannot pass {experts.active} of {experts.routed} routed experts{reason}",
            values={(*path, "routed"): experts.routed},
            legal=(f"1 to {most}",),
            help_text="Lower `active`, or raise `routed`.",
        )
    _check_expert_groups(experts, path, report)
    _check_idle_settings(experts, model, path, report)


def _check_expert_groups(experts: Experts, path: KeyPath, report: Report) -> None:
    if experts.routed % experts.groups:
        divisors = _divisors(experts.routed)
        report.add(
            "BP205",
            (*path, "groups"),
            f"{experts.groups} groups do not divide {experts.routed} routed experts",
            values={(*path, "routed"): experts.routed},
            legal=tuple(sorted(divisors, key=lambda d: (abs(d - experts.groups), d))[:6]),
            help_text="Choose a divisor of the routed experts.",
        )
    elif experts.active_groups > experts.groups:
        report.add(
            "BP205",
            (*path, "active_groups"),
            f"a token cannot choose from {experts.active_groups} of {experts.groups} groups",
            values={(*path, "groups"): experts.groups},
            legal=(f"1 to {experts.groups}",),
            help_text="Lower `active_groups`, or raise `groups`.",
        )
    else:
        room = experts.routed // experts.groups * experts.active_groups
        # quantile balancing compares each token's choice with the next best
        needed = experts.active + isinstance(experts.balancing, QuantileBalancing)
        if experts.groups > 1 and needed > room:
            report.add(
                "BP205",
                (*path, "active_groups"),
                f"{experts.active_groups} of {experts.groups} groups hold {room} experts, "
                f"fewer than the {needed} that routing a token needs",
                values={(*path, "active"): experts.active, (*path, "routed"): experts.routed},
                help_text="Raise `active_groups`, or lower `active`.",
            )


def _check_idle_settings(experts: Experts, model: Model, path: KeyPath, report: Report) -> None:
    """Settings written down that this model has no use for."""
    idle: list[tuple[str, str]] = []
    if experts.latent_width is None:
        if report.written(*path, "latent_norm") and experts.latent_norm:
            idle.append(("latent_norm", "there is no latent_width"))
        if experts.router_input == "latent":
            report.add(
                "BP209",
                (*path, "router_input"),
                "the router cannot read the latent: there is no `latent_width`",
                legal=("hidden",),
                help_text="Add latent_width, or let the router read the hidden state.",
            )
    elif experts.latent_width >= model.width:
        report.add(
            "BP209",
            (*path, "latent_width"),
            f"a latent_width of {experts.latent_width} is no narrower than the model ({model.width})",
            values={("model", "width"): model.width},
            severity="warning",
            help_text="Leave latent_width out to let experts work at the model's width.",
        )
    if experts.shared == 0:
        for name in ("shared_inner_width", "shared_gate"):
            if getattr(experts, name):
                idle.append((name, "there are no shared experts"))
    for name, reason in idle:
        report.add(
            "BP209",
            (*path, name),
            f"`{name}` has no effect: {reason}",
            severity="warning",
            help_text="Take it out.",
        )
