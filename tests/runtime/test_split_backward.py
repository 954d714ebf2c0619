"""Backward in two parts: the same gradients as in one, and no product computed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Gemm, Shard
from shipway.compiler.workload import workload
from shipway.runtime.parallel.pipeline import Chunk, chunks_of, keep_chunk
from shipway.runtime.parallel.split_backward import split_parameters
from shipway.schemas.layout import Layout
from tests.templates.generated import load, variant

TOKENS = 32


def last_chunk(model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The second half of a generated model, the hidden states that enter it, and labels."""
    module = load(variant(model, multi_token_prediction=None, tied_embeddings=False))
    torch.manual_seed(0)
    part = module.Model()
    layers = len(part.layers)
    layout = Layout(
        pipeline_parallel=2,
        micro_batches=2,
        schedule="1f1b",
        stage_layers=((0, layers // 2), (layers // 2, layers)),
    )
    chunk: Chunk = chunks_of(part, layout, 1)[0]
    part.init_weights()
    keep_chunk(part, chunk)
    part.train()
    shape = (2, TOKENS, part.norm.weight.shape[0])
    hidden = torch.randn(shape if chunk.sources is None else (chunk.sources, *shape), requires_grad=True)
    return part, hidden, torch.randint(0, module.VOCABULARY, shape[:2])


def split(loss: Tensor, hidden: Tensor, part: nn.Module) -> list[tuple[int, dict[str, Tensor]]]:
    """FLOPs of both parts, and the gradients there are after each."""
    found = []
    now, later = split_parameters(part)

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}

    with FlopCounterMode(display=False) as counter:
        _, groups = stage_backward_input([loss], None, [hidden, *now], iter(later))
    found.append((counter.get_total_flops(), gradients()))
    with FlopCounterMode(display=False) as counter:
        stage_backward_weight(iter(later), groups)
    found.append((counter.get_total_flops(), gradients()))
    return found


@pytest.mark.parametrize("model", ["hybrid", "older delta", "rotary latent", "grouped"])
def test_two_parts_do_the_work_of_one(model: str) -> None:
    part, hidden, labels = last_chunk(model)
    with FlopCounterMode(display=False) as counter:
        loss = part(hidden, labels)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    whole, input_gradient = counter.get_total_flops(), hidden.grad
    expected = {name: p.grad for name, p in part.named_parameters()}
    part.zero_grad()
    hidden.grad = None
    (first, early), (second, found) = split(part(hidden, labels), hidden, part)
    assert whole > 1.5 * forward  # what is compared is there
    assert first + second == whole
    assert input_gradient is not None
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, input_gradient)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, n=name: f"{n}: {text}")
    late = found.keys() - early.keys()
    assert {n.rsplit(".", 2)[-2] for n in late} >= {"output_proj", "down"}
    assert not any("norm" in n or "_conv" in n or n.startswith("head") for n in late)


def test_split_a_recomputed_layer_would_run_again_for_every_weight() -> None:
    # Why the input part runs all of backward under recomputation (`whole_backward`).
    runs = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.products = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))

        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return self.products(x).tanh()

    layer, x = Layer(), torch.randn(2, 4, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    _, groups = stage_backward_input([loss], None, [x], layer.parameters())
    assert len(runs) == 2
    stage_backward_weight(layer.parameters(), groups)
    assert len(runs) == 2 + 5


@pytest.mark.parametrize("model", ["hybrid", "older delta", "rotary latent", "grouped"])
def test_what_waits_for_the_weight_part_is_what_the_planner_counts(model: str) -> None:
    part, hidden, labels = last_chunk(model)
    now, later = split_parameters(part)
    _, groups = stage_backward_input([part(hidden, labels)], None, [hidden, *now], iter(later))
    waiting = {
        id(g): g.numel() * g.element_size() for group in groups for given in group["grads"] for g in given
    }
    assert sum(waiting.values()) == planned_waiting(model, len(part.layers))


def planned_waiting(model: str, last_layers: int) -> int:
    """Gradients of the outputs of the products of a model's last layers, by the catalogue."""
    work = workload(lower(variant(model, multi_token_prediction=None, tied_embeddings=False)))
    shard = Shard(2, TOKENS, element_bytes=4, implementation="plain")
    return sum(
        int(kernel.rows * kernel.columns * kernel.groups) * shard.element_bytes
        for row in work.layer_rows[-last_layers:]
        for _, operator in work.rows[row].operators()
        for kernel in operator.kernels(shard)
        if isinstance(kernel, Gemm)
    )
