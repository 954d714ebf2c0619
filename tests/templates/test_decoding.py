"""Generation: token by token from caches what the whole forward gives at once."""

from __future__ import annotations

import pytest
import torch

from shipway.compiler.lower import lower
from tests.templates.generated import VARIANTS, blueprint_model, build, load, tokens_of, variant

TEXT_VARIANTS = [name for name in VARIANTS if name != "vision"]
PROMPTS = (1, 9, 70)  # a single token, within a tile, over a page and a chunk


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_step_by_step_logits_are_those_of_the_whole_text(name: str) -> None:
    model = variant(name)
    built = build(model).double().eval()
    steps = 6
    texts = [tokens_of(model, 1, prompt + steps, seed=prompt)[0] for prompt in PROMPTS]
    whole = [built(text.unsqueeze(0))[0] for text in texts]
    logits, caches = built.prefill([text[:prompt] for text, prompt in zip(texts, PROMPTS, strict=True)])
    for step in range(steps):
        expected = torch.stack([w[prompt - 1 + step] for w, prompt in zip(whole, PROMPTS, strict=True)])
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        following = torch.stack([text[prompt + step] for text, prompt in zip(texts, PROMPTS, strict=True)])
        logits = built.step(following, caches)


def test_pages_are_shared_out_as_sequences_grow() -> None:
    module = load(variant("hybrid"))
    pages = module.Pages(2, torch.device("cpu"))
    pool = module.Pool(pages)
    kept = [[], []]
    generator = torch.Generator().manual_seed(0)
    for added in ([3, 100], *[[1, 1]] * 130):
        pages.extend(added)
        values = torch.randn(1, sum(added), 5, generator=generator)
        pool.append(values)
        for sequence, part in zip(kept, values[0].split(added), strict=True):
            sequence.append(part)
    for b, sequence in enumerate(kept):
        expected = torch.cat(sequence)
        assert pages.used[b] == len(expected)
        assert torch.equal(pool.read()[b, : len(expected)], expected)
    assert len(set(pages.slots.tolist())) == 2
    # no more than the last page of a sequence is only partly used
    assert pages.count == sum(-(-len(torch.cat(sequence)) // module.PAGE_TOKENS) for sequence in kept)


@pytest.mark.parametrize("name", [*TEXT_VARIANTS, "tiny"])
def test_memory_per_sequence_and_token_is_the_catalogues(name: str) -> None:
    model = blueprint_model(name) if name == "tiny" else variant(name)
    built = build(model).eval()
    _, caches = built.prefill([tokens_of(model, 1, 5)[0]])
    stated = [part.operator.decode_state() for layer in lower(model).layers for part in layer.operators]
    constant = growing = 0
    for cache in caches.layers.values():
        if hasattr(cache, "state"):
            tails = (cache.q_tail, cache.k_tail, cache.v_tail)
            constant += cache.state.numel() * 4 + sum(tail.numel() * 2 for tail in tails)
            assert cache.state.dtype == torch.float32
        else:
            growing += cache.values.shape[1] * 2  # the catalogue counts two bytes an element
    assert growing == sum(state.bytes_per_token for state in stated)
    assert constant == sum(state.constant_bytes for state in stated)


def test_delta_state_does_not_grow_with_the_text() -> None:
    model = variant("all delta")
    built = build(model).eval()
    sizes = []
    for length in (5, 80):
        _, caches = built.prefill([tokens_of(model, 1, length)[0]])
        built.step(torch.tensor([1]), caches)
        sizes.append([tuple(cache.state.shape) for cache in caches.layers.values()])
    assert sizes[0] == sizes[1]


def test_greedy_generation_follows_the_likeliest_token() -> None:
    model = variant("hybrid")
    built = build(model).eval()
    prompts = [tokens_of(model, 1, length)[0] for length in (4, 7)]
    generated = torch.stack(list(built.generate(prompts, 8, temperature=0)), 1)
    for prompt, continuation in zip(prompts, generated, strict=True):
        text = torch.cat([prompt, continuation])
        likeliest = built(text.unsqueeze(0))[0, len(prompt) - 1 : -1].argmax(-1)
        assert torch.equal(likeliest, continuation)


def test_sampling_keeps_to_the_nucleus_and_to_its_generator() -> None:
    module = load(variant("hybrid"))
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    drawn = module.sample(logits, 1.0, 0.75, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.03, rtol=0)
    assert torch.equal(drawn, module.sample(logits, 1.0, 0.75, torch.Generator().manual_seed(0)))
    cold = module.sample(logits, 0.1, 1.0, torch.Generator().manual_seed(0))
    assert (cold == 0).float().mean() > 0.98
