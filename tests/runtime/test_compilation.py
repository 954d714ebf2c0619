"""Compiled blocks train what eager ones train, under FSDP, tensor and expert parallel and recomputation."""

from __future__ import annotations

import copy

import pytest
import torch

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import MeshPool
from shipway.runtime.parallel import compilation
from shipway.runtime.parallel.compilation import apply_compilation, blocks, check_compiler
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import Outcome, make_trainer, run_steps, whole_parameters
from tests.templates.generated import build, next_labels, tokens_of, variant

CPU = torch.device("cpu")
LAYOUTS = [
    Layout(data_parallel_shard=2, micro_batch=4, recompute="selective"),
    Layout(data_parallel_shard=2, micro_batch=2, micro_batches=2, recompute="full"),
    Layout(tensor_parallel=2, expert_parallel=2, micro_batch=4, micro_batches=2, recompute="selective"),
]


def train_both_ways() -> tuple[list[Outcome], list[Outcome]]:
    """A step of each layout, eager and compiled; what inductor would get, run by PyTorch."""
    compilation.BACKEND = "aot_eager"
    pool, outcomes = MeshPool(CPU), ([], [])
    for layout in LAYOUTS:
        for found, choice in zip(outcomes, ("none", "blocks"), strict=True):
            trainer = make_trainer(
                layout,
                model="grouped",
                pool=pool,
                compilation=choice,
                changes={"layers": 2, "vocabulary": 64},
            )
            results = run_steps(trainer, range(1))
            losses, norms = [r.loss for r in results], [r.gradient_norm for r in results]
            found.append(Outcome(losses, norms, whole_parameters(trainer)))
        torch._dynamo.reset()  # or the next model of the same code would reach the limit of recompilations
    return outcomes


def test_under_every_axis_and_recomputation_compiled_blocks_train_what_eager_ones_train() -> None:
    eager, compiled = run_ranks(train_both_ways, 2)[0]
    for found, expected in zip(compiled, eager, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=2e-5)
        assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-3)
        for name, value in expected.parameters.items():
            torch.testing.assert_close(found.parameters[name], value, rtol=2e-3, atol=2e-4, msg=name)


def test_inductors_code_gives_the_loss_and_gradients_of_eager_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no pool of workers to wait for
    try:
        check_compiler("cpu")
    except Fatal as missing:
        pytest.skip(str(missing))
    model = variant("grouped gated", layers=1)  # two blocks: C++ takes seconds for each
    eager = build(model)
    compiled = copy.deepcopy(eager)
    apply_compilation(compiled, CPU, "blocks")
    tokens = tokens_of(model, 2, 40)
    losses = [each(tokens, next_labels(tokens)) for each in (eager, compiled)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    largest = max(p.grad.abs().max().item() for p in eager.parameters())
    for (name, parameter), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5 * largest, msg=name)
    assert compiled.state_dict().keys() == eager.state_dict().keys()


def test_every_attention_unit_and_vision_layer_is_a_block() -> None:
    hybrid, seeing = build(variant("hybrid")), build(variant("vision"))
    layers = hybrid.layers.values()
    units = [getattr(layer.feed_forward, "shared", layer.feed_forward) for layer in layers]
    assert set(blocks(hybrid)) == {*(layer.attention for layer in layers), *units}
    assert {*seeing.vision.layers, seeing.vision.projector} <= set(blocks(seeing))


def test_a_machine_without_a_compiler_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(Fatal, match=r"needs a C\+\+ compiler.*set training.compile to none"):
        apply_compilation(build(variant("grouped gated")), CPU, "blocks")
