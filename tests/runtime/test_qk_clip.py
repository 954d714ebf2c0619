"""QK-clip: what it watches and what it scales."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shipway.runtime.mesh import MeshPool, build_mesh
from shipway.runtime.parallel.recompute import keep_products
from shipway.runtime.parallelize import ParallelModel
from shipway.runtime.qk_clip import QkClip, bound_of_logits, largest_logits
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import SHALLOW, make_trainer, run_steps, whole_parameters
from tests.templates.generated import build, variant

BOUNDS = torch.tensor([0, 5, 16, 32], dtype=torch.int32)


def test_largest_logit_stays_within_documents_and_the_past() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 16, 3, 8, generator=generator) for _ in range(2))
    found = largest_logits(q, k, 0.5, BOUNDS)
    document = torch.bucketize(torch.arange(32), BOUNDS[1:], right=True).view(2, 16)
    for head in range(3):
        allowed = [
            float(q[b, i, head] @ k[b, j, head]) * 0.5
            for b in range(2)
            for i in range(16)
            for j in range(i + 1)
            if document[b, i] == document[b, j]
        ]
        torch.testing.assert_close(found[head], torch.tensor(max(allowed)))


def test_no_logit_exceeds_its_bound() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 16, 3, 8, generator=generator) for _ in range(2))
    assert (largest_logits(q, k, 0.5) <= bound_of_logits(q, k, 0.5)).all()


def test_slices_of_queries_find_together_what_whole_rows_find() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 16, 3, 8, generator=generator) for _ in range(2))
    halves = [largest_logits(q[:, at : at + 8], k, 0.5, BOUNDS, first=at) for at in (0, 8)]
    torch.testing.assert_close(torch.maximum(*halves), largest_logits(q, k, 0.5, BOUNDS))


def _logits_of_a_layer_far_from_the_threshold() -> tuple[set[str], set[str], set[str]]:
    spec = variant("hybrid")
    model = build(spec)
    clip = QkClip(
        ParallelModel((model,), build_mesh(Layout(), torch.device("cpu"))), spec.attention.latent, 1e3
    )
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    model.train()
    model(tokens, tokens, BOUNDS)
    clip.clip()
    far = set(clip.bounded)
    with torch.no_grad():
        model.layers["1"].attention.q_up.weight.mul_(1e6)
    model(tokens, tokens, BOUNDS)
    clip.clip()
    near = set(clip.bounded)
    model(tokens, tokens, BOUNDS)
    clip.clip()
    return far, near, {name for name, value in _largest(clip, model, tokens).items() if value > 1e3 * 1.001}


def _largest(clip: QkClip, model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    model(tokens, tokens, BOUNDS)
    return {name: float(value.max()) for name, value in clip.largest.items()}


def test_a_layer_is_bounded_while_it_is_far_from_the_threshold_and_clipped_when_it_is_not() -> None:
    ((far, near, over),) = run_ranks(_logits_of_a_layer_far_from_the_threshold, 1)
    assert {"1", "3"} <= far
    assert "1" not in near
    assert "1" not in over


def _clip_once() -> tuple[dict[str, float], dict[str, float], float]:
    spec = variant("hybrid")
    model = build(spec)
    mesh = build_mesh(Layout(), torch.device("cpu"))
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layer in (model.layers["1"], model.layers["3"]):
            layer.attention.q_up.weight.mul_(40)
    clip = QkClip(ParallelModel((model,), mesh), spec.attention.latent, threshold=1.0)
    model.train()
    model(tokens, tokens, BOUNDS)
    before = clip.clip()
    # The same inputs to the clipped layers: only their own projections have changed.
    model(tokens, tokens, BOUNDS)
    watched = {name: float(value.max()) for name, value in clip.largest.items()}
    return before, watched, float(model.layers["1"].attention.q_up.weight.norm())


def test_clipped_heads_come_down_to_the_threshold() -> None:
    ((before, after, _),) = run_ranks(_clip_once, 1)
    assert max(before.values()) > 5.0
    first = min(before, key=int)
    assert after[first] == torch.tensor(1.0).item() or abs(after[first] - 1.0) < 1e-3


THRESHOLD = 0.02
"""Under the logits of some heads and over those of others, so that some are clipped in every step."""
LAYOUTS = {
    "fsdp 2": Layout(data_parallel_shard=2, micro_batch=4),
    "tp 2": Layout(tensor_parallel=2, micro_batch=8),
    "cp 2": Layout(context_parallel=2, micro_batch=8),
    "pp 2": Layout(
        pipeline_parallel=2,
        micro_batch=2,
        micro_batches=4,
        zero=1,
        schedule="1f1b",
        stage_layers=((0, 1), (1, 3)),
    ),
}


def _train_and_clip(
    layouts: list[Layout],
) -> list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    """Largest logits of each step, and this rank's parameters after them, whole."""
    pool, found = MeshPool(torch.device("cpu")), []
    for layout in layouts:
        trainer = make_trainer(layout, pool=pool, changes=SHALLOW | {"vocabulary": 64})
        clip = QkClip(trainer.model, variant("hybrid").attention.latent, THRESHOLD)
        seen: list[dict[str, float]] = []

        def clip_and_tell(clip: QkClip = clip, seen: list[dict[str, float]] = seen) -> None:
            seen.append(QkClip.clip(clip))

        clip.clip = clip_and_tell  # type: ignore[method-assign, assignment]
        trainer.qk_clip = clip
        run_steps(trainer, range(3))
        found.append((seen, whole_parameters(trainer)))
    return found


def test_every_layout_clips_what_one_process_clips() -> None:
    (((alone, parameters),),) = run_ranks(_train_and_clip, 1, [Layout(micro_batch=8)])
    assert any(value > 1.2 * THRESHOLD for step in alone for value in step.values())
    ranks = run_ranks(_train_and_clip, 2, [*LAYOUTS.values()])
    for index, name in enumerate(LAYOUTS):
        parts = [rank[index] for rank in ranks]
        seen = [{k: v for part, _ in parts for k, v in part[step].items()} for step in range(len(alone))]
        for mine, theirs in zip(seen, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3), name
        whole = {key: value for _, part in parts for key, value in part.items()}
        for key in (key for key in parameters if "q_up" in key or "kv_up" in key):
            torch.testing.assert_close(whole[key], parameters[key], rtol=5e-3, atol=5e-4, msg=f"{name} {key}")


def test_evaluation_is_not_watched() -> None:
    core = SimpleNamespace(training=False, scale=1.0)
    clip = object.__new__(QkClip)
    clip.largest = {}
    clip._watch("0", core, (torch.ones(1, 2, 1, 2),) * 3)
    assert clip.largest == {}


def test_selective_recomputation_keeps_nothing_of_what_is_watched() -> None:
    clip = object.__new__(QkClip)
    clip.largest, clip.bounded = {}, set()
    keep, _ = keep_products()
    with keep:
        clip._watch("0", SimpleNamespace(training=True, scale=1.0), (torch.ones(1, 4, 2, 8),) * 3)
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert {operator: len(kept) for operator, kept in keep._outputs.items()} == {torch.ops.aten.mm.default: 1}
    assert clip.largest["0"].tolist() == [8.0, 8.0]


def _weights_after_a_step_of_negative_logits() -> bool:
    spec = variant("hybrid")
    model = build(spec)
    mesh = build_mesh(Layout(), torch.device("cpu"))
    clip = QkClip(ParallelModel((model,), mesh), spec.attention.latent, threshold=1.0)
    attention = model.layers["1"].attention
    before = attention.q_up.weight.clone()
    clip.largest["1"] = torch.full((spec.attention.latent.heads,), -2.0)
    clip.clip()
    return torch.equal(attention.q_up.weight, before)


def test_a_head_whose_logits_are_all_negative_is_left_as_it_is() -> None:
    assert run_ranks(_weights_after_a_step_of_negative_logits, 1) == [True]
