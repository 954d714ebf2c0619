"""The vision tower: images at their own size, packed, each seeing only itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.templates.generated import build, load, next_labels, tokens_of, variant
from tests.templates.reference import norm

IMAGE_TOKEN = 60  # the last of the vocabulary


def images_of(model, *sizes: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random patches of images of so many rows and columns of patches."""
    count = sum(rows * columns for rows, columns in sizes)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, 3 * model.vision.patch**2, generator=generator, dtype=torch.float64)
    return patches, torch.tensor(sizes)


def reference_tower(
    model, w: dict[str, torch.Tensor], patches: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """One image, patch by patch in row order, from the description in MoonViT (2504.07491)."""
    v, eps = model.vision, model.norm_eps
    grid = w["position"].view(v.position_grid, v.position_grid, v.width)

    def learned(row: int, column: int) -> torch.Tensor:
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

    def turn(x: torch.Tensor, places: tuple[int, int]) -> torch.Tensor:
        turned = []
        for half, place in zip(x.chunk(2), places, strict=True):
            pairs = len(half) // 2
            for i in range(pairs):
                angle = torch.tensor(place * 10000.0 ** (-i / pairs), dtype=torch.float64)
                c, s = torch.cos(angle), torch.sin(angle)
                turned.append((i, half[i] * c - half[i + pairs] * s, half[i + pairs] * c + half[i] * s))
        first, second = turned[: len(turned) // 2], turned[len(turned) // 2 :]
        return torch.stack([t[j] for part in (first, second) for j in (1, 2) for t in part])

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


def test_tower_and_its_gradients_are_the_references() -> None:
    model = variant("vision")
    tower = build(model).double().vision
    patches, grids = images_of(model, (4, 6), (2, 2), (6, 4))
    weights = {name: t.detach().clone().requires_grad_() for name, t in tower.state_dict().items()}
    parts = patches.split([24, 4, 24])
    expected = torch.cat(
        [
            reference_tower(model, weights, part, *size)
            for part, size in zip(parts, grids.tolist(), strict=True)
        ]
    )
    output = tower(patches, grids)
    torch.testing.assert_close(output, expected)

    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    output.backward(direction)
    expected.backward(direction)
    for path, parameter in tower.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[path].grad, msg=path)


def test_packed_images_are_as_if_separate() -> None:
    model = variant("vision")
    tower = build(model).double().vision
    patches, grids = images_of(model, (4, 2), (2, 6))
    first, second = patches.split((8, 12))
    separate = torch.cat([tower(first, grids[:1]), tower(second, grids[1:])])
    torch.testing.assert_close(tower(patches, grids), separate)


def text_with_images(model) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Two rows of text that hold an image of two tokens and one of three."""
    tokens = tokens_of(model, 2, 12).clamp(max=IMAGE_TOKEN - 1)
    tokens[0, 2:4] = IMAGE_TOKEN
    tokens[1, 5:8] = IMAGE_TOKEN
    return tokens, images_of(model, (2, 4), (2, 6))


def test_image_embeddings_stand_at_their_places_in_the_text() -> None:
    model = variant("vision")
    built = build(model).double().eval()
    tokens, images = text_with_images(model)
    logits = built(tokens, images=images)
    embedded = built.embed(tokens).detach()
    seen = built.vision(*images).detach()
    embedded[0, 2:4], embedded[1, 5:8] = seen[:2], seen[2:]
    # a stage after the first takes what it is given as the state
    torch.testing.assert_close(built(embedded.unsqueeze(0)), logits)


def test_gradient_reaches_the_tower_through_the_text() -> None:
    model = variant("vision")
    built = build(model)
    tokens, (patches, grids) = text_with_images(model)
    labels = next_labels(tokens).masked_fill(tokens == IMAGE_TOKEN, -100)
    built(tokens, labels, images=(patches, grids)).backward()
    for path, parameter in built.vision.named_parameters():
        assert parameter.grad.abs().sum() > 0, path


def test_generation_reads_images_in_prompts() -> None:
    model = variant("vision")
    built = build(model).double().eval()
    tokens, images = text_with_images(model)
    logits, _ = built.prefill([tokens[0, :9], tokens[1]], images)
    torch.testing.assert_close(logits[1], built(tokens, images=images)[1, -1])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_an_image_of_the_grids_own_size_takes_the_grid_as_it_is(interpolation: str) -> None:
    model = variant("vision", vision__interpolation=interpolation, vision__position_grid=6)
    tower = build(model).vision
    torch.testing.assert_close(tower.positions(6, 6), tower.position)
    assert interpolation in load(model).VisionTower.positions.__code__.co_consts
