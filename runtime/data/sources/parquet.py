"""Parquet: one document per row, read row group by row group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.order import BLOCKS_MIXED
from shipway.runtime.data.storage import File, Storage, fingerprint

if TYPE_CHECKING:
    import pyarrow

# The order mixes documents of BLOCKS_MIXED neighbouring blocks, and a window may reach into the next group.
_GROUPS_KEPT = BLOCKS_MIXED + 1
_FILES_OPEN = 8


@dataclass(frozen=True)
class _Group:
    """A row group; or a file that cannot be opened, which counts as one unreadable record."""

    file: File
    number: int
    rows: int
    problem: str = ""


class ParquetRows:
    """Rows of the files, a block per row group: a row costs the decoding of its group's text column."""

    def __init__(self, storage: Storage, files: Sequence[File], text_field: str) -> None:
        self._storage = storage
        self._text_field = text_field
        self._open_files: OrderedDict[str, pyarrow.parquet.ParquetFile] = OrderedDict()
        self._columns: OrderedDict[int, pyarrow.ChunkedArray] = OrderedDict()
        self._groups = [group for file in files for group in self._groups_of(file)]
        self.blocks = np.array([group.rows for group in self._groups], dtype=np.int64)
        self._ends = np.cumsum(self.blocks)
        self.count = int(self.blocks.sum())
        self.fingerprint = fingerprint(files, "parquet", text_field)

    def read(self, index: int) -> str:
        """The row's text; raises CorruptRecord when its file or group is damaged or it has no text."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[number]
        row = index - int(self._ends[number]) + group.rows
        where = f"{group.file.path}: row {row} of row group {group.number}"
        if group.problem:
            raise CorruptRecord(group.file.path, group.problem)
        text = self._column(number, where)[row].as_py()
        if not isinstance(text, str):
            raise CorruptRecord(where, f"no text in column {self._text_field!r}")
        return text

    def _groups_of(self, file: File) -> list[_Group]:
        import pyarrow as pa

        try:
            opened = self._opened(file)
        except (pa.ArrowException, OSError) as error:
            return [_Group(file, 0, 1, f"not a readable Parquet file: {_first_line(error)}")]
        names = opened.schema_arrow.names
        if self._text_field not in names:
            columns = ", ".join(names)
            raise DataError(
                f"{file.path} has no column {self._text_field!r}; set `text_field` to one of: {columns}"
            )
        metadata = opened.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return [_Group(file, number, rows) for number, rows in enumerate(sizes) if rows]

    def _column(self, number: int, where: str) -> pyarrow.ChunkedArray:
        import pyarrow as pa

        if number not in self._columns:
            group = self._groups[number]
            try:
                table = self._opened(group.file).read_row_group(group.number, columns=[self._text_field])
            except (pa.ArrowException, OSError) as error:
                raise CorruptRecord(where, f"damaged row group: {_first_line(error)}") from error
            self._columns[number] = table.column(0)
        self._columns.move_to_end(number)
        while len(self._columns) > _GROUPS_KEPT:
            self._columns.popitem(last=False)
        return self._columns[number]

    def _opened(self, file: File) -> pyarrow.parquet.ParquetFile:
        import pyarrow.parquet as pq

        if file.path not in self._open_files:
            self._open_files[file.path] = pq.ParquetFile(self._storage.open(file.path))
        self._open_files.move_to_end(file.path)
        while len(self._open_files) > _FILES_OPEN:
            self._open_files.popitem(last=False)[1].close()
        return self._open_files[file.path]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
