"""From prompts to text, as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shipway.runtime.data.tokenizers import Tokenizer
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.generation.pictures import Pictures

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for bytes that are not yet a whole character."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    tokens: int = 200
    """Most tokens of one completion."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_p: float = 0.95
    """Only the likeliest tokens that together hold this share of the probability are drawn from."""
    seed: int = 0


@dataclass
class Completion:
    """What followed one prompt."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    """Whether the model ended the document itself."""


@dataclass(frozen=True)
class Piece:
    """New text of one completion."""

    index: int
    """Which prompt."""
    text: str


def complete(
    model: nn.Module,
    tokenizer: Tokenizer,
    completions: Sequence[Completion],
    sampling: Sampling,
    pictures: Pictures | None = None,
) -> Iterator[Piece]:
    """Continue every prompt until its document ends or the tokens are used up, yielding text as it comes.

    With `pictures`, each prompt follows its own.

    Raises Fatal for an empty prompt, or one with tokens that the model does not have.
    """
    device = next(model.parameters()).device
    encoded = tokenizer.encode([completion.prompt for completion in completions])
    before = [pictures.placeholders(i) if pictures else [] for i in range(len(completions))]
    prompts = [
        torch.tensor([*first, *tokens], dtype=torch.int64, device=device)
        for first, tokens in zip(before, encoded, strict=True)
    ]
    if not all(len(prompt) for prompt in prompts):
        raise Fatal("a prompt must have at least one token")
    generator = torch.Generator(device).manual_seed(sampling.seed)
    seen = {"images": pictures.tensors(device)} if pictures else {}
    steps = model.generate(  # type: ignore[operator]
        prompts, sampling.tokens, sampling.temperature, sampling.top_p, generator, **seen
    )
    for drawn in steps:
        for index, (completion, token) in enumerate(zip(completions, drawn.tolist(), strict=True)):
            if completion.ended:
                continue
            if token == tokenizer.end:
                completion.ended = True
            else:
                completion.tokens.append(token)
            text = tokenizer.decode(completion.tokens)
            if completion.ended or not text.endswith(INCOMPLETE):
                yield from _news(index, completion, text)
        if all(completion.ended for completion in completions):
            break
    for index, completion in enumerate(completions):
        yield from _news(index, completion, tokenizer.decode(completion.tokens))


def _news(index: int, completion: Completion, text: str) -> Iterator[Piece]:
    """What `text` has more than was yielded before."""
    if len(text) > len(completion.text):
        new = text[len(completion.text) :]
        completion.text = text
        yield Piece(index, new)
