"""QK-clip: what it watches and what it scales."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from shipway.runtime.mesh import build_mesh
from shipway.runtime.parallelize import ParallelModel
from shipway.runtime.qk_clip import QkClip, largest_logits
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
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


def test_evaluation_is_not_watched() -> None:
    core = SimpleNamespace(training=False, scale=1.0)
    clip = object.__new__(QkClip)
    clip.largest = {}
    clip._watch("0", core, (torch.ones(1, 2, 1, 2),) * 3)
    assert clip.largest == {}
