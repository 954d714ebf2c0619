"""Token-by-token float64 forms of every kernel, written from the equations and nothing else."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor


def documents(cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[slice]:
    """Slices of the flattened batch, one a document."""
    bounds = range(0, batch * tokens + 1, tokens) if cu_seqlens is None else cu_seqlens.tolist()
    return [slice(start, end) for start, end in pairwise(bounds)]


def log_decay(z: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """z [HV, K] logit with its bias."""
    rate = torch.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * torch.log1p(torch.exp(-z.abs())) - rate * z.clamp(min=0)
    return lower_bound / (1 + torch.exp(-rate * z))


def delta_rule(q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens=None, initial=None):
    """S = (I - b k k^T) Diag(a) S + b k v^T; o = S^T q / sqrt(K), one token and one head at a time."""
    batch, tokens, heads, width = q.shape
    value_heads = v.shape[2]
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    outputs, finals = [], []
    for n, part in enumerate(documents(cu_seqlens, batch, tokens)):
        states = []
        for h in range(value_heads):
            state = v.new_zeros(width, v.shape[-1]) if initial is None else initial[n, h]
            states.append(state)
        for t in range(part.start, part.stop):
            rows = []
            alpha = torch.exp(log_decay(g[t] + dt_bias.view(value_heads, width), a_log, lower_bound))
            for h in range(value_heads):
                source = h // (value_heads // heads)
                query = q[t, source] / torch.sqrt((q[t, source] ** 2).sum() + 1e-6)
                key = k[t, source] / torch.sqrt((k[t, source] ** 2).sum() + 1e-6)
                rate = torch.sigmoid(beta[t, h])
                decayed = alpha[h][:, None] * states[h]
                states[h] = (
                    decayed - rate * torch.outer(key, key @ decayed) + rate * torch.outer(key, v[t, h])
                )
                rows.append(states[h].T @ query / math.sqrt(width))
            outputs.append(torch.stack(rows))
        finals.append(torch.stack(states))
    return torch.stack(outputs).unflatten(0, (batch, tokens)), torch.stack(finals)


def short_convolution(x, weight, cu_seqlens=None, initial=None):
    """y_t = silu(sum_s w_{W-1-s} x_{t-s})."""
    batch, tokens, channels = x.shape
    taps = weight.shape[1]
    flat = x.flatten(0, 1)
    outputs, finals = [], []
    for n, part in enumerate(documents(cu_seqlens, batch, tokens)):
        before = x.new_zeros(taps - 1, channels) if initial is None else initial[n]
        inputs = torch.cat((before, flat[part]))
        for t in range(part.stop - part.start):
            total = sum(weight[:, tap] * inputs[t + tap] for tap in range(taps))
            outputs.append(total * torch.sigmoid(total))
        finals.append(inputs[len(inputs) - (taps - 1) :])
    return torch.stack(outputs).view_as(x), torch.stack(finals)


def softmax_attention(q, k, v, scale, causal, cu_seqlens=None):
    """One query and one head at a time; with fewer queries than keys they are the last."""
    batch, queries, heads, _ = q.shape
    keys, shared = k.shape[1], heads // k.shape[2]
    out = []
    for b in range(batch):
        for t in range(queries):
            position = keys - queries + t
            first, last = 0, position + 1 if causal else keys
            if cu_seqlens is not None:
                part = next(p for p in documents(cu_seqlens, batch, keys) if p.start <= b * keys + t < p.stop)
                first = part.start - b * keys
                last = position + 1 if causal else part.stop - b * keys
            for h in range(heads):
                scores = scale * k[b, first:last, h // shared] @ q[b, t, h]
                out.append(torch.softmax(scores, 0) @ v[b, first:last, h // shared])
    return torch.stack(out).view(batch, queries, heads, v.shape[-1])


def attention_residual(sources, query, norm_weight, eps):
    """softmax over depth of query . RMSNorm(v) times v."""
    scores = [(rms_norm(x, norm_weight, eps) * query).sum(-1) for x in sources]
    weights = torch.softmax(torch.stack(scores), 0)
    return sum(weight[..., None] * x for weight, x in zip(weights, sources, strict=True))


def rms_norm(x, weight, eps):
    """x / rms(x) * weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def situ_glu(gate, up, beta, linear_beta):
    """Kimi K3, Eq. 12."""
    linear = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear


def swiglu(gate, up):
    """silu(gate) * up."""
    return gate * torch.sigmoid(gate) * up


def mixture(x, weights, indices, expert_weight):
    """sum over a token's experts of weight * (expert matrix @ token)."""
    rows = []
    for t in range(x.shape[0]):
        rows.append(
            sum(weights[t, i] * (expert_weight[indices[t, i]] @ x[t]) for i in range(indices.shape[1]))
        )
    return torch.stack(rows)


def rotary(x, positions, theta):
    """Each pair (i, i + R/2) as a complex number times exp(i position theta^(-2i/R))."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = positions.double() * theta ** (-2 * i / x.shape[-1])
        turned = (
            torch.complex(x[..., i], x[..., i + half]) * torch.polar(torch.ones_like(angle), angle)[..., None]
        )
        out[..., i], out[..., i + half] = turned.real, turned.imag
    return out


def latent_attention(q_nope, q_shared, cache, length, kv_up, scale):
    """Unabsorbed: keys and values of every head formed; the last query sees all of `length`."""
    new, heads, nope = q_nope.shape
    rank = kv_up.shape[1]
    up = kv_up.view(heads, -1, rank)
    latent, shared = cache[:length, :rank], cache[:length, rank:]
    out = []
    for t in range(new):
        seen = length - new + t + 1
        for h in range(heads):
            both = latent[:seen] @ up[h].T
            keys = torch.cat((both[:, :nope], shared[:seen]), dim=1)
            scores = scale * keys @ torch.cat((q_nope[t, h], q_shared[t, h]))
            out.append(torch.softmax(scores, 0) @ both[:, nope:])
    return torch.stack(out).view(new, heads, -1)
