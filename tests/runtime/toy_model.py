"""A model of the generated shape, as small as can be: delta attention, then grouped; dense, then experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shipway.runtime.kernels import (
    DeltaCore,
    SoftmaxCore,
    add_margins,
    expert_load,
    grouped_mm,
    linear_cross_entropy,
    order_by_expert,
    permute,
    rms_norm,
    route,
    swiglu,
    unpermute,
    update_quantile_bias,
)

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, EXPERTS, ACTIVE, INNER = 272, 32, 2, 16, 4, 2, 24

OPTIMIZER_GROUPS: dict[str, tuple[str, int | bool]] = {
    r"^(embed|head)\.weight$": ("adamw", True),
    r"\b(q|k|v)_proj\.weight$": ("muon", HEADS),
    r"\brouter\.weight$": ("adamw", True),
    r"norm\.weight$": ("adamw", False),
    r"\b(a_log|dt_bias)$": ("adamw", False),
    r"\bexperts\.(gate|up|down)$": ("muon", 1),
    r"\bweight$": ("muon", 1),
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, delta: bool) -> None:
        super().__init__()
        inner = HEADS * HEAD_WIDTH
        self.q_proj = nn.Linear(WIDTH, inner, bias=False)
        self.k_proj = nn.Linear(WIDTH, inner, bias=False)
        self.v_proj = nn.Linear(WIDTH, inner, bias=False)
        self.output_proj = nn.Linear(inner, WIDTH, bias=False)
        self.delta = delta
        if delta:
            self.beta_proj = nn.Linear(WIDTH, HEADS, bias=False)
            self.decay_proj = nn.Linear(WIDTH, inner, bias=False)
            self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
            self.a_log = nn.Parameter(torch.empty(HEADS, dtype=torch.float32))
            self.core: nn.Module = DeltaCore(lower_bound=-5.0, chunk=32)
        else:
            self.core = SoftmaxCore(scale=HEAD_WIDTH**-0.5)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, HEAD_WIDTH)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if not self.delta:
            return self.output_proj(self.core(q, k, v, cu_seqlens).flatten(2))
        decay = self.decay_proj(x).unflatten(-1, (HEADS, HEAD_WIDTH))
        o, _ = self.core(q, k, v, decay, self.beta_proj(x), self.a_log, self.dt_bias, cu_seqlens)
        return self.output_proj(o.flatten(2))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, dtype=torch.float32))
        self.register_buffer("balance_bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.int64), persistent=False)
        margins = torch.zeros(EXPERTS, 50, dtype=torch.int64)
        self.register_buffer("margin_histogram", margins, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(x.float() @ self.weight.T, ACTIVE, self.balance_bias)
        if self.training and torch._C._current_graph_task_id() == -1:
            self.load += expert_load(routing.indices, EXPERTS)
            add_margins(self.margin_histogram, routing.scores.detach(), routing.cutoff, self.balance_bias)
        return routing.weights, routing.indices

    @torch.no_grad()
    def update_balance(self, all_reduce) -> None:
        update_quantile_bias(self.balance_bias, self.margin_histogram, ACTIVE, all_reduce)
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        hidden = swiglu(grouped_mm(rows, self.gate, offsets), grouped_mm(rows, self.up, offsets))
        return grouped_mm(hidden, self.down, offsets)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(0, 1)
        weights, chosen = self.router(z)
        order = order_by_expert(chosen, EXPERTS)
        rows = self.experts(permute(z, order), order.offsets)
        return unpermute(rows, order, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = Norm(), Norm()
        self.attention = Attention(delta=index % 2 == 0)
        self.feed_forward: nn.Module = Dense() if index == 0 else MixtureOfExperts()

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cu_seqlens)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(x)
        return linear_cross_entropy(x.flatten(0, 1), self.weight, labels.flatten())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer(i) for i in range(2)})
        self.norm = Norm()
        self.head = Head(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, cu_seqlens)
        return self.head(self.norm(x), labels)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(("a_log", "dt_bias")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.1, generator=generator)
        for layer in self.layers.values():
            for buffer in layer.buffers():
                buffer.zero_()
