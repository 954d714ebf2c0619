"""Rules of the training section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shipway.compiler.documents import KeyPath, display_path
from shipway.compiler.provenance import shown
from shipway.compiler.rules.report import Report
from shipway.compiler.suggest import did_you_mean, ordered
from shipway.schemas.training import BytesTokenizer, ConstantSchedule, PretrainStage, Training, WsdSchedule

BYTES_TOKENS = 259
"""256 bytes, begin, end, padding."""


def check_training(training: Training, report: Report) -> None:
    """All rules of the training section."""
    names: dict[str, int] = {}
    for index, stage in enumerate(training.stages):
        path: KeyPath = ("training", "stages", index)
        if stage.name in names:
            first: KeyPath = ("training", "stages", names[stage.name], "name")
            report.add(
                "BP301",
                (*path, "name"),
                f"two stages are named `{stage.name}`",
                values={first: stage.name},
                help_text="Give each stage a name of its own.",
            )
        names.setdefault(stage.name, index)
        _check_batch(stage, path, report)
        _check_rate(stage, path, report)
        _check_mix(stage, training, path, report)
    _check_files(training, report)


def _check_batch(stage: PretrainStage, path: KeyPath, report: Report) -> None:
    sequences, rest = divmod(stage.global_batch, stage.context)
    if rest:
        nearest = [count * stage.context for count in (sequences, sequences + 1) if count]
        report.add(
            "BP300",
            (*path, "global_batch"),
            f"a batch of {shown(stage.global_batch)} tokens is no whole number of sequences of "
            f"{shown(stage.context)}",
            values={(*path, "context"): stage.context},
            legal=tuple(nearest),
            help_text="Make global_batch a multiple of context.",
        )
    elif stage.tokens < stage.global_batch:
        report.add(
            "BP308",
            (*path, "tokens"),
            f"the stage asks for {shown(stage.tokens)} tokens, fewer than one step takes",
            values={(*path, "global_batch"): stage.global_batch},
            severity="warning",
            help_text="Raise `tokens`, or lower `global_batch`.",
        )


def _check_rate(stage: PretrainStage, path: KeyPath, report: Report) -> None:
    rate, place = stage.learning_rate, (*path, "learning_rate")
    if isinstance(rate, ConstantSchedule):
        return
    if rate.final > rate.peak:
        report.add(
            "BP307",
            (*place, "final"),
            f"the learning rate ends at {rate.final:g}, above its peak of {rate.peak:g}",
            values={(*place, "peak"): rate.peak},
            legal=(f"0 to {rate.peak:g}",),
            help_text="Lower `final`, or raise `peak`.",
        )
    if isinstance(rate, WsdSchedule) and rate.warmup + rate.decay > 1:
        report.add(
            "BP306",
            (*place, "decay" if report.written(*place, "decay") else "warmup"),
            f"warm-up and decay take {rate.warmup + rate.decay:.0%} of the stage's steps",
            values={(*place, "warmup"): rate.warmup, (*place, "decay"): rate.decay},
            legal=(f"decay: 0 to {1 - rate.warmup:g}",),
            help_text="Together they may take at most all steps.",
        )


def _check_mix(stage: PretrainStage, training: Training, path: KeyPath, report: Report) -> None:
    if stage.mix is None:
        return
    known = training.data.sources
    for name in stage.mix:
        if name not in known:
            report.add(
                "BP302",
                (*path, "mix", name),
                f"stage `{stage.name}` mixes in `{name}`, which is no source of `training.data.sources`",
                legal=ordered(name, known),
                help_text=did_you_mean(name, known) or "Add the source, or name one that is there.",
            )
    if not any(weight > 0 for weight in stage.mix.values()):
        report.add(
            "BP303",
            (*path, "mix"),
            f"the mix of stage `{stage.name}` gives no source a weight above zero",
            legal=tuple(f"{name}: 1" for name in known),
            help_text="Give at least one source a positive weight, or take `mix` out.",
        )


def _check_files(training: Training, report: Report) -> None:
    places: list[tuple[KeyPath, Any]] = [(("training", "data", "tokenizer"), training.data.tokenizer)]
    places += [(("training", "data", "sources", name), s) for name, s in training.data.sources.items()]
    for path, item in places:
        name = getattr(item, "path", None)
        if not isinstance(name, str) or "://" in name:
            continue
        found = resolve(name, report)
        if not found.exists():
            report.add(
                "BP305",
                (*path, "path"),
                f"there is no {display_path(found)}",
                because=("paths are relative to the blueprint's folder",),
                help_text="Correct the path.",
            )


def resolve(name: str, report: Report) -> Path:
    """A path in the blueprint, which is relative to its own folder."""
    base = report.composed.path.parent if report.composed.path else Path()
    return base / Path(name).expanduser()


def check_vocabulary(vocabulary: int, training: Training, report: Report) -> None:
    """Each token of the tokenizer needs a row of the embedding."""
    tokenizer = training.data.tokenizer
    if isinstance(tokenizer, BytesTokenizer):
        size, name = BYTES_TOKENS, "the bytes tokenizer"
    elif (path := resolve(tokenizer.path, report)).is_file():
        counted = _tokens_in(path)
        if counted is None:
            report.add(
                "BP305",
                ("training", "data", "tokenizer", "path"),
                f"{display_path(path)} is no Hugging Face tokenizer file",
                help_text="Name a `tokenizer.json`.",
            )
            return
        size, name = counted, display_path(path)
    else:
        return
    if size > vocabulary:
        padded = -(-size // 64) * 64
        report.add(
            "BP304",
            ("model", "vocabulary"),
            f"a vocabulary of {shown(vocabulary)} is smaller than {name}'s {shown(size)} tokens",
            values={("training", "data", "tokenizer"): tokenizer.kind},
            legal=(f"{size} or more, such as {padded}",),
            help_text="Raise model.vocabulary; a multiple of 64 suits the hardware.",
        )


def _tokens_in(path: Path) -> int | None:
    """Tokens of a tokenizer.json, read without the tokenizers library; None if it is none."""
    import json

    try:
        data = json.loads(path.read_bytes())
        vocabulary = data["model"]["vocab"]
        # Unigram models list [piece, score] pairs by id; the others map pieces to ids.
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        added = [int(token["id"]) for token in data.get("added_tokens") or ()]
        return max((*ids, *added), default=-1) + 1
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
