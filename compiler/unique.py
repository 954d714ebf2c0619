"""Distinct rows of columns of small numbers: what many layouts share is worked out once for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def unique_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Distinct rows of equally long columns of small numbers, in sorted order, and which one each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        # Mixed-radix codes sort like the rows and far faster.
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return np.column_stack(columns)[first], which.reshape(-1)
