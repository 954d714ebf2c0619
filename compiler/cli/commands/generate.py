"""shipway generate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json
from shipway.compiler.cli.trained import Checkpoint, Runs, Source, Weights

NO_ARGUMENTS_IS_HELP = True


def command(
    source: Source,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="Text to continue; may be given more than once.", show_default=False
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture before the prompt, which may then be left out; one for each prompt.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that hold this share: 0 < top_p <= 1.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="If not given, cuda where there is one.", show_default=False),
    ] = None,
    weights: Weights = None,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model, from a checkpoint."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.trained import check_weights, find_checkpoint, run_runtime

    output = Output(as_json=json)
    if not 0 < top_p <= 1:
        help_text = "1 draws from all tokens; --temperature 0 takes the likeliest one."
        summary = f"--top-p {top_p:g}: must be above 0 and at most 1"
        output.refuse("CL001", summary, exit_codes.INVALID, help_text=help_text)
    prompts, images = prompt or [], image or []
    if not prompts and not images:
        output.refuse("CL001", "--prompt or --image: one of them is needed", exit_codes.INVALID)
    if not images and not all(prompts):
        output.refuse("CL001", "--prompt: must have at least one character", exit_codes.INVALID)
    if prompts and images and len(prompts) != len(images):
        summary = f"--image: {len(images)} for {len(prompts)} prompts; give one for each, or no prompt at all"
        output.refuse("CL001", summary, exit_codes.INVALID)
    if device not in (None, "cpu", "cuda"):
        output.refuse("CL001", f"--device {device}: must be cpu or cuda", exit_codes.INVALID)
    build, checkpoints = find_checkpoint(source, checkpoint, runs, output)
    arguments = [str(build), str(checkpoints), "--tokens", str(tokens), "--temperature", str(temperature)]
    arguments += ["--top-p", str(top_p), "--seed", str(seed), *(f"--prompt={text}" for text in prompts)]
    arguments += [f"--image={path}" for path in images]
    arguments += ["--device", device] if device is not None else []
    arguments += ["--weights", check_weights(weights, output)] if weights is not None else []
    run_runtime("generation", [*arguments, *(["--json"] if json else [])])
