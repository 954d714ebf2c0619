"""Short tasks that need no data: a seesaw guard for what long-context stages might unlearn.

Each shows a few solved examples and asks for one more. All are made from a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shipway.runtime.data.tokenizers import Tokenizer
from shipway.runtime.evaluation.items import Item

_SHOTS = 4
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = {"(": ")", "[": "]", "{": "}"}

Maker = Callable[[np.random.Generator], tuple[str, str]]
"""Makes a problem and its solution."""


def copy(generator: np.random.Generator) -> tuple[str, str]:
    """The same word again."""
    word = _word(generator)
    return f"copy {word}:", f" {word}"


def reverse(generator: np.random.Generator) -> tuple[str, str]:
    """The word from its end."""
    word = _word(generator, 3, 6)
    return f"reverse {word}:", f" {word[::-1]}"


def close_brackets(generator: np.random.Generator) -> tuple[str, str]:
    """What closes the open brackets, innermost first."""
    opened = [list(_PAIRS)[i] for i in generator.integers(len(_PAIRS), size=int(generator.integers(2, 6)))]
    closing = "".join(_PAIRS[bracket] for bracket in reversed(opened))
    return f"close {''.join(opened)}:", f" {closing}"


def recall(generator: np.random.Generator) -> tuple[str, str]:
    """The value that belongs to one of several keys."""
    keys = generator.permutation(list(_LETTERS))[:4].tolist()
    values = generator.integers(10, 100, size=4).tolist()
    asked = int(generator.integers(4))
    pairs = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return f"given {pairs} {keys[asked]}:", f" {values[asked]}"


def add(generator: np.random.Generator) -> tuple[str, str]:
    """A sum of two numbers below 50."""
    a, b = generator.integers(50, size=2).tolist()
    return f"add {a} {b}:", f" {a + b}"


TASKS: dict[str, Maker] = {
    "copy": copy,
    "reverse": reverse,
    "brackets": close_brackets,
    "recall": recall,
    "add": add,
}


def task_items(tokenizer: Tokenizer, per_task: int = 32, seed: int = 0) -> list[Item]:
    """`per_task` items of every task, grouped by its name."""
    items = []
    for name, make in TASKS.items():
        generator = np.random.default_rng([seed, *name.encode()])
        for _ in range(per_task):
            solved = "".join("".join(make(generator)) + "\n" for _ in range(_SHOTS))
            problem, solution = make(generator)
            prompt, answer = tokenizer.encode([solved + problem, solution + "\n"])
            items.append(Item(name, prompt, answer))
    return items


def _word(generator: np.random.Generator, shortest: int = 4, longest: int = 9) -> str:
    size = int(generator.integers(shortest, longest + 1))
    return "".join(_LETTERS[i] for i in generator.integers(26, size=size))
