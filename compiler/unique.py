"""Distinct rows of columns of small numbers: what many layouts share is worked out once for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def unique_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Distinct rows of equally long columns of small numbers, in sorted order, and which one each row is."""
    first, which = first_rows(*columns)
    return np.column_stack(columns)[first], which


def first_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Where each distinct row stands first, in the rows' sorted order, and which one each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        # Mixed-radix codes sort like the rows and far faster.
        code = code * (int(column.max(initial=0)) + 1) + column
    # As numpy.unique, which would import numpy.ma.
    order = np.argsort(code, kind="stable")
    inorder = code[order]
    begins = np.ones(len(code), dtype=bool)
    np.not_equal(inorder[1:], inorder[:-1], out=begins[1:])
    which = np.empty(len(code), dtype=np.int64)
    which[order] = np.cumsum(begins) - 1
    return order[begins], which


def distinct(values: Ints) -> list[int]:
    """Distinct values of a short list, in rising order."""
    return sorted(set(values.tolist()))
