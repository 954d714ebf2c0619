"""The base class of every schema: strict, frozen, closed to unknown keys.

Files of schemas leave out `from __future__ import annotations`: pydantic would compile each annotation anew.
"""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """A value of one of Shipway's languages; it never changes after validation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        # A class is built when it is first used: a command uses few of them. The docstrings of fields are
        # read where they are shown (compiler/docstrings.py).
        defer_build=True,
        ser_json_inf_nan="strings",
    )

    @classmethod
    def by_default(cls) -> Self:
        """The value with all its defaults; unlike a call, it does not build the class while modules load."""
        return cls.model_construct()

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Validate plain data (as YAML or JSON gives it); raises pydantic's ValidationError.

        Goes through JSON because strict mode tells a list from a tuple in Python but not in JSON.
        """
        return cls.model_validate_json(json.dumps(data))
