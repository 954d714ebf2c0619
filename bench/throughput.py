"""Tokens per second, memory and model FLOPs utilisation on one GPU: Shipway's builds beside their peers.

    python -m bench.throughput --out bench/results/h200-throughput.json
    python -m bench.throughput --only 'delta_dense_8k/*' --steps 5          # some of it; --list names all
    python -m bench.throughput --contexts 8K,64K,256K                       # a delta layer's cost by context
    python -m bench.throughput --decay                                      # bounded against unbounded
    python -m bench.throughput --device cpu --tiny                          # proves the paths without a GPU

Each contender trains in a process of its own and leaves a row as soon as it ends, so a timeout costs one row.
The next one gets ready (plans, builds, imports) while one has the device. Whoever trains, the batches, the
tokens per step, AdamW's hyper-parameters and the clipping are the blueprint's, nothing is recomputed unless
the blueprint says so, three steps go before the first that counts, and the median of a step is taken.
MFU is by the plan's model FLOPs: forward and backward, causal attention, no recomputation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.contenders.cases import Contender, chosen

ROOT = Path(__file__).parents[1]
GIB = 2**30
UNITS = {"K": 1 << 10, "M": 1 << 20}
DECAY_LENGTHS = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20)
TINY_LENGTHS = (256, 512)
SHORTEST_TURN_SECONDS = 10.0
"""With less left of the budget none is begun."""
LAST_LINES = 6
"""Of what a process that left no row has printed."""


@dataclass
class Started:
    """A contender's process, ready or getting ready."""

    contender: Contender
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def finish(self, timeout_seconds: float) -> dict[str, Any]:
        """Give it the device and wait for its row."""
        assert self.process.stdin is not None
        name = {"name": self.contender.name, "case": self.contender.case, "kind": self.contender.kind}
        try:
            self.process.communicate(b"go\n", timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return {**name, "outcome": "timeout", "detail": f"{timeout_seconds:g} s; {self._last_words()}"}
        if not self.out.exists():
            return {**name, "outcome": "failed", "detail": self._last_words()}
        row: dict[str, Any] = json.loads(self.out.read_text())
        return row

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-LAST_LINES:])


def main() -> int:
    """Run what was asked for; 1 when nothing could be measured."""
    options = _parser().parse_args()
    contenders = chosen(tuple(options.only), options.decay, bool(options.contexts))
    if options.list:
        print("\n".join(contender.name for contender in contenders))
        return 0
    if options.count:
        return _count(contenders, options)
    with TemporaryDirectory(prefix="shipway-throughput-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        return 0 if _run(contenders, options, Path(folder), logs) else 1


def _run(contenders: Sequence[Contender], options: argparse.Namespace, rows: Path, logs: Path) -> int:
    """Give one after the other the device; how many were measured within the budget."""
    measured, end = 0, time.monotonic() + options.budget
    following: Started | None = _start(0, contenders[0], options, rows, logs)
    for index in range(len(contenders)):
        began, started = time.monotonic(), following
        if started is None or end - began < SHORTEST_TURN_SECONDS:
            break
        more = index + 1 < len(contenders)
        following = _start(index + 1, contenders[index + 1], options, rows, logs) if more else None
        row = started.finish(min(options.timeout, end - began))
        row["date"], row["command"] = datetime.date.today().isoformat(), " ".join(sys.argv[1:])
        print(f"{time.monotonic() - began:5.0f} s  {started.contender.name}: {said(row)}", flush=True)
        measured += row["outcome"] == "measured"
        if options.out is not None:
            append(options.out, row)
    if following is not None:
        following.process.kill()
        print(f"no time was left for {following.contender.name} and what comes after it")
    return measured


def append(out: Path, row: dict[str, Any]) -> None:
    """Add a row to a file of results; what is there stays."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    out.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n")


def said(row: dict[str, Any]) -> str:
    """A row in one line."""
    if row["outcome"] != "measured":
        return f"{row['outcome']}: {row['detail']}"
    if "lengths" in row:
        return "; ".join(_length_said(length) for length in row["lengths"])
    return (
        f"{row['tokens_per_second']:,.0f} tok/s, {row['allocated_bytes'] / GIB:.1f} GiB,"
        f" MFU {row['mfu']:.1%}, {row['parameters'] / 1e6:,.1f} M parameters"
        f" (Shipway's {row['shipway_parameters'] / 1e6:,.1f} M)"
    )


def _length_said(length: dict[str, Any]) -> str:
    if "per_token" in length:
        return f"{length['context_tokens']:,} tokens: {length['per_token'] * 1e9:.1f} ns a token"
    return f"{length['tokens']:,} tokens: bounded {length['speedup']:.2f} times as fast"


def _start(index: int, contender: Contender, options: argparse.Namespace, rows: Path, logs: Path) -> Started:
    out, log = rows / f"{index}.json", logs / f"{contender.name.replace('/', '_')}.log"
    command = [sys.executable, "-m", "bench.contenders.child", contender.name, "--out", str(out)]
    command += ["--device", options.device, "--steps", str(options.steps)]
    command += ["--tiny"] if options.tiny else []
    command += [word for override in options.set for word in ("--set", override)]
    contexts = TINY_LENGTHS if options.tiny else tuple(options.contexts)
    command += ["--contexts", *map(str, contexts)]
    command += ["--lengths", *map(str, TINY_LENGTHS if options.tiny else DECAY_LENGTHS)]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file
        )
    return Started(contender, process, out, log)


def _count(contenders: Iterable[Contender], options: argparse.Namespace) -> int:
    """Parameters of each peer beside those of the build it stands against."""
    from bench.contenders.own import RefusedError, prepare
    from bench.contenders.peers import count, peer_of

    print(f"{'contender':52} {'peer':>15} {'Shipway':>15} {'difference':>11}")
    for contender in contenders:
        if contender.kind not in ("flash-linear-attention", "transformers"):
            continue
        with TemporaryDirectory() as folder:
            plan = prepare(contender, options.tiny, tuple(options.set), Path(folder) / "build").plan
        own = plan.parameters.total
        try:
            theirs = count(peer_of(contender.kind, plan.blueprint.model, "meta"))
        except RefusedError as refusal:
            print(f"{contender.name:52} {refusal}")
            continue
        print(f"{contender.name:52} {theirs:15,} {own:15,} {(theirs - own) / own:+11.4%}")
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    """8K,64K -> (8192, 65536)."""
    words = text.upper().split(",")
    return tuple(int(w[:-1]) * UNITS[w[-1]] if w[-1] in UNITS else int(w) for w in words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench.throughput"
    )
    parser.add_argument("--out", type=Path, help="JSON file that rows are added to")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="names, as fnmatch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="dimensions that train on a CPU")
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after three that don't")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds of one contender's turn")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds of all turns together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="blueprint override")
    parser.add_argument("--contexts", type=_lengths, default=(), help="as 8K,64K,256K")
    parser.add_argument("--decay", action="store_true", help="bounded against unbounded gate")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the processes print")
    parser.add_argument("--list", action="store_true", help="name the contenders and end")
    parser.add_argument("--count", action="store_true", help="compare numbers of parameters and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
