"""The vision tower and its projector, one image, one patch and one head at a time (MoonViT, 2504.07491)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.reference import Weights, norm
from shipway.schemas.model import Model


def vision_tower(patches: Tensor, w: Weights, model: Model, rows: int, columns: int) -> Tensor:
    """Embeddings [image tokens, D] of one image's patches [rows * columns, 3 * patch * patch]."""
    v, eps = model.vision, model.norm_eps
    grid = w["position"].view(v.position_grid, v.position_grid, v.width)

    def learned(row: int, column: int) -> Tensor:
        """Bilinear between the centres of the grid's cells, clamped at the border."""
        near = []
        for place, length in ((row, rows), (column, columns)):
            centre = max((place + 0.5) * v.position_grid / length - 0.5, 0.0)
            low = min(int(centre), v.position_grid - 1)
            near.append((low, min(low + 1, v.position_grid - 1), centre - low))
        (top, bottom, down), (left, right, across) = near
        upper = grid[top, left] * (1 - across) + grid[top, right] * across
        lower = grid[bottom, left] * (1 - across) + grid[bottom, right] * across
        return upper * (1 - down) + lower * down

    def turn(x: Tensor, places: tuple[int, int]) -> Tensor:
        """Half of the channels by the row, half by the column; i and i + a half of them are a pair."""
        turned = []
        for half, place in zip(x.chunk(2), places, strict=True):
            first, second = half.chunk(2)
            angles = [place * 10000.0 ** (-i / len(first)) for i in range(len(first))]
            c, s = x.new_tensor([math.cos(a) for a in angles]), x.new_tensor([math.sin(a) for a in angles])
            turned += [first * c - second * s, second * c + first * s]
        return torch.cat(turned)

    places = [(row, column) for row in range(rows) for column in range(columns)]
    x = patches @ w["patch.weight"].T + torch.stack([learned(*place) for place in places])
    for layer in range(v.layers):
        own = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items()}
        y = norm(x, own["attention_norm.weight"], eps)
        q, k, values = ((y @ own[f"{p}_proj.weight"].T).unflatten(1, (v.heads, v.head_width)) for p in "qkv")
        heads = []
        for h in range(v.heads):
            queries = torch.stack([turn(q[i, h], place) for i, place in enumerate(places)])
            keys = torch.stack([turn(k[i, h], place) for i, place in enumerate(places)])
            heads.append(torch.softmax(queries @ keys.T / math.sqrt(v.head_width), 1) @ values[:, h])
        x = x + torch.cat(heads, 1) @ own["output_proj.weight"].T
        y = norm(x, own["feed_forward_norm.weight"], eps) @ own["up.weight"].T
        x = x + F.gelu(y, approximate="tanh") @ own["down.weight"].T
    x = norm(x, w["norm.weight"], eps).view(rows, columns, -1)
    merged = torch.stack(
        [
            torch.cat([x[row + i, column + j] for i in range(v.merge) for j in range(v.merge)])
            for row in range(0, rows, v.merge)
            for column in range(0, columns, v.merge)
        ]
    )
    hidden = F.gelu(merged @ w["projector.up.weight"].T)
    return hidden @ w["projector.down.weight"].T + w["projector.down.bias"]
