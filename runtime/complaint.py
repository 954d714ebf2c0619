"""What a command of the runtime says when it fails: a line for people, or with --json data on stdout."""

from __future__ import annotations

import json
import sys

from shipway.schemas.diagnostics import Diagnostic


class WrongUsage(Exception):  # noqa: N818 - names the kind of mistake
    """A command line that asks for what cannot be: exit code 2. The message is for the user."""


def complain(summary: str, *, code: str, as_json: bool, help_text: str = "") -> None:
    """Say what is wrong as the compiler does: to stderr, or as `{"diagnostics": [...]}` to stdout.

    The object is on one line, since a command's progress may stand on the lines before it.
    """
    if as_json:
        diagnostic = Diagnostic(code=code, summary=summary, help=help_text)
        data = {"diagnostics": [diagnostic.model_dump(mode="json")]}
        print(json.dumps(data, ensure_ascii=False), flush=True)
        return
    print(f"error[{code}]: {summary}", file=sys.stderr)
    if help_text:
        print(f" = help: {help_text}", file=sys.stderr)
