"""The benchmark of throughput, small: every path but the GPU's kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.contenders.cases import CONTENDERS, DECAY, LARGE_BATCH, ONE_PASS, Contender, chosen
from bench.contenders.layer import contexts
from bench.contenders.own import prepare
from bench.contenders.peers import count, peer_of
from bench.contenders.train import MasterAdamW, fused_adamw, train
from bench.throughput import Started, append
from shipway.schemas.training import AdamW

PEERS = {c.case: c for c in CONTENDERS if c.kind == "transformers" and not c.compiled}
LISTED = {(c.case, c.overrides): c for c in (*CONTENDERS, *DECAY) if c.kind == "shipway"}


@pytest.mark.parametrize("contender", LISTED.values(), ids=lambda contender: contender.name)
def test_every_build_is_planned_to_go_into_one_h200(contender: Contender, tmp_path: Path) -> None:
    stage = prepare(contender, False, (), tmp_path / "build").stage
    # all sequences of a step at once are what the card that trained small_h200 just holds
    assert stage.memory.verdict == ("tight" if set(ONE_PASS) <= set(contender.overrides) else "fits")
    tokens = 131072 if set(LARGE_BATCH) <= set(contender.overrides) else 32768
    assert stage.sequences_per_step * stage.context_tokens == tokens
    assert stage.layout.recompute == "none"


@pytest.mark.parametrize("contender", PEERS.values(), ids=lambda contender: contender.name)
def test_a_peer_has_the_build_s_parameters_but_for_balancing_biases(
    contender: Contender, tmp_path: Path
) -> None:
    plan = prepare(contender, False, (), tmp_path / "build").plan
    model = plan.blueprint.model
    experts = model.feed_forward.experts
    biases = model.feed_forward_kinds().count("experts") * (experts.routed if experts else 0)
    assert count(peer_of(contender.kind, model, "meta")) == plan.parameters.total - biases


@pytest.mark.parametrize("name", ["dense_8k/transformers/master", "hybrid_experts_8k/transformers/bf16"])
def test_a_peer_trains_on_the_build_s_batches(name: str, tmp_path: Path) -> None:
    (contender,) = chosen((name,), decay=False, contexts=False)
    case = prepare(contender, True, (), tmp_path / "build")
    row = train(peer_of(contender.kind, case.plan.blueprint.model, "cpu"), contender, case, "cpu", steps=1)
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(case.tokens_per_step)
    assert row["settings"]["optimizer"] == "adamw"


def test_master_weights_move_as_fp32_weights_and_are_rounded_only_in_the_model() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(5, 8, 4)
    weight = torch.randn(8, 4).bfloat16()
    rounded, exact = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.float())
    master, plain = MasterAdamW([rounded], AdamW(), 1e-3), fused_adamw([exact], AdamW(), 1e-3)
    for gradient in gradients.bfloat16():
        rounded.grad, exact.grad = gradient.clone(), gradient.float()
        master.step()
        plain.step()
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0)


def test_a_delta_layer_runs_over_as_many_tokens_at_every_context(tmp_path: Path) -> None:
    (contender,) = chosen(("*/contexts",), decay=False, contexts=False)
    found = contexts(prepare(contender, True, (), tmp_path / "build"), "cpu", (64, 128))
    assert [(row["context_tokens"], row["tokens"]) for row in found["lengths"]] == [(64, 128), (128, 128)]


def test_rows_are_added_and_one_that_cannot_run_here_says_why(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    append(out, {"name": "earlier"})
    command = [sys.executable, "-m", "bench.throughput", "--device", "cpu", "--tiny", "--out", str(out)]
    ended = subprocess.run(
        [*command, "--only", "*/flash-linear-attention/bf16"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    earlier, row = json.loads(out.read_text())["rows"]
    assert earlier == {"name": "earlier"}
    assert row["outcome"] == "unavailable", row
    assert "flash-linear-attention" in row["detail"]


def test_a_contender_that_takes_too_long_costs_its_own_row_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('training', flush=True); sys.stdin.read()"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command[:2], command[2] + "; import time; time.sleep(600)"], stdin=subprocess.PIPE, stdout=file
        )
    row = Started(CONTENDERS[0], process, tmp_path / "row.json", log).finish(3.0)
    assert row["outcome"] == "timeout"
    assert process.returncode is not None
