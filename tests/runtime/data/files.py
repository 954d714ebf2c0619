"""Files of every kind that hold given texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_text(folder: Path, texts: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text)


def write_json_lines(path: Path, texts: Sequence[str], field: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))


def write_parquet(path: Path, texts: Sequence[str | None], rows_per_group: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=rows_per_group)


def write_dataset(folder: Path, texts: Sequence[str]) -> None:
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams of small batches and a state file."""
    folder.mkdir(parents=True)
    half = len(texts) // 2
    names = []
    for number, part in enumerate((texts[:half], texts[half:])):
        names.append(f"data-{number:05d}-of-00002.arrow")
        table = pa.table({"text": list(part)})
        with (
            pa.OSFile(str(folder / names[-1]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
