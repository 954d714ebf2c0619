"""The whole model, one document, one token and one head at a time, from the equations and the blueprint.

Runs on a state_dict (in float64) and nothing of the generated code; autograd gives its gradients. The tests
hold generated models in float64 against it, `blocks_check` those in bf16.
Equations: Kimi Linear (2510.26692), AttnRes (2603.15031), Kimi K3 (2607.24653), DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shipway.schemas.model import DeltaAttention, Experts, GroupedAttention, LatentAttention, Model, Position

Weights = Mapping[str, Tensor]


def below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Weights of a submodule, by their names within it."""
    return {name[len(prefix) + 1 :]: w for name, w in weights.items() if name.startswith(prefix + ".")}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rates(width: int, position: Position) -> list[float]:
    """Angle per token of each pair of channels (RoFormer, 2104.09864), stretched by YaRN (2309.00071)."""
    slowed = []
    for i in range(width // 2):
        rate = position.theta ** (-2 * i / width)
        yarn = position.yarn
        if yarn is not None:  # Eq. 17 and 18, by channel
            low, high = (
                width
                * math.log(yarn.original_context / (turns * 2 * math.pi))
                / (2 * math.log(position.theta))
                for turns in (yarn.beta_fast, yarn.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
            ramp = min(max((i - low) / max(high - low, 0.001), 0), 1)
            rate = rate * (1 - ramp) + rate / yarn.factor * ramp
        slowed.append(rate)
    return slowed


def rotate(x: Tensor, t: int, position: Position) -> Tensor:
    """Rotate x [width] as token t: channels i and i + width / 2 are a pair."""
    if position.kind == "none":
        return x
    angles = [rate * t for rate in rates(len(x), position)]
    c, s = x.new_tensor([math.cos(a) for a in angles]), x.new_tensor([math.sin(a) for a in angles])
    first, second = x.split(len(x) // 2)
    return torch.cat([first * c - second * s, second * c + first * s])


def softmax_scale(width: int, position: Position) -> float:
    scale = width**-0.5
    if position.kind == "rotary" and position.yarn is not None:
        scale *= (0.1 * position.yarn.attention_scale * math.log(position.yarn.factor) + 1) ** 2
    return scale


def gate(o: Tensor, x: Tensor, w: Weights, kind: str) -> Tensor:
    """o [H, V] of one token, gated from the layer's input x [D]."""
    if kind == "none":
        return o
    logits = w["gate_proj.weight"] @ x
    return o * torch.sigmoid(logits.view(o.shape) if kind == "elementwise" else logits[:, None])


def delta_attention(x: Tensor, w: Weights, dims: DeltaAttention, eps: float) -> Tensor:
    heads, values = dims.heads, dims.value_heads or dims.heads
    inputs = {part: x @ w[f"{part}_proj.weight"].T for part in "qkv"}
    state = [x.new_zeros(dims.key_width, dims.value_width) for _ in range(values)]
    rows = []
    for t in range(len(x)):
        mixed = {}
        for part, width in (("q", dims.key_width), ("k", dims.key_width), ("v", dims.value_width)):
            taps = w[f"{part}_conv.weight"]
            total = sum(taps[:, -1 - s] * inputs[part][t - s] for s in range(taps.shape[1]) if s <= t)
            mixed[part] = (total * torch.sigmoid(total)).view(-1, width)
        decay = w["decay_up.weight"] @ (w["decay_down.weight"] @ x[t]) + w["dt_bias"]
        beta = torch.sigmoid(w["beta_proj.weight"] @ x[t])
        if dims.output_gate == "full":
            logits = w["gate_proj.weight"] @ x[t] + w.get("gate_proj.bias", 0)
        else:
            logits = w["gate_up.weight"] @ (w["gate_down.weight"] @ x[t]) + w.get("gate_up.bias", 0)
        outputs = []
        for h in range(values):
            z = decay.view(values, -1)[h]
            rate = torch.exp(w["a_log"][h])
            if dims.decay.kind == "bounded":
                g = dims.decay.minimum * torch.sigmoid(rate * z)
            else:
                g = -rate * torch.log(1 + torch.exp(z))
            source = h // (values // heads)
            q = mixed["q"][source] / torch.sqrt((mixed["q"][source] ** 2).sum() + 1e-6)
            k = mixed["k"][source] / torch.sqrt((mixed["k"][source] ** 2).sum() + 1e-6)
            decayed = torch.exp(g)[:, None] * state[h]
            state[h] = decayed + beta[h] * torch.outer(k, mixed["v"][h] - decayed.T @ k)
            outputs.append(norm(state[h].T @ q * dims.key_width**-0.5, w["output_norm.weight"], eps))
        rows.append(w["output_proj.weight"] @ (torch.cat(outputs) * torch.sigmoid(logits)))
    return torch.stack(rows)


def latent_attention(x: Tensor, w: Weights, dims: LatentAttention, eps: float) -> Tensor:
    eps = dims.norm_eps or eps
    own, shared = dims.nope_width, dims.rope_width
    keys: list[list[Tensor]] = [[] for _ in range(dims.heads)]
    values: list[list[Tensor]] = [[] for _ in range(dims.heads)]
    rows = []
    for t in range(len(x)):
        if dims.query_rank is None:
            q = w["q_proj.weight"] @ x[t]
        else:
            q = w["q_up.weight"] @ norm(w["q_down.weight"] @ x[t], w["q_norm.weight"], eps)
        q = q.view(dims.heads, own + shared)
        q = torch.stack([torch.cat([row[:own], rotate(row[own:], t, dims.position)]) for row in q])
        down = w["kv_down.weight"] @ x[t]
        latent = norm(down[: dims.kv_rank], w["kv_norm.weight"], eps)
        extra = rotate(down[dims.kv_rank :], t, dims.position)
        up = (w["kv_up.weight"] @ latent).view(dims.heads, own + dims.value_width)
        outputs = []
        for h in range(dims.heads):
            keys[h].append(torch.cat([up[h, :own], extra]))
            values[h].append(up[h, own:])
            scores = torch.stack(keys[h]) @ q[h] * softmax_scale(own + shared, dims.position)
            outputs.append(torch.softmax(scores, 0) @ torch.stack(values[h]))
        o = gate(torch.stack(outputs), x[t], w, dims.output_gate)
        rows.append(w["output_proj.weight"] @ o.flatten())
    return torch.stack(rows)


def grouped_attention(x: Tensor, w: Weights, dims: GroupedAttention, eps: float) -> Tensor:
    keys: list[list[Tensor]] = [[] for _ in range(dims.kv_heads)]
    values: list[list[Tensor]] = [[] for _ in range(dims.kv_heads)]
    rows = []
    for t in range(len(x)):
        q, k, v = (
            (w[f"{part}_proj.weight"] @ x[t] + w.get(f"{part}_proj.bias", 0)).view(-1, dims.head_width)
            for part in "qkv"
        )
        if dims.query_key_norm:
            q, k = norm(q, w["q_norm.weight"], eps), norm(k, w["k_norm.weight"], eps)
        q = torch.stack([rotate(row, t, dims.position) for row in q])
        for group in range(dims.kv_heads):
            keys[group].append(rotate(k[group], t, dims.position))
            values[group].append(v[group])
        outputs = []
        for h in range(dims.heads):
            group = h // (dims.heads // dims.kv_heads)
            scores = torch.stack(keys[group]) @ q[h] * softmax_scale(dims.head_width, dims.position)
            outputs.append(torch.softmax(scores, 0) @ torch.stack(values[group]))
        o = gate(torch.stack(outputs), x[t], w, dims.output_gate)
        rows.append(w["output_proj.weight"] @ o.flatten())
    return torch.stack(rows)


def gated_unit(x: Tensor, w: Weights, model: Model) -> Tensor:
    """One token through gate, up and down."""
    g, u = (w.get(f"{part}.weight", w.get(part)) @ x for part in ("gate", "up"))
    activation = model.feed_forward.activation
    if activation.kind == "swiglu":
        h = g * torch.sigmoid(g) * u
    else:
        linear = activation.linear_beta
        h = activation.beta * torch.tanh(g / activation.beta) * torch.sigmoid(g)
        h = h * (u if linear is None else linear * torch.tanh(u / linear))
    return w.get("down.weight", w.get("down")) @ h


def choose(scores: Tensor, bias: Tensor | float, dims: Experts) -> list[int]:
    """Experts of one token."""
    ranked = (scores.detach() + bias).tolist()
    size = dims.routed // dims.groups
    merits = []
    for group in range(dims.groups):
        best = sorted(ranked[group * size : (group + 1) * size], reverse=True)
        merits.append(sum(best[:2]) if dims.scores == "sigmoid" else best[0])
    kept = sorted(range(dims.groups), key=lambda group: -merits[group])[: dims.active_groups]
    allowed = [e for e in range(dims.routed) if e // size in kept]
    return sorted(allowed, key=lambda e: -ranked[e])[: dims.active]


def mixture(
    x: Tensor, w: Weights, model: Model, dims: Experts, eps: float
) -> tuple[Tensor, Tensor, list[int]]:
    """One token: output, scores, chosen experts."""
    z = x if dims.latent_width is None else w["latent_down.weight"] @ x
    logits = w["router.weight"] @ (z if dims.router_input == "latent" else x)
    scores = torch.sigmoid(logits) if dims.scores == "sigmoid" else torch.softmax(logits, 0)
    chosen = choose(scores, w.get("router.balance_bias", 0.0), dims)
    total = sum(scores[e] for e in chosen) if dims.renormalize else 1.0
    experts = {e: {part: w[f"experts.{part}"][e] for part in ("gate", "up", "down")} for e in chosen}
    u = sum(dims.scale * scores[e] / total * gated_unit(z, experts[e], model) for e in chosen)
    if dims.latent_width is not None:
        u = w["latent_up.weight"] @ (norm(u, w["latent_norm.weight"], eps) if dims.latent_norm else u)
    if dims.shared:
        shared = gated_unit(x, below(w, "shared"), model)
        u = u + (torch.sigmoid(w["shared_gate.weight"] @ x) if dims.shared_gate else 1.0) * shared
    return u, scores, chosen


def imbalance(routed: list[tuple[Tensor, list[int]]], dims: Experts) -> Tensor:
    """Load-balancing loss of one row from each token's scores and choice: 1 when all is even.

    Switch Transformer, 2101.03961, Eq. 4 to 6.
    """
    load = torch.zeros(dims.routed, dtype=torch.float64)
    for _, chosen in routed:
        load[chosen] += 1 / (len(routed) * dims.active)
    mean = sum(scores / scores.sum() for scores, _ in routed) / len(routed)
    return dims.routed * (load * mean).sum()


def attention_residual(sources: list[Tensor], w: Weights, eps: float) -> Tensor:
    """One softmax over depth per token."""
    rows = []
    for t in range(len(sources[0])):
        logits = torch.stack([w["query"] @ norm(s[t], w["norm.weight"], eps) for s in sources])
        rows.append(sum(p * s[t] for p, s in zip(torch.softmax(logits, 0), sources, strict=True)))
    return torch.stack(rows)


class Reference:
    """Forward of one document through a whole model; `auxiliary` holds each layer's scores and choices."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model, self.weights, self.eps = model, weights, model.norm_eps
        self.routed: dict[str, list[tuple[Tensor, list[int]]]] = {}

    def attention(self, kind: str, x: Tensor, w: Weights) -> Tensor:
        mix = self.model.attention
        run = {"delta": delta_attention, "latent": latent_attention, "grouped": grouped_attention}[kind]
        return run(x, w, getattr(mix, kind), self.eps)

    def feed_forward(self, kind: str, x: Tensor, w: Weights, name: str) -> Tensor:
        if kind == "dense":
            return torch.stack([gated_unit(row, w, self.model) for row in x])
        outputs = [mixture(row, w, self.model, self.model.feed_forward.experts, self.eps) for row in x]
        self.routed.setdefault(name, []).extend((scores, chosen) for _, scores, chosen in outputs)
        return torch.stack([y for y, _, _ in outputs])

    def plain_layer(self, name: str, kinds: tuple[str, str], x: Tensor) -> Tensor:
        w = below(self.weights, name)
        x = x + self.attention(kinds[0], norm(x, w["attention_norm.weight"], self.eps), below(w, "attention"))
        y = norm(x, w["feed_forward_norm.weight"], self.eps)
        return x + self.feed_forward(kinds[1], y, below(w, "feed_forward"), name)

    def layers(self, embedded: Tensor) -> Tensor:
        """Embeddings [T, D] -> what the final norm reads [T, D]."""
        kinds = list(zip(self.model.attention_kinds(), self.model.feed_forward_kinds(), strict=True))
        residual = self.model.residual
        if residual.kind == "plain":
            x = embedded
            for i, pair in enumerate(kinds):
                x = self.plain_layer(f"layers.{i}", pair, x)
            return x
        finished, running = [], embedded  # full: every output is a source and nothing runs
        for i, (attention, feed_forward) in enumerate(kinds):
            w = below(self.weights, f"layers.{i}")
            for part, kind in (("attention", attention), ("feed_forward", feed_forward)):
                x = attention_residual([*finished, running], below(w, f"{part}_residual"), self.eps)
                y = norm(x, w[f"{part}_norm.weight"], self.eps)
                if part == "attention":
                    y = self.attention(kind, y, below(w, part))
                else:
                    y = self.feed_forward(kind, y, below(w, part), f"layers.{i}")
                opens = residual.kind == "full" or (part == "attention" and i % residual.block_layers == 0)
                if opens:
                    finished, running = [*finished, running], y
                else:
                    running = running + y
        return attention_residual([*finished, running], below(self.weights, "output_residual"), self.eps)

    def logits_of(self, x: Tensor) -> Tensor:
        return x @ self.weights.get("head.weight", self.weights["embed.weight"]).T

    def logits(self, tokens: Tensor) -> Tensor:
        """One document's tokens [T] -> logits [T, vocabulary]."""
        x = self.layers(self.weights["embed.weight"][tokens])
        return self.logits_of(norm(x, self.weights["norm.weight"], self.eps))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Summed loss of one document, further predictions included, load-balancing loss not."""
        x = self.layers(self.weights["embed.weight"][tokens])
        final = norm(x, self.weights["norm.weight"], self.eps)
        total = F.cross_entropy(self.logits_of(final), labels, ignore_index=-100, reduction="sum")
        prediction = self.model.multi_token_prediction
        for depth in range(prediction.depth if prediction else 0):
            w = below(self.weights, f"prediction.{depth}")
            # position t reads token t + 1 + depth and predicts the one after, where all up to it are known
            read, targets = [], []
            for t in range(len(x)):
                ahead = labels[t : t + depth + 2].tolist()
                read.append(ahead[depth] if len(ahead) > depth and min(ahead[: depth + 1]) >= 0 else 0)
                targets.append(ahead[-1] if len(ahead) == depth + 2 and min(ahead) >= 0 else -100)
            embedded = self.weights["embed.weight"][torch.tensor(read)]
            joined = [
                norm(x, w["hidden_norm.weight"], self.eps),
                norm(embedded, w["embedding_norm.weight"], self.eps),
            ]
            x = torch.cat(joined, 1) @ w["projection.weight"].T
            kinds = self.model.attention_kinds()[-1], self.model.feed_forward_kinds()[-1]
            x = self.plain_layer(f"prediction.{depth}.layer", kinds, x)
            logits = self.logits_of(norm(x, w["norm.weight"], self.eps))
            loss = F.cross_entropy(logits, torch.tensor(targets), ignore_index=-100, reduction="sum")
            total = total + prediction.loss_weight / prediction.depth * loss
        return total
