"""`python -m shipway.runtime.generation BUILD CHECKPOINT`: what `shipway generate` runs.

Text is streamed to stdout; with --json one object is printed at the end. Exit code 4 when the build or the
checkpoint cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from shipway.runtime.build_folder import import_model, read_plan
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.tokenizers import make_tokenizer
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.generation.text import Completion, Sampling, complete
from shipway.runtime.generation.weights import choose_checkpoint, load_model

ENVIRONMENT = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _generate(options)
    except (Fatal, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ENVIRONMENT
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    except BrokenPipeError:  # the reader has gone; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shipway generate")
    parser.add_argument("build", type=Path)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them: the newest")
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=Sampling.tokens)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-p", type=float, default=Sampling.top_p)
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true")
    return parser


def _generate(options: argparse.Namespace) -> None:
    plan = read_plan(options.build)
    training = plan.blueprint.training
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    checkpoint = choose_checkpoint(options.checkpoint)
    # bf16 products on a CPU are slow and win nothing
    dtype = DTYPES[training.precision.compute] if device.type == "cuda" else torch.float32
    model = load_model(import_model(options.build), checkpoint, device, dtype)
    tokenizer = make_tokenizer(training.data.tokenizer, options.build)
    completions = [Completion(prompt) for prompt in options.prompt]
    sampling = Sampling(options.tokens, options.temperature, options.top_p, options.seed)

    streamed = not options.json and len(completions) == 1
    if streamed:
        print(completions[0].prompt, end="", flush=True)
    start = time.perf_counter()
    for piece in complete(model, tokenizer, completions, sampling):
        if streamed:
            print(piece.text, end="", flush=True)
    seconds = time.perf_counter() - start
    if options.json:
        result = {
            "checkpoint": str(checkpoint),
            "completions": [asdict(completion) for completion in completions],
            "tokens_per_second": sum(len(completion.tokens) for completion in completions) / seconds,
        }
        print(json.dumps(result, ensure_ascii=False))
    elif streamed:
        print()
    else:
        for number, completion in enumerate(completions, 1):
            print(f"--- {number}\n{completion.prompt}{completion.text}")


if __name__ == "__main__":
    sys.exit(main())
