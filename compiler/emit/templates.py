"""Jinja over one folder of `templates/`: an unknown name is an error, tags leave no blank lines."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def templates(folder: str) -> Environment:
    """The environment of `templates/<folder>`."""
    return Environment(
        loader=PackageLoader("shipway.templates", folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
