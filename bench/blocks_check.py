"""Every block of generated models in bf16 on a device against float64, forward and backward.

    python -m bench.blocks_check --out bench/results/blocks-h200.json
    python -m bench.blocks_check --compiled --out bench/results/blocks-compiled-h200.json

The module under test is that of the model.py that `build` writes, with the kernels that this device is
served by. What is expected comes from `reference`: token by token and head by head from the equations, in
float64 on the CPU, of the same rounded weights and inputs; nothing of the generated code or the kernels is
in it. An error is ||found - expected|| / ||expected||, per output and per gradient of every input and
parameter; one rounding to bf16 alone gives 0.0017. Exits with 1 when an error exceeds its bound or a block
fails to run; the others are checked all the same. With `--compiled` the blocks are compiled as under
`training.compile: blocks`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from bench.blocks import Block, all_blocks
from shipway.compiler.emit.model import Header, render_model
from shipway.runtime import kernels
from shipway.runtime.parallel.compilation import apply_compilation
from shipway.runtime.parallel.data import FP32_SUFFIXES

HEADER = Header(name="block", shipway="0", plan_hash="sha256:0", command="bench.blocks_check")
PACKAGES = ("fla-core", "triton")


@dataclass(frozen=True)
class Check:
    """One compared tensor."""

    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Outcome:
    """What came of one block."""

    block: str
    seconds: float
    checks: list[Check] = field(default_factory=list)
    failure: str | None = None
    """The error, where the block did not run."""

    @property
    def passed(self) -> bool:
        return self.failure is None and all(check.passed for check in self.checks)

    @property
    def worst(self) -> Check:
        return max(self.checks, key=lambda check: check.error / check.bound)


def check(block: Block, device: torch.device, compiled: bool) -> list[Check]:
    """Outputs, and the gradients of one random weighting of them."""
    generator = torch.Generator().manual_seed(0)
    model = drawn(block, generator)
    weights = exact(model.get_submodule(block.place).state_dict())
    inputs = dict(block.draw(generator, weights))
    exact_inputs = exact(inputs)
    with torch.set_grad_enabled(block.gradients):
        expected = block.expected(weights, exact_inputs)

    model.to(device)
    if compiled:
        torch._dynamo.reset()  # or forms of all models together reach the limit of one
        apply_compilation(model, device, "blocks")
    module = model.get_submodule(block.place)
    inputs = {name: differentiable(x.to(device)) for name, x in inputs.items()}
    found = block.found(module, inputs)
    outputs = zip(found, expected, strict=True)
    checks = [Check(f"output {i}", error(a, b), block.forward_bound) for i, (a, b) in enumerate(outputs)]
    if not block.gradients:
        return checks

    directions = [torch.randn(y.shape, generator=generator).bfloat16() for y in expected]
    wanted = gradients(expected, directions, leaves(exact_inputs, weights))
    got = gradients(found, directions, leaves(inputs, dict(module.named_parameters())))
    for name, gradient in got.items():
        special = [bound for end, bound in block.bounds.items() if name.endswith(end)]
        bound = special[0] if special else block.backward_bound
        if bound is not None:
            checks.append(Check(f"grad {name}", error(gradient, wanted[name]), bound))
    return checks


def drawn(block: Block, generator: torch.Generator) -> nn.Module:
    """A generated model with drawn weights, in the dtypes that training computes with."""
    module = ModuleType(f"model_{abs(hash(block.name))}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    text = render_model(block.model, header=HEADER)
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    model: nn.Module = module.Model()
    model.init_weights(generator)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # no gradient vanishes at a zero, no softmax over depth is near a maximum
            spread = 0.02 if name.endswith("query") else 0.3
            parameter.data += spread * torch.randn(parameter.shape, generator=generator)
        if not name.endswith((*FP32_SUFFIXES, "router.weight")):
            parameter.data = parameter.data.bfloat16()
    return model


def exact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values in float64, which gradients are asked of; integers as they are."""
    return {
        name: differentiable(x.detach().double() if x.is_floating_point() else x)
        for name, x in tensors.items()
    }


def differentiable(x: Tensor) -> Tensor:
    """A leaf that takes a gradient, if it can."""
    return x.detach().requires_grad_(x.is_floating_point())


def leaves(inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What gradients are compared of."""
    return {name: x for name, x in {**inputs, **weights}.items() if x.requires_grad}


def gradients(
    outputs: Sequence[Tensor], directions: Sequence[Tensor], of: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients by name, zero where nothing depends on a leaf."""
    weights = [direction.to(output) for direction, output in zip(directions, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(of.values()), weights, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(of.items(), found, strict=True)
    }


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; inf when anything is not finite."""
    difference = (found.detach().cpu().double() - expected.detach()).norm()
    relative = (difference / expected.norm().clamp(min=1e-30)).item()
    return relative if relative == relative else float("inf")


def outcome(block: Block, device: torch.device, compiled: bool) -> Outcome:
    """Check a block, whatever it raises."""
    start = time.perf_counter()
    try:
        return Outcome(block.name, checks=check(block, device, compiled), seconds=time.perf_counter() - start)
    except Exception as problem:
        traceback.print_exc()
        text = f"{type(problem).__name__}: {problem}"
        return Outcome(block.name, failure=text, seconds=time.perf_counter() - start)


def show(row: Outcome) -> None:
    """One line for a block, and one for every tensor over its bound."""
    if row.failure is not None:
        print(f"BAD {row.block:46s} {row.failure.splitlines()[0]}", flush=True)
        return
    worst = row.worst
    print(
        f"{'ok ' if row.passed else 'BAD'} {row.block:46s} {len(row.checks):3d} tensors,"
        f" worst {worst.error:.4f} <= {worst.bound} ({worst.tensor}) {row.seconds:6.1f} s",
        flush=True,
    )
    for bad in (check for check in row.checks if not check.passed):
        print(f"    {bad.tensor:40s} {bad.error:.4f} > {bad.bound}", flush=True)


def result(device: torch.device, compiled: bool, rows: list[Outcome]) -> dict[str, object]:
    """What is kept: command, versions, date, figures."""
    return {
        "command": "python -m bench.blocks_check " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **installed()},
        "compiled": compiled,
        "kernels": [asdict(choice) for choice in kernels.table(device.type)],
        "passed": all(row.passed for row in rows),
        "blocks": [{**asdict(row), "seconds": round(row.seconds, 2), "passed": row.passed} for row in rows],
    }


def installed() -> dict[str, str]:
    """Versions of what kernels come from, where it is there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and write; 1 when a bound is exceeded or a block fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true", help="with compiled blocks")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="blocks whose name has it; repeatable"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    start = time.perf_counter()
    rows: list[Outcome] = []
    for block in all_blocks():
        asked = not options.only or any(text in block.name for text in options.only)
        if not asked or (options.compiled and not block.gradients):  # decoding is never compiled
            continue
        rows.append(outcome(block, device, options.compiled))
        show(rows[-1])
        options.out.write_text(json.dumps(result(device, options.compiled, rows), indent=1) + "\n")
    good = sum(row.passed for row in rows)
    print(f"{good} of {len(rows)} blocks within their bounds, {time.perf_counter() - start:.0f} s")
    return 0 if good == len(rows) and rows else 1


if __name__ == "__main__":
    sys.exit(main())
