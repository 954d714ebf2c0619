"""The vision tower: images at their own size, packed, each seeing only itself."""

from __future__ import annotations

import pytest
import torch

from bench.reference_tower import vision_tower
from tests.templates.generated import build, load, next_labels, tokens_of, variant

IMAGE_TOKEN = 60  # the last of the vocabulary


def images_of(model, *sizes: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random patches of images of so many rows and columns of patches."""
    count = sum(rows * columns for rows, columns in sizes)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, 3 * model.vision.patch**2, generator=generator, dtype=torch.float64)
    return patches, torch.tensor(sizes)


def test_tower_and_its_gradients_are_the_references() -> None:
    model = variant("vision")
    tower = build(model).double().vision
    patches, grids = images_of(model, (4, 6), (2, 2), (6, 4))
    weights = {name: t.detach().clone().requires_grad_() for name, t in tower.state_dict().items()}
    parts = patches.split([24, 4, 24])
    expected = torch.cat(
        [vision_tower(part, weights, model, *size) for part, size in zip(parts, grids.tolist(), strict=True)]
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
