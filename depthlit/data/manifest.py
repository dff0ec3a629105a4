"""manifest.json of a prepared folder and index.json of its splits: read in one place, against what must be in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

FORMAT = 1
SPLITS = ("train", "val", "test")
Schema = Any
"""A type or several (integers are not negative), [schema of every item], or {key: schema}; "key?" may be left out."""

_COUNTS = {"documents": int, "tokens": int, "eos_added": int, "chunks": int, "lengths": [int], "fingerprint": str}
MANIFEST: Schema = {
    "documents": int, "tokens": int, "eos_added": int, "dropped_tokens": int, "documents_in": int,
    "empty_documents": int, "vocab_size": int, "eos_id": (int, NoneType), "dtype": str, "unigram_entropy": float,
    "fingerprint": str, "tokenizer": {"name": str, "kind": str, "fingerprint": str}, "versions": {"python": str},
    "settings": {"split": str}, "sources": [{"path": str}],
    "splits": {"train": _COUNTS, "val?": _COUNTS, "test?": _COUNTS},
}  # fmt: skip
INDEX: Schema = {
    "chunks": [{"filename": str, "chunk_bytes": int, "chunk_size": int, "dim": int, "crc32": int}],
    "config": ({"data_format": [str], "data_spec": str, "compression": NoneType, "item_loader": str}, NoneType),
}


def read_manifest(content: str | bytes, source: str, remedy: str) -> dict[str, Any]:
    """The manifest in a text.

    Args:
        content: of manifest.json.
        source: what to call it in a message.
        remedy: what to do about a damaged one.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    manifest = _parsed(content, source, remedy)
    found = manifest.get("format")
    if found is not None and found != FORMAT:
        raise ValueError(f"{source} has format {found}, not {FORMAT}; {remedy}")
    _hold(manifest, MANIFEST, source, remedy)
    return manifest


def read_index(folder: Path, tokens: int, remedy: str) -> dict[str, Any]:
    """The index of a split.

    Args:
        folder: of the split.
        tokens: how many it holds, by the manifest.
        remedy: what to do about a damaged one.

    Raises:
        ValueError: it is missing or damaged, was not written by preparation, or does not agree with the manifest.
    """
    path = folder / "index.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} is missing or damaged ({error.strerror}); {remedy}") from None
    index = _parsed(content, str(path), remedy)
    _hold(index, INDEX, str(path), remedy)
    names = [chunk["filename"] for chunk in index["chunks"]]
    if strange := next((name for name in names if Path(name).name != name), None):
        raise ValueError(f"{path} names a chunk outside its folder, {strange!r}; {remedy}")
    if sum(chunk["dim"] for chunk in index["chunks"]) != tokens or (tokens and not index["config"]):
        raise ValueError(f"{path} does not agree with manifest.json; {remedy}")
    return index


def _parsed(content: str | bytes, source: str, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{source} is damaged (not JSON); {remedy}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source} is damaged (not a mapping); {remedy}")
    return found


def _hold(content: Any, schema: Schema, source: str, remedy: str) -> None:
    if problem := mismatch(content, schema):
        raise ValueError(f"{source} is damaged ({problem}); {remedy}")


def mismatch(value: Any, schema: Schema, path: str = "") -> str:
    """ "tokens is 'many'": the first place in which a value of JSON is not as the schema has it, or ""."""
    if isinstance(schema, Mapping) and isinstance(value, Mapping):
        for name, inner in schema.items():
            key = name.removesuffix("?")
            at = f"{path}.{key}" if path else key
            if key in value:
                if problem := mismatch(value[key], inner, at):
                    return problem
            elif key == name:
                return f"{at} is missing"
        return ""
    if isinstance(schema, list) and isinstance(value, list):
        problems = (mismatch(item, schema[0], f"{path}.{i}") for i, item in enumerate(value))
        return next((problem for problem in problems if problem), "")
    if isinstance(schema, tuple):
        problems_of = [mismatch(value, inner, path) for inner in schema]
        return "" if "" in problems_of else problems_of[0]
    if schema is int and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return ""
    if schema is not int and isinstance(schema, type) and isinstance(value, schema):
        return ""
    return f"{path or 'its content'} is {json.dumps(value, default=str, skipkeys=True)[:40]}"
