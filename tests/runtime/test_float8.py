"""Linear modules in fp8: near bf16, the same in every layout, and what the planner says of them is so.

On a CPU torchao emulates the products: operands are rounded to fp8 all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Gemm
from shipway.compiler.operators.fp8 import PLAIN_SCALING, PLAIN_TRANSPOSE, cast, runs_in_fp8
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import MeshPool
from shipway.runtime.parallel import compilation, float8
from shipway.runtime.parallel.compilation import apply_compilation
from shipway.runtime.parallel.float8 import apply_float8, check_linears
from shipway.runtime.parallel.support import check_layout
from shipway.schemas.layout import Layout
from shipway.schemas.model import Model
from shipway.schemas.training import Precision
from tests.compiler.operators.measure import saved_bytes
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import make_trainer, run_steps
from tests.templates.generated import build, next_labels, tokens_of, variant

CPU = torch.device("cpu")
FP8 = Precision(compute="fp8")


def linears_of(model: Model) -> tuple[str, ...]:
    """What a plan would name, however narrow."""
    named = lower(model).named_parameters()
    return tuple(name.removesuffix(".weight") for name, p in named if runs_in_fp8(p, 16))


def both(name: str) -> tuple[Model, nn.Module, nn.Module]:
    """A variant, built in bf16 and as it multiplies in fp8."""
    model = variant(name)
    plain = build(model).to(torch.bfloat16)
    rounded = copy.deepcopy(plain)
    apply_float8(rounded, linears_of(model), CPU)
    return model, plain, rounded


def in_fp8(module: nn.Module) -> Iterator[str]:
    return (name for name, m in module.named_modules() if type(m).__name__ == "Float8Linear")


@pytest.mark.parametrize("name", ["hybrid", "older delta", "grouped", "three kinds"])
def test_the_linears_that_a_plan_names_multiply_in_fp8_and_no_others(name: str) -> None:
    model, plain, rounded = both(name)
    named = linears_of(model)
    check_linears(plain, named)
    assert named
    assert sorted(in_fp8(rounded)) == sorted(named)
    for part in ("router", "head", "embed", "norm", "decay", "beta", "experts"):
        assert not [one for one in named if part in one.split(".")[-1]]
    assert rounded.state_dict().keys() == plain.state_dict().keys()


def test_products_and_gradients_are_as_far_from_bf16_as_three_bits_of_mantissa() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512, bias=False)).to(torch.bfloat16)
    rounded = copy.deepcopy(plain)
    apply_float8(rounded, ["0"], CPU)
    x = torch.randn(384, 256, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(384, 512, dtype=torch.bfloat16)
    found = []
    for each in (plain, rounded):
        y = each(x)
        found.append((y, *torch.autograd.grad(y, [x, each[0].weight], gradient)))
    for expected, other in zip(*found, strict=True):
        # An operand is off by up to 2^-4 of itself, 2.6 % in the mean square, and a product has two.
        off = ((expected - other).float().norm() / expected.float().norm()).item()
        assert 0.02 < off < 0.06


def test_a_models_loss_and_gradient_are_near_those_of_bf16() -> None:
    model = variant("grouped gated", layers=1)
    plain = build(model).to(torch.bfloat16)
    rounded = copy.deepcopy(plain)
    apply_float8(rounded, linears_of(model), CPU)
    tokens = tokens_of(model, 4, 96)
    losses = [each(tokens, next_labels(tokens)) for each in (plain, rounded)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=5e-3)
    for loss in losses:
        loss.backward()
    flat = [torch.cat([p.grad.float().flatten() for p in each.parameters()]) for each in (plain, rounded)]
    assert (flat[1] - flat[0]).norm() < 0.2 * flat[0].norm()


def test_kept_for_backward_is_what_bf16_keeps() -> None:
    model, plain, rounded = both("hybrid")
    tokens = tokens_of(model, 2, 64)
    kept = [
        saved_bytes(lambda each=each: each(tokens, tokens), each.parameters()) for each in (plain, rounded)
    ]
    assert kept[1] == kept[0]


def test_the_same_products_are_counted() -> None:
    model, plain, rounded = both("grouped gated")
    tokens = tokens_of(model, 2, 32)
    counts = []
    for each in (plain, rounded):
        with FlopCounterMode(display=False) as counter:
            each(tokens, tokens).backward()
        counts.append(counter.get_total_flops())
    assert counts[1] == counts[0]


LAYOUTS = {
    "alone, accumulating": Layout(micro_batch=4, micro_batches=2),
    "fsdp 2, full recomputation": Layout(data_parallel_shard=2, micro_batch=4, recompute="full"),
    "fsdp 2, selective recomputation": Layout(data_parallel_shard=2, micro_batch=4, recompute="selective"),
    "tp 2": Layout(tensor_parallel=2, micro_batch=4, micro_batches=2),
    "cp 2": Layout(context_parallel=2, micro_batch=4, micro_batches=2),
    "pp 2": Layout(
        pipeline_parallel=2,
        micro_batch=4,
        micro_batches=2,
        schedule="1f1b",
        zero=1,
        stage_layers=((0, 1), (1, 3)),
    ),
}


def train_all() -> dict[str, list[float]]:
    """Losses of some steps in every layout that takes these ranks."""
    pool, named, found = MeshPool(CPU), linears_of(variant("hybrid", layers=3)), {}
    for name, layout in LAYOUTS.items():
        if layout.world_size == dist.get_world_size():
            trainer = make_trainer(layout, pool=pool, precision=FP8, fp8_linears=named, changes={"layers": 3})
            found[name] = [run_steps(trainer, range(1), rate=0.02)[0].loss for _ in range(3)]
    return found


def train_alone(folder: Path) -> list[float]:
    """The same on one rank, in this process."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    try:
        (losses,) = train_all().values()
    finally:
        dist.destroy_process_group()
    return losses


def test_every_layout_trains_alike_and_losses_fall(tmp_path: Path) -> None:
    alone = train_alone(tmp_path)
    assert alone[-1] < 0.95 * alone[0]
    found = run_ranks(train_all, 2)[0]
    assert found.keys() == {name for name, layout in LAYOUTS.items() if layout.world_size == 2}
    for name, losses in found.items():
        # In bf16 layouts round at different places; steps of Muon then part.
        assert losses[0] == pytest.approx(alone[0], rel=1e-3), name
        assert losses == pytest.approx(alone, rel=5e-2), name


def test_compiled_blocks_multiply_in_fp8_as_eager_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    model = variant("grouped gated", layers=1)
    eager = build(model).to(torch.bfloat16)
    apply_float8(eager, linears_of(model), CPU)
    compiled = copy.deepcopy(eager)
    apply_compilation(compiled, CPU, "blocks", fp8=True)
    tokens = tokens_of(model, 2, 32)
    losses = [each(tokens, next_labels(tokens)) for each in (eager, compiled)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for loss in losses:
        loss.backward()
    flat = [torch.cat([p.grad.float().flatten() for p in each.parameters()]) for each in (eager, compiled)]
    assert (flat[1] - flat[0]).norm() < 0.02 * flat[0].norm()


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write on their way into fp8 products, products left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.mm.default and not func.is_view:
            both = [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in both)
        return out


def test_uncompiled_casts_move_the_bytes_that_are_planned() -> None:
    rows, inner, columns = 512, 256, 1024
    linear = nn.Sequential(nn.Linear(inner, columns, bias=False)).to(torch.bfloat16)
    apply_float8(linear, ["0"], CPU)
    x = torch.randn(rows, inner, dtype=torch.bfloat16, requires_grad=True)
    with Traffic() as forward:
        y = linear(x)
    gradient = torch.randn_like(y)
    with Traffic() as backward:
        torch.autograd.grad(y, [x, linear[0].weight], gradient)
    planned = cast(Gemm("", rows, inner, columns), fused=False)
    assert forward.bytes == pytest.approx(planned.forward_bytes, rel=0.03)
    # Emulation neither copies what lies the wrong way nor scales outputs apart.
    x_size, w_size, g_size = rows * inner, inner * columns, rows * columns
    apart = PLAIN_SCALING * (x_size + w_size) + PLAIN_TRANSPOSE * (x_size + w_size + g_size)
    assert backward.bytes == pytest.approx(planned.backward_bytes - apart, rel=0.03)


def test_names_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(Fatal, match=r"no linear module layers\.0\.attention\.nothing"):
        check_linears(build(variant("grouped gated")), ["layers.0.attention.nothing"])


def test_schedules_that_put_weights_gradients_off_are_refused() -> None:
    layout = Layout(pipeline_parallel=2, virtual_stages=2, zero=1, schedule="zbv")
    check_layout(layout)
    with pytest.raises(Fatal, match="schedule zbv; plan with"):
        check_layout(layout, FP8)


def test_without_torchao_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(Fatal, match=r"needs torchao: pip install shipway\[gpu\]"):
        apply_float8(nn.Sequential(nn.Linear(16, 16)), ["0"], CPU)
