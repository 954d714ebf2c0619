"""One contender in a process of its own: gets ready, waits for its turn on the device, leaves one row.

`python -m bench.contenders.child NAME --out FILE ...`, started by bench.throughput. Getting ready is
planning, building and importing; the turn is a line on standard input.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.contenders.cases import Contender, chosen
from bench.contenders.own import Case, RefusedError, described, prepare

PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "fla-core")


def main() -> int:
    """Write the row of one contender; 0 also when it could not be measured, which the row then says."""
    options = _parser().parse_args()
    (contender,) = chosen((options.name,), decay=False, contexts=False)
    with TemporaryDirectory(prefix="shipway-bench-") as folder:
        try:
            row = _row(contender, options, Path(folder) / contender.case)
        except RefusedError as refusal:
            row = {"outcome": "unavailable", "detail": str(refusal)}
        except Exception as error:
            traceback.print_exc()
            out_of_memory = type(error).__name__ == "OutOfMemoryError"
            first = (str(error) or type(error).__name__).splitlines()[0]
            row = {"outcome": "out of memory" if out_of_memory else "failed", "detail": first}
    options.out.write_text(json.dumps(_named(contender) | row))
    return 0


def _named(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "case": contender.case,
        "kind": contender.kind,
        "states": contender.states,
        "variant": contender.variant,
    }


def _row(contender: Contender, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    case = prepare(contender, options.tiny, tuple(options.set), folder)
    run = _ready(contender, case, options)
    if not sys.stdin.readline():
        raise RefusedError("whoever started this is gone")
    found = run()
    return {"outcome": "measured", **described(case), **found, **_environment(options.device)}


def _ready(contender: Contender, case: Case, options: argparse.Namespace) -> Any:
    """Everything that needs no device, imports above all; what comes back trains."""
    import torch  # noqa: F401

    if contender.kind == "shipway":
        import shipway.runtime.verification.stage  # noqa: F401
        from bench.contenders.own import train as train_own

        return lambda: train_own(case, options.device, options.steps)
    if contender.kind == "delta layer":
        from bench.contenders.layer import contexts

        return lambda: contexts(case, options.device, tuple(options.contexts))
    if contender.kind == "delta kernel":
        from bench.contenders.layer import decay

        return lambda: decay(options.device, tuple(options.lengths))
    from bench.contenders.peers import peer_of
    from bench.contenders.train import train as train_peer

    peer = peer_of(contender.kind, case.plan.blueprint.model, options.device)
    return lambda: train_peer(peer, contender, case, options.device, options.steps)


def _environment(device: str) -> dict[str, Any]:
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"device": "cpu", "versions": versions}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["versions"]["cuda"] = str(torch.version.cuda)
        found["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", "default")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.contenders.child", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--contexts", type=int, nargs="*", default=[])
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    return parser


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # threads of a library must not keep a process that has left its row
