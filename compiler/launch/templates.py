"""Jinja over `templates/`: strict about names, quiet about blank lines."""

from __future__ import annotations

import json
import shlex
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shipway.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        comment_start_string="{##",  # bash has ${#array[@]}
        comment_end_string="##}",
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


def fill(template: str, **values: object) -> str:
    """Text of `templates/<template>` with `values` filled in."""
    return _environment().get_template(template).render(**values)
