"""The image-text example: planned, built and trained as `shipway launch captions` does, only shorter.

Half of its rows come from the drawn pictures, half from a folder of PNG and JPEG files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from shipway.compiler.emit.build import build as write_build
from shipway.runtime.data.sources.rendered_text import RenderedText
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.metrics import read_metrics
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from tests.runtime.ranks import run_ranks
from tests.templates.test_build import plan_of

STEPS = 24


def write_folder(folder: Path, count: int) -> None:
    """Pictures of words as files, half of them JPEG, each with a .txt beside it."""
    folder.mkdir()
    records = RenderedText(count, seed=1, lines=1, words=1)
    for index in range(count):
        picture = Image.fromarray(records.pixels(index, *records.size(index)))
        picture.save(folder / f"{index:03d}.{'png' if index % 2 else 'jpg'}")
        (folder / f"{index:03d}.txt").write_text(records.caption(index))


def train(build: Path, run: Path) -> ExitCode:
    return train_here(build, RunFolder(run), torch.device("cpu"), StopRequest(), display=Silent())


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a short run of the example wrote."""
    root = tmp_path_factory.mktemp("captions")
    write_folder(root / "mine", 60)
    plan = plan_of(
        "captions",
        "cluster.devices_per_node=1",
        f"+training.data.sources.mine={{kind: images, path: {root / 'mine'}}}",
        "training.data.held_out=0.2",
        "training.stages.0.global_batch=256",
        f"training.stages.0.tokens={256 * STEPS}",
        "training.evaluation.sequences=4",
    )
    write_build(plan, root / "build")
    assert run_ranks(train, 1, root / "build", root / "run") == [ExitCode.DONE]
    return read_metrics(root / "run" / "metrics.jsonl")


def test_loss_falls_on_pictures_and_captions(lines: list[dict[str, Any]]) -> None:
    losses = [line["loss"] for line in lines if "event" not in line]
    assert len(losses) == STEPS
    assert sum(losses[-4:]) / 4 < 0.75 * losses[0]


def test_captions_of_held_out_pictures_are_scored_by_source(lines: list[dict[str, Any]]) -> None:
    (measures,) = (line["measures"] for line in lines if line.get("event") == "evaluation")
    for source in ("drawn", "mine"):
        assert 0 <= measures[f"captions/{source}"] <= 1
        assert measures[f"held_out/source/{source}"] < 6
