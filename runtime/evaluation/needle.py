"""Needle in a haystack: is a fact that was said once found again at the stage's full length?

One sentence ("The secret number of Lisbon is 48213.") stands at a given depth in a row of other
text, and the row ends with its beginning; the number must follow. Completion, not a question, so
that a model without instruction tuning can answer. After Kamradt (2023) and RULER (arXiv 2404.06654).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shipway.runtime.data.tokenizers import Tokenizer, Tokens
from shipway.runtime.evaluation.items import Item

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLACES = ("Lisbon", "Nairobi", "Quito", "Hanoi", "Oslo", "Tunis", "Perth", "Lima", "Riga", "Accra")
_SUBJECTS = ("The river", "A merchant", "The old library", "Every winter", "The harbour", "A quiet street")
_VERBS = ("carries", "remembers", "hides", "follows", "measures", "forgets")
_OBJECTS = (
    "the morning light",
    "a long story",
    "its own name",
    "the sound of bells",
    "nothing new",
    "the sea",
)


def needle_items(
    tokenizer: Tokenizer,
    context: int,
    per_depth: int = 4,
    depths: Sequence[float] = DEPTHS,
    haystack: Tokens | None = None,
    seed: int = 0,
) -> list[Item]:
    """Items of exactly `context` tokens, `per_depth` for each depth (0: at the start, 1: at the end).

    `haystack` is text to hide the needle in, repeated as needed; by default sentences are made.
    Groups are `depth/0.25` and so on. No items when the context is too short for a needle.
    """
    generator = np.random.default_rng([seed, context])
    hay = _made_haystack(tokenizer, context, generator) if haystack is None else haystack
    items = [_item(tokenizer, context, depth, hay, generator) for depth in depths for _ in range(per_depth)]
    return [item for item in items if item is not None]


def needle_groups(depths: Sequence[float] = DEPTHS) -> tuple[str, ...]:
    """Names under which `needle_items` counts."""
    return tuple(f"depth/{depth:g}" for depth in depths)


def _item(
    tokenizer: Tokenizer, context: int, depth: float, haystack: Tokens, generator: np.random.Generator
) -> Item | None:
    place = _PLACES[generator.integers(len(_PLACES))]
    number = f" {generator.integers(10_000, 100_000)}"
    cue = f"\nThe secret number of {place} is"
    needle, question, answer = tokenizer.encode([f"{cue}{number}.\n", cue, number])
    room = context - len(needle) - len(question) - len(answer)
    if room < 0:
        return None
    start = int(generator.integers(len(haystack)))
    hay = np.take(haystack, np.arange(start, start + room), mode="wrap")
    cut = round(depth * room)
    prompt = np.concatenate([hay[:cut], needle, hay[cut:], question])
    return Item(f"depth/{depth:g}", prompt, answer)


def _made_haystack(tokenizer: Tokenizer, tokens: int, generator: np.random.Generator) -> Tokens:
    parts: list[Tokens] = []
    while sum(len(part) for part in parts) < tokens:
        choices = generator.integers(6, size=(256, 3)).tolist()
        text = "".join(f"{_SUBJECTS[a]} {_VERBS[b]} {_OBJECTS[c]}. " for a, b, c in choices)
        parts += tokenizer.encode([text])
    return np.concatenate(parts)
