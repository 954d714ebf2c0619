"""What a command of the runtime says when it fails: a line for people, or with --json data on stdout."""

from __future__ import annotations

import json
import sys

from shipway.schemas.diagnostics import Diagnostic


def complain(summary: str, *, code: str, as_json: bool, help_text: str = "") -> None:
    """Say what is wrong as the compiler does: to stderr, or as `{"diagnostics": [...]}` to stdout."""
    if as_json:
        diagnostic = Diagnostic(code=code, summary=summary, help=help_text)
        data = {"diagnostics": [diagnostic.model_dump(mode="json")]}
        print(json.dumps(data, indent=2, ensure_ascii=False), flush=True)
        return
    print(f"error[{code}]: {summary}", file=sys.stderr)
    if help_text:
        print(f" = help: {help_text}", file=sys.stderr)
