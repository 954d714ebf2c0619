"""What the exit status says."""

from __future__ import annotations

OK = 0
INTERNAL = 1
INVALID = 2
"""Wrong usage, or an invalid blueprint."""
NOTHING_FITS = 3
ENVIRONMENT = 4
"""The environment, or a check before a run."""
STALE = 5
"""A plan whose blueprint has changed since."""
DIFFERENT = 6
"""`plan --diff` found differences, when --exit-code asks."""
INTERRUPTED = 130
