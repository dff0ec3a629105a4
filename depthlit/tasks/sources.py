"""Rows of an evaluation set: a local JSONL or parquet file, or a set on the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Missing(ValueError):
    """An evaluation set that cannot be had here; the message says what to do."""


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .jsonl.gz or .parquet file.

    Raises:
        Missing: the file does not exist, is of another kind, or a line is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise Missing(f"{path} does not exist")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise Missing(f"{path} is neither .jsonl, .jsonl.gz nor .parquet")
    opened = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise Missing(f"{path}, line {number}: not JSON ({error.msg})") from None
    return rows


def hub_rows(dataset: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """Rows of a set on the Hugging Face hub, through the `datasets` library and its cache.

    Raises:
        Missing: `datasets` is not installed, the hub is out of reach, or the set is gated.
    """
    try:
        import datasets
    except ImportError:
        raise Missing(f"{dataset} needs `pip install datasets`, or a local file") from None
    try:
        return list(datasets.load_dataset(dataset, config, split=split))
    except Exception as error:  # the library raises a dozen kinds; each means that there are no rows
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        hint = (
            "accept its terms and set HF_TOKEN" if "gated" in str(error).lower() else "go online or give a local file"
        )
        raise Missing(f"{dataset} cannot be had ({reason}); {hint}") from None


def renamed(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], names: Mapping[str, str], source: str
) -> list[dict[str, Any]]:
    """Rows with just these columns; `names` says what a column is called in this source, where it differs.

    Raises:
        Missing: a column is not there.
    """
    if not rows:
        raise Missing(f"{source} has no rows")
    for column in columns:
        if names.get(column, column) not in rows[0]:
            there = ", ".join(rows[0])
            raise Missing(
                f"{source} has no column {names.get(column, column)!r} for {column!r} (it has {there}); "
                f"name it with columns: {{{column}: ...}}"
            )
    return [{column: row[names.get(column, column)] for column in columns} for row in rows]
