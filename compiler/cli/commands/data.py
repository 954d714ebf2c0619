"""shipway data pack, shipway data inspect

The work is the runtime's, in a process of its own: the compiler imports neither it nor numpy for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet

Tokenizer = Annotated[str, typer.Option("--tokenizer", metavar="FILE", help="bytes, or a tokenizer.json.")]
EndOfDocument = Annotated[
    str | None,
    typer.Option(
        "--end-of-document",
        metavar="TOKEN",
        help="Token put after each document; by default the tokenizer's own.",
        show_default=False,
    ),
]


def application() -> typer.Typer:
    """The commands below `shipway data`."""
    app = typer.Typer(
        name="data",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        help="Pack text into token shards, and look into them.",
    )
    app.command("pack", no_args_is_help=True)(pack)
    app.command("inspect", no_args_is_help=True)(inspect)
    return app


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .txt, .jsonl or .parquet file, a folder or URL of them, a saved Hugging Face dataset,"
            " or python_stdlib.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the shards.", show_default=False)
    ],
    tokenizer: Tokenizer = "bytes",
    end_of_document: EndOfDocument = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    documents: Annotated[
        str, typer.Option(metavar="file|line", help="What a document of a .txt file is.")
    ] = "file",
    split: Annotated[
        str | None, typer.Option(help="Split of a Hugging Face dataset.", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which a new shard begins.")] = 10**9,
    part: Annotated[
        str, typer.Option(metavar="K/N", help="Pack only the K-th of N parts, from 0: one per machine.")
    ] = "0/1",
    corrupt_limit: Annotated[
        float, typer.Option(min=0, max=1, help="Share of records that may be unreadable.")
    ] = 0.001,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tokenise text once, into memory-mapped shards for sources of kind `packed`."""
    arguments = ["pack", source, "--out", str(out), "--tokenizer", tokenizer, "--text-field", text_field]
    arguments += ["--documents", documents, "--shard-tokens", str(shard_tokens), "--part", part]
    arguments += ["--corrupt-limit", str(corrupt_limit)]
    arguments += ["--split", split] if split is not None else []
    _run(arguments, end_of_document, json, quiet)


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="SHARDS", help="Folder or URL of shards.", show_default=False)
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Show a document with this tokenizer.", show_default=False),
    ] = None,
    document: Annotated[int, typer.Option(min=0, help="Which document to show, from 0.")] = 0,
    end_of_document: EndOfDocument = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what shards hold."""
    arguments = ["inspect", path, "--document", str(document)]
    arguments += ["--tokenizer", tokenizer] if tokenizer is not None else []
    _run(arguments, end_of_document, json, quiet)


def _run(arguments: list[str], end_of_document: str | None, json: bool, quiet: bool) -> None:
    import subprocess
    import sys

    arguments += ["--end-of-document", end_of_document] if end_of_document is not None else []
    arguments += ["--json"] if json else []
    silence = subprocess.DEVNULL if quiet and not json else None
    finished = subprocess.run([sys.executable, "-m", "shipway.runtime.data", *arguments], stdout=silence)
    if finished.returncode:
        raise typer.Exit(finished.returncode)
