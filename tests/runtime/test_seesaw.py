"""The seesaw guard: a longer context must not be bought with the short one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shipway.runtime.evaluate import SHORT_POSITIONS, seesaw
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.metrics import read_metrics
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from shipway.schemas.layout import Layout
from tests.runtime import small_plan
from tests.runtime.ranks import run_ranks

CONTEXT_TOKENS = 128
"""The guard looks at the first 128 tokens of a document: no shorter context shows them all."""


class Noting(Silent):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def train(build: Path, run: Path) -> tuple[str, list[str]]:
    """How the programme ended, and what was said."""
    display = Noting()
    try:
        code = train_here(build, RunFolder(run), torch.device("cpu"), StopRequest(), display=display)
        return code.words, display.said
    except Fatal as error:
        return str(error), display.said


def spoilt(folder: Path, policy: str) -> Path:
    """A build whose model reads out nonsense when it is evaluated at the second stage's context."""
    evaluation = {"every_steps": 100, "sequences": 4, "short_loss_bound": 0.05, "beyond_bound": policy}
    layouts = [Layout(micro_batch=4)] * 2
    plan = small_plan.small_plan({"short": 3, "long": 2}, layouts, 4, evaluation=evaluation)
    build = small_plan.write_build(plan, folder)
    text = (build / "model.py").read_text()
    text += (
        "\n\n_read_out = Model.read_out\n\n\n"
        "def _spoilt(self, hidden, labels=None):\n"
        f"    wrong = labels is None and hidden.shape[1] > {CONTEXT_TOKENS}\n"
        "    return _read_out(self, -3 * hidden if wrong else hidden, labels)\n\n\n"
        "Model.read_out = _spoilt\n"
    )
    (build / "model.py").write_text(text)
    return build


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_rise_of_the_short_loss_over_a_stage_warns_or_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(small_plan, "CONTEXT_TOKENS", CONTEXT_TOKENS)
    ((ended, said),) = run_ranks(train, 1, spoilt(tmp_path / "build", policy), tmp_path / "run")
    words = "stage long: held-out loss of short contexts rose from"
    if policy == "stop":
        assert ended.startswith(words)
        assert "keep more of the earlier mix" in ended
    else:
        assert ended == "done"
        assert any(text.startswith(words) for text in said)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    measured = [line["measures"] for line in lines if line.get("event") == "evaluation"]
    assert len(measured) == 2, "one whole evaluation at each stage's end"
    before, after = (measures[SHORT_POSITIONS] for measures in measured)
    assert after > before * 1.05
    assert any(name.startswith("needle/") for name in measured[0])


def test_what_is_within_the_bound_or_unknown_is_no_problem() -> None:
    assert seesaw(None, 3.0, 0.05) is None
    assert seesaw(2.0, None, 0.05) is None
    assert seesaw(2.0, 2.1, 0.05) is None
    assert "+10.0%" in (seesaw(2.0, 2.2, 0.05) or "")
