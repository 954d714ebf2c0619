"""`python -m shipway.runtime.generation BUILD CHECKPOINT`: what `shipway generate` runs.

Text is streamed to stdout; with --json one object is printed at the end. Which checkpoint it is from goes to
stderr. Exit code 4 when the build, the checkpoint or the device cannot be used, 2 when it sees no pictures.
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

from shipway.runtime.imports import uncollected_imports

with uncollected_imports():
    import torch

    from shipway.runtime.build_folder import import_model, read_plan
    from shipway.runtime.complaint import WrongUsage, complain
    from shipway.runtime.data.errors import DataError
    from shipway.runtime.data.sources.streams import image_format
    from shipway.runtime.data.tokenizers import make_tokenizer
    from shipway.runtime.exit_codes import Fatal
    from shipway.runtime.generation.pictures import read_pictures
    from shipway.runtime.generation.text import Completion, Sampling, complete
    from shipway.runtime.generation.weights import choose_checkpoint, load_model, origin_of

INVALID = 2
ENVIRONMENT = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _generate(options)
    except WrongUsage as error:
        complain(str(error), code="CL001", as_json=options.json)
        return INVALID
    except (Fatal, DataError) as error:
        complain(str(error), code="EN001", as_json=options.json)
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
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--image", action="append", type=Path, default=[], help="a picture for each prompt")
    parser.add_argument("--tokens", type=int, default=Sampling.tokens)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-p", type=_share, default=Sampling.top_p)
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--weights", choices=["average", "last"])
    parser.add_argument("--json", action="store_true")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _device(asked: str | None) -> torch.device:
    """The device to generate on; raises Fatal when it is not here."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise Fatal("--device cuda: PyTorch finds no CUDA device here; leave it out, or give --device cpu")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def _generate(options: argparse.Namespace) -> None:
    plan = read_plan(options.build)
    training = plan.blueprint.training
    if options.image and plan.blueprint.model.vision is None:
        raise WrongUsage("--image: the model has no `vision` to see pictures with")
    device = _device(options.device)
    checkpoint = choose_checkpoint(options.checkpoint, passed_over=_say_passed_over)
    print(f"from {origin_of(checkpoint)}", file=sys.stderr, flush=True)
    # bf16 products on a CPU are slow and win nothing
    dtype = DTYPES[training.precision.activations] if device.type == "cuda" else torch.float32
    model = load_model(import_model(options.build), checkpoint, device, dtype, options.weights)
    tokenizer = make_tokenizer(training.data.tokenizer, options.build)
    pictures = None
    if options.image:
        pictures = read_pictures(options.image, image_format("--image", plan.blueprint.model, tokenizer))
    completions = [Completion(prompt) for prompt in options.prompt or [""] * len(options.image)]
    sampling = Sampling(options.tokens, options.temperature, options.top_p, options.seed)

    streamed = not options.json and len(completions) == 1
    if streamed:
        print(completions[0].prompt, end="", flush=True)
    start = time.perf_counter()
    for piece in complete(model, tokenizer, completions, sampling, pictures):
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


def _say_passed_over(checkpoint: Path, reason: str) -> None:
    print(f"falling back from {origin_of(checkpoint)}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
