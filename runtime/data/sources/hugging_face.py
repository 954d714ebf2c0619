"""Hugging Face datasets that `Dataset.save_to_disk` wrote: Arrow files, memory-mapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.storage import File, fingerprint

if TYPE_CHECKING:
    import pyarrow


class ArrowRows:
    """Rows of the Arrow files, in the dataset's order; any row at random, none of it loaded."""

    blocks = None

    def __init__(self, files: list[File], text_field: str) -> None:
        self._text_field = text_field
        self._chunks: list[tuple[str, pyarrow.Array | None, str]] = []
        """File, text column of one record batch (None when unreadable), problem."""
        for file in files:
            self._chunks += _chunks(file, text_field)
        sizes = [1 if column is None else len(column) for _, column, _ in self._chunks]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.count = int(self._ends[-1]) if sizes else 0
        self.fingerprint = fingerprint(files, "arrow", text_field)

    def read(self, index: int) -> str:
        """The row's text; raises CorruptRecord when its file is damaged or the field holds no text."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, column, problem = self._chunks[number]
        if column is None:
            raise CorruptRecord(file, problem)
        row = index - int(self._ends[number]) + len(column)
        text = column[row].as_py()
        if not isinstance(text, str):
            raise CorruptRecord(f"{file}: row {index}", f"no text in field {self._text_field!r}")
        return text


def open_dataset(path: str, split: str | None, text_field: str) -> ArrowRows:
    """The dataset saved in folder `path`; `split` chooses one of a DatasetDict. Raises DataError."""
    if "://" in path:
        raise DataError(
            f"{path}: a Hugging Face dataset must lie on a file system; copy it, or pack it there"
        )
    folder = _split_folder(Path(path), split)
    state = _read_json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{folder} holds a selection of rows; save it after `dataset.flatten_indices()`")
    files = []
    for entry in state.get("_data_files", []):
        file = folder / entry["filename"]
        if not file.is_file():
            raise DataError(f"{file} is listed in {folder / 'state.json'} and does not exist")
        files.append(File(str(file), file.name, file.stat().st_size))
    return ArrowRows(files, text_field)


def _split_folder(folder: Path, split: str | None) -> Path:
    if (folder / "state.json").is_file():
        if split is not None:
            raise DataError(f"{folder} is a single dataset without splits; leave `split` out")
        return folder
    if not (folder / "dataset_dict.json").is_file():
        raise DataError(
            f"{folder} was not written by `save_to_disk`: it has no state.json or dataset_dict.json"
        )
    splits = _read_json(folder / "dataset_dict.json").get("splits", [])
    if split is None or split not in splits:
        raise DataError(f"{folder} has the splits {', '.join(splits)}; name one of them in `split`")
    return folder / split


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold an object")
    return value


def _chunks(file: File, text_field: str) -> list[tuple[str, pyarrow.Array | None, str]]:
    import pyarrow as pa

    try:
        table = pa.ipc.open_stream(pa.memory_map(file.path)).read_all()
    except (pa.ArrowException, OSError) as error:
        return [(file.path, None, f"not a readable Arrow stream: {str(error).splitlines()[0]}")]
    if text_field not in table.column_names:
        names = ", ".join(table.column_names)
        raise DataError(f"{file.path} has no field {text_field!r}; set `text_field` to one of: {names}")
    return [(file.path, chunk, "") for chunk in table.column(text_field).chunks if len(chunk)]
