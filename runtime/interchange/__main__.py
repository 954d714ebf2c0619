"""`python -m shipway.runtime.interchange export | import`: what `shipway export` and `shipway import` run.

Exit code 4 when a build, a checkpoint or published files cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.imports import uncollected_imports

with uncollected_imports():
    import torch

    from shipway.runtime.build_folder import import_model, read_plan
    from shipway.runtime.complaint import complain
    from shipway.runtime.exit_codes import Fatal
    from shipway.runtime.generation.weights import choose_checkpoint, empty_model, load_model, save_weights
    from shipway.runtime.interchange.convert import published_tensors, take_weights
    from shipway.runtime.interchange.families import Unpublishable, config_of, family_of
    from shipway.runtime.interchange.files import open_folder, write_folder

ENVIRONMENT = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = _export(options) if options.command == "export" else _import(options)
    except Unpublishable as error:
        complain(str(error), code="EX001", as_json=options.json, help_text=error.way_out)
        return ENVIRONMENT
    except (Fatal, OSError) as error:
        complain(_words(error), code="EN001", as_json=options.json)
        return ENVIRONMENT
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key}: {value}" for key, value in result.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shipway")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export")
    export.add_argument("build", type=Path)
    export.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them: the newest")
    export.add_argument("out", type=Path)
    export.add_argument("--dtype", choices=DTYPES, default="bf16")
    export.add_argument("--weights", choices=["average", "last"])
    importing = commands.add_parser("import")
    importing.add_argument("build", type=Path)
    importing.add_argument("published", type=Path)
    importing.add_argument("out", type=Path, help="folder of the checkpoint to write")
    for command in (export, importing):
        command.add_argument("--json", action="store_true")
    return parser


def _words(error: Fatal | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'error').lower()}"
    return str(error)


def _export(options: argparse.Namespace) -> dict[str, str]:
    """Write published files; tensors that the model keeps in fp32 stay so."""
    model = read_plan(options.build).blueprint.model
    family = family_of(model)
    checkpoint = choose_checkpoint(options.checkpoint)
    module, dtype = import_model(options.build), DTYPES[options.dtype]
    built = load_model(module, checkpoint, CPU, dtype, options.weights)
    files = write_folder(options.out, config_of(model), published_tensors(built.state_dict(), model))
    return {
        "family": family,
        "checkpoint": str(checkpoint),
        "folder": str(options.out),
        "files": str(len(files)),
    }


def _import(options: argparse.Namespace) -> dict[str, str]:
    """Write a checkpoint of weights alone: it generates and is exported again, and resumes no optimizer."""
    plan = read_plan(options.build)
    built = empty_model(import_model(options.build), CPU, torch.float32)
    take_weights(built, plan.blueprint.model, open_folder(options.published))
    save_weights(built, options.out, plan.hash)
    return {"family": family_of(plan.blueprint.model), "checkpoint": str(options.out)}


if __name__ == "__main__":
    sys.exit(main())
