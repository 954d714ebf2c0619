"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The version of the installed distribution, `0` when run from a bare folder."""
    try:
        return installed_version("shipway")
    except PackageNotFoundError:
        return "0"
