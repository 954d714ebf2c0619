"""Every dispatched kernel against float64, forward and backward, and how long it takes.

    python bench/kernels_check.py --out bench/results/kernels-h200.json

Inputs are bf16 (parameters that training keeps in fp32 stay in fp32); the expected values are computed
in float64 from the same rounded inputs by the plain forms (chunkwise, not token by token), which the tests
hold against token-by-token references at 1e-10. An error is ||found - expected|| / ||expected||, per output
and per gradient; one bf16 rounding alone gives 0.0017. Exits with 1 when an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shipway.runtime import kernels
from shipway.runtime.kernels.attention import plain_softmax_attention
from shipway.runtime.kernels.convolution import plain_short_convolution
from shipway.runtime.kernels.delta import plain_delta_rule, plain_delta_step
from shipway.runtime.kernels.residual import plain_attention_residual

REPETITIONS = 20
Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape; both functions take the same tensors and return the same outputs."""

    name: str
    inputs: list[Tensor]
    names: tuple[str, ...]
    found: Function
    expected: Function
    forward_bound: float = 0.01
    backward_bound: float = 0.02
    gradients: bool = True


@dataclass(frozen=True)
class Check:
    """One compared tensor."""

    case: str
    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Timing:
    """Medians over repetitions, and the peak of allocated memory over the inputs."""

    case: str
    forward_ms: float
    backward_ms: float
    peak_bytes: int


class Shapes:
    """Sizes of the checked tensors: small enough for float64, or as training has them."""

    def __init__(self, device: torch.device, large: bool) -> None:
        self.device = device
        self.tokens, self.heads, self.width = (8192, 16, 2048) if large else (640, 2, 256)
        self.experts, self.active, self.vocabulary = (64, 8, 32768) if large else (8, 2, 1000)
        self.generator = torch.Generator(device).manual_seed(0)

    def half(self, *shape: int, spread: float = 1.0) -> Tensor:
        """A bf16 leaf."""
        return self.full(*shape, spread=spread).detach().bfloat16().requires_grad_()

    def full(self, *shape: int, spread: float = 1.0) -> Tensor:
        """An fp32 leaf."""
        x = torch.randn(*shape, generator=self.generator, device=self.device) * spread
        return x.requires_grad_()

    def boundaries(self) -> Tensor:
        """Documents of very unequal length, cut inside chunks and tiles."""
        ends = [round(self.tokens * part) for part in (0, 0.001, 0.13, 0.14, 0.51, 0.77, 1)]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)


def delta_cases(s: Shapes) -> list[Case]:
    """The chunk kernel: bounded and not, grouped value heads, documents, states."""
    names = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "state")
    cases = []
    for label, bound, share, packed in (
        ("bounded", -5.0, 1, False),
        ("bounded, documents", -5.0, 1, True),
        ("bounded, grouped values", -5.0, 2, False),
        ("unbounded", None, 1, False),
    ):
        t, h, hv = s.tokens, s.heads, s.heads * share
        bounds = s.boundaries() if packed else None
        options = {"lower_bound": bound, "chunk": 64, "cu_seqlens": bounds, "output_final_state": True}
        inputs = [
            *(s.half(1, t, h, 128) for _ in range(2)),
            s.half(1, t, hv, 128),
            s.half(1, t, hv, 128),
            s.half(1, t, hv),
            s.full(hv, spread=0.3),
            s.full(hv * 128),
            s.full(bounds.numel() - 1 if packed else 1, hv, 128, 128, spread=0.1),
        ]

        def found(*x: Tensor, options: dict = options) -> Sequence[Tensor]:
            return kernels.delta_rule(*x[:7], initial_state=x[7], **options)

        def expected(*x: Tensor, options: dict = options) -> Sequence[Tensor]:
            return plain_delta_rule(*x[:7], initial_state=x[7], **options)

        cases.append(Case(f"delta_rule, {label}", inputs, names, found, expected, 0.01, 0.03))
    step = [
        *(s.half(4, s.heads, 128) for _ in range(4)),
        s.half(4, s.heads),
        s.full(s.heads, spread=0.3),
        s.full(s.heads * 128),
        s.full(4, s.heads, 128, 128, spread=0.1),
    ]
    cases.append(
        Case(
            "delta_step",
            step,
            names,
            lambda *x: kernels.delta_step(*x, lower_bound=-5.0),
            lambda *x: plain_delta_step(*x, lower_bound=-5.0),
            gradients=False,
        )
    )
    return cases


def convolution_cases(s: Shapes) -> list[Case]:
    """With and without documents, from zeros and continued from an initial tail."""
    cases = []
    for label, bounds in (("rows", None), ("documents", s.boundaries())):
        inputs = [
            s.half(1, s.tokens, s.width),
            s.half(s.width, 4),
            s.half(1 if bounds is None else bounds.numel() - 1, 3, s.width),
        ]
        cases.append(
            Case(
                f"short_convolution, {label}",
                inputs[:2],
                ("x", "weight"),
                lambda x, w, b=bounds: [kernels.short_convolution(x, w, b)[0]],
                lambda x, w, b=bounds: [plain_short_convolution(x, w, b)[0]],
            )
        )
        cases.append(
            Case(
                f"short_convolution, {label}, continued",
                inputs,
                ("x", "weight", "initial"),
                lambda x, w, i, b=bounds: kernels.short_convolution(x, w, b, i, True),
                lambda x, w, i, b=bounds: plain_short_convolution(x, w, b, i, True),
            )
        )
    return cases


def attention_cases(s: Shapes) -> list[Case]:
    """Latent attention's widths, grouped heads, documents, an image's blocks."""
    cases = []
    for label, width, value_width, share, causal, bounds in (
        ("192 and 128", 192, 128, 1, True, None),
        ("128, grouped", 128, 128, 2, True, None),
        ("192 and 128, documents", 192, 128, 1, True, s.boundaries()),
        ("128, grouped, documents", 128, 128, 2, True, s.boundaries()),
        ("64, documents, not causal", 64, 64, 1, False, s.boundaries()),
    ):
        kv_heads = s.heads // share
        inputs = [
            s.half(1, s.tokens, s.heads, width),
            s.half(1, s.tokens, kv_heads, width),
            s.half(1, s.tokens, kv_heads, value_width),
        ]
        options = {"scale": width**-0.5, "causal": causal, "cu_seqlens": bounds}

        def found(*x: Tensor, options: dict = options) -> Sequence[Tensor]:
            return [kernels.softmax_attention(*x, **options)]

        def expected(*x: Tensor, options: dict = options) -> Sequence[Tensor]:
            return [plain_softmax_attention(*x, **options)]

        cases.append(Case(f"softmax_attention, {label}", inputs, ("q", "k", "v"), found, expected))
    return cases


def _with_sources(mixed: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    return [mixed, *sources]


def pointwise_cases(s: Shapes) -> list[Case]:
    """Attention residual, norm and gated units."""
    sources = [s.half(1, s.tokens, s.width) for _ in range(9)]
    residual = [*sources, s.half(s.width, spread=0.05), s.half(s.width)]
    names = (*(f"source {i}" for i in range(9)), "query", "norm")
    x, weight = s.half(s.tokens, s.width, spread=3.0), s.half(s.width)
    gate, up = s.half(s.tokens, s.width, spread=5.0), s.half(s.tokens, s.width, spread=30.0)
    return [
        Case(
            "attention_residual, 9 sources",
            residual,
            names,
            lambda *x: _with_sources(*kernels.attention_residual(x[:9], x[9], x[10], 1e-5)),
            lambda *x: [plain_attention_residual(x[:9], x[9], x[10], 1e-5), *x[:9]],
        ),
        Case(
            "gated_rms_norm",
            [x, s.half(s.tokens, s.width), weight],
            ("x", "gate", "weight"),
            lambda x, g, w: [kernels.gated_rms_norm(x, g, w, 1e-5)],
            lambda x, g, w: [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w * g.sigmoid()],
        ),
        Case(
            "sigmoid_gate",
            [x, s.half(s.tokens, s.width)],
            ("x", "gate"),
            lambda x, g: [kernels.sigmoid_gate(x, g)],
            lambda x, g: [x * g.sigmoid()],
        ),
        Case(
            "rms_norm",
            [x, weight],
            ("x", "weight"),
            lambda x, w: [kernels.rms_norm(x, w, 1e-5)],
            lambda x, w: [F.rms_norm(x, w.shape, w, 1e-5)],
        ),
        Case(
            "situ_glu",
            [gate, up],
            ("gate", "up"),
            lambda g, u: [kernels.situ_glu(g, u)],
            lambda g, u: [4 * torch.tanh(g / 4) * g.sigmoid() * 25 * torch.tanh(u / 25)],
        ),
        Case(
            "swiglu",
            [gate, up],
            ("gate", "up"),
            lambda g, u: [kernels.swiglu(g, u)],
            lambda g, u: [F.silu(g) * u],
        ),
    ]


def expert_cases(s: Shapes) -> list[Case]:
    """A router's product, a grouped one with idle experts, and a whole mixture."""
    rows, width, inner = s.tokens, s.width, s.width // 2
    offsets = torch.linspace(0, rows, s.experts // 2, device=s.device).to(torch.int32)
    offsets = offsets.repeat_interleave(2)  # every other expert is idle

    def product(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        ends = offsets.tolist()
        parts = [x[a:b] @ weight[e].mT for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
        return [F.pad(torch.cat(parts), (0, 0, 0, rows - ends[-1]))]

    logits = s.full(s.tokens, s.experts).detach()
    routing = kernels.route(logits, s.active)
    order = kernels.order_by_expert(routing.indices, s.experts)

    def mixture(x: Tensor, weights: Tensor) -> Sequence[Tensor]:
        return [kernels.unpermute(kernels.permute(x, order), order, weights)]

    return [
        Case(
            "router_logits",
            [s.half(rows, width), s.full(s.experts, width, spread=width**-0.5)],
            ("x", "weight"),
            lambda x, w: [kernels.router_logits(x, w)],
            lambda x, w: [x @ w.mT],
            forward_bound=1e-4,
        ),
        Case(
            "grouped_mm",
            [s.half(rows, width), s.half(s.experts, inner, width, spread=width**-0.5)],
            ("x", "weight"),
            lambda x, w: [kernels.grouped_mm(x, w, offsets)],
            product,
        ),
        Case(
            "permute and unpermute",
            [s.half(s.tokens, width), routing.weights.detach().requires_grad_()],
            ("x", "weights"),
            mixture,
            lambda x, w: [x * w.sum(1, keepdim=True)],
        ),
    ]


def loss_cases(s: Shapes) -> list[Case]:
    """The chunked linear cross-entropy; its gradients are bf16 products of a bf16 softmax."""
    labels = torch.randint(0, s.vocabulary, (s.tokens,), device=s.device)
    labels[::5] = -100
    return [
        Case(
            "linear_cross_entropy",
            [s.half(s.tokens, s.width), s.half(s.vocabulary, s.width, spread=s.width**-0.5)],
            ("hidden", "weight"),
            lambda h, w: [kernels.linear_cross_entropy(h, w, labels)],
            lambda h, w: [F.cross_entropy(h @ w.mT, labels, ignore_index=-100, reduction="sum")],
            forward_bound=1e-3,
        )
    ]


def all_cases(device: torch.device, large: bool) -> list[Case]:
    """Every case at one size."""
    families = (
        delta_cases,
        convolution_cases,
        attention_cases,
        pointwise_cases,
        expert_cases,
        loss_cases,
    )
    return [case for family in families for case in family(Shapes(device, large))]


def check(case: Case) -> list[Check]:
    """Compare outputs, and the gradients of one random weighting of them."""
    exact = [x.detach().double().requires_grad_() for x in case.inputs]
    found, expected = case.found(*case.inputs), case.expected(*exact)
    checks = [
        Check(case.name, f"output {i}", relative_error(a, b), case.forward_bound)
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
    ]
    if case.gradients:
        weights = [torch.randn_like(b).to(a.dtype) for a, b in zip(found, expected, strict=True)]
        got = torch.autograd.grad(found, case.inputs, weights)
        wanted = torch.autograd.grad(expected, exact, [w.double() for w in weights])
        checks += [
            Check(case.name, f"grad {name}", relative_error(a, b), case.backward_bound)
            for name, a, b in zip(case.names, got, wanted, strict=True)
        ]
    return checks


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; inf when anything is not finite."""
    error = ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def measure(case: Case) -> Timing:
    """Median forward and backward time, warmed up."""
    cuda = case.inputs[0].is_cuda
    forward, backward, peak = [], [], 0
    for _ in range(REPETITIONS + 5):
        base = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = stamp(cuda)
        out = case.found(*case.inputs)
        middle = stamp(cuda)
        if case.gradients:
            torch.autograd.grad(out, case.inputs, [torch.ones_like(x) for x in out])
        end = stamp(cuda)
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - base
        forward.append(elapsed_ms(start, middle))
        backward.append(elapsed_ms(middle, end))
    return Timing(case.name, statistics.median(forward[5:]), statistics.median(backward[5:]), peak)


def stamp(cuda: bool) -> torch.cuda.Event | float:
    """A point in time on the device's stream."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Milliseconds between two stamps."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def main() -> int:
    """Check, time, print and write; 1 when a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip-timing", action="store_true", help="check only")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases whose name has it; repeatable")
    options = parser.parse_args()
    device = torch.device(options.device)
    for choice in kernels.table(device.type):
        print(f"{choice.operation:30s} {choice.implementation:36s} {choice.reason}")

    checks: list[Check] = []
    timings: list[Timing] = []

    def keep() -> None:
        options.out.write_text(json.dumps(result(device, checks, timings), indent=1) + "\n")

    for case in chosen(all_cases(device, large=False), options.only):
        rows = check(case)
        checks += rows
        keep()
        for row in rows:
            mark = "ok " if row.passed else "BAD"
            print(f"{mark} {row.case:40s} {row.tensor:14s} {row.error:9.2e} <= {row.bound:.0e}", flush=True)
    for case in [] if options.skip_timing else chosen(all_cases(device, large=True), options.only):
        timings.append(measure(case))
        keep()
        row = timings[-1]
        print(
            f"{row.case:40s} forward {row.forward_ms:8.3f} ms  backward {row.backward_ms:8.3f} ms"
            f"  peak {row.peak_bytes / 2**20:9.1f} MiB",
            flush=True,
        )
    return 0 if all(row.passed for row in checks) else 1


def chosen(cases: Iterable[Case], only: Sequence[str] | None) -> Iterator[Case]:
    """Those that are asked for; all when nothing is."""
    return (case for case in cases if not only or any(text in case.name for text in only))


def result(device: torch.device, checks: list[Check], timings: list[Timing]) -> dict[str, object]:
    """What is kept: command, versions, date, figures."""
    return {
        "command": "python bench/kernels_check.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": [asdict(choice) for choice in kernels.table(device.type)],
        "checks": [{**asdict(row), "passed": row.passed} for row in checks],
        "timings": [asdict(row) for row in timings],
    }


if __name__ == "__main__":
    sys.exit(main())
