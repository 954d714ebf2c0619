"""What can go wrong with data, in words meant for the person who owns the data."""

from __future__ import annotations


class DataError(Exception):
    """The data cannot be used as asked; the message says where, why, and a way out."""


class EmptySourceError(DataError):
    """A source has no document on the side of the split that was asked for."""


class CorruptRecord(Exception):  # noqa: N818 (a located finding that is counted, not a failure)
    """One record that cannot be read: counted and skipped, up to the stage's `corrupt_limit`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason
