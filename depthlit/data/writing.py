"""One piece of the sources into LitData chunks: what a worker of the preparation does."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from depthlit.data.manifest import SPLITS
from depthlit.data.sources import Document, Piece, Reading, read, row_of
from depthlit.data.tokenizers import Tokenizer, load_tokenizer
from depthlit.data.workers import tell
from depthlit.files import write_text

CHUNK_BYTES = 1 << 26
BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 1 << 20
PARTS = ".parts"
"""Folder, inside the one that is being prepared, for the reports of finished pieces."""


@dataclass(frozen=True)
class Rule:
    """How documents are sent to the splits; see `depthlit.data.prepare.Preparation`."""

    split: Literal["hash", "file", "position"]
    val_fraction: float
    test_fraction: float
    val_files: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """One piece for one worker."""

    index: int
    piece: Piece
    rule: Rule
    how: Reading
    output: str
    eos_id: int | None


def is_whole(work: Work) -> bool:
    """Whether an earlier run wrote this piece to the end, and all of it is on disk."""
    part = part_file(work.output, work.index)
    try:
        report = json.loads(part.read_text())
        if int(np.load(part.with_suffix(".npy")).sum()) != report["tokens"]:
            return False
        chunks = [(split, c) for split, s in report["splits"].items() for c in s["chunks"]]
        return all(checksum(Path(work.output) / split / c["filename"]) == c["crc32"] for split, c in chunks)
    except (OSError, ValueError, KeyError, EOFError):
        return False


def part_file(output: str, index: int) -> Path:
    """The report of a piece; it exists when the piece is whole."""
    return Path(output) / PARTS / f"{index:06d}.json"


def characters(job: tuple[Piece, Reading]) -> set[str]:
    """The characters that occur in a piece."""
    found: set[str] = set()
    for document in read(*job):
        found.update(document.text)
    return found


loaded: dict[str, Tokenizer] = {}
"""Tokenizers by the file they come from; a forked worker finds its parent's here."""


def write_piece(work: Work) -> None:
    """Tokenize one piece into chunks of its own; the report, written last, says that they are whole."""
    source = Path(work.output) / PARTS / "tokenizer.json"
    if str(source) not in loaded:
        loaded[str(source)] = load_tokenizer(source.read_text(encoding="utf-8"), work.eos_id)
    tokenizer = loaded[str(source)]
    writers = {split: _SplitWriter(Path(work.output) / split, work.index, tokenizer) for split in SPLITS}
    counts: NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    documents_in, empty, first_empty = 0, 0, ""
    for batch in _batches(read(work.piece, work.how)):
        documents_in += len(batch)
        full = [d for d in batch if d.text]
        if len(full) < len(batch):
            empty += len(batch) - len(full)
            gap = next(d for d in batch if not d.text)
            first_empty = first_empty or f"{work.piece.path}, row {row_of(work.piece, gap.place)}"
        placed = [(split, text) for d in full for split, text in _placed(d.text, work.rule, work.piece.path) if text]
        try:
            rows = tokenizer.encode([text for _, text in placed])
        except ValueError as error:
            a, b = (row_of(work.piece, d.place) for d in (batch[0], batch[-1]))
            raise ValueError(f"{work.piece.path}, rows {a} to {b}: {error}") from None
        for split, writer in writers.items():
            counts += writer.add([ids for (s, _), ids in zip(placed, rows, strict=True) if s == split])
        tell((work.index, sum(len(text) for _, text in placed), len(placed), sum(map(len, rows))))
    report: dict[str, Any] = {
        "documents_in": documents_in, "empty": empty, "first_empty": first_empty,
        "splits": {split: writer.close() for split, writer in writers.items()},
    }  # fmt: skip
    report |= {k: sum(s[k] for s in report["splits"].values()) for k in ("documents", "tokens")}
    part = part_file(work.output, work.index)
    with open(part.with_suffix(".tmp"), "wb") as file:
        np.save(file, counts)
    os.replace(part.with_suffix(".tmp"), part.with_suffix(".npy"))
    write_text(part, json.dumps(report))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _placed(text: str, rule: Rule, path: str) -> list[tuple[str, str]]:
    """The split of a document, or its parts and theirs."""
    if rule.split == "file":
        held_out = any(part in Path(path).name for part in rule.val_files)
        return [("val" if held_out else "train", text)]
    if rule.split == "position":
        n = len(text)
        test = n - round(n * rule.test_fraction)
        val = test - round(n * rule.val_fraction)
        return [("train", text[:val]), ("val", text[val:test]), ("test", text[test:])]
    place = (
        int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % 10_000
    )
    held = place - round(rule.val_fraction * 10_000)
    if held < 0:
        return [("val", text)]
    return [("test" if held < round(rule.test_fraction * 10_000) else "train", text)]


class _SplitWriter:
    """The part of one split that comes from one piece: chunks named after the piece, written by LitData."""

    def __init__(self, folder: Path, piece: int, tokenizer: Tokenizer) -> None:
        self.folder, self.piece, self.tokenizer = folder, piece, tokenizer
        self.documents = self.tokens = self.eos_added = self.items = 0
        self.lengths = [0] * 48  # documents of 2^(k-1) to 2^k - 1 tokens, the EOS counted
        self.digest = hashlib.blake2b(digest_size=8)
        self._writer: Any = None

    def add(self, documents: list[NDArray[Any]]) -> NDArray[np.int64]:
        """Write some documents, ended; returns how often each id occurs in them."""
        eos, dtype = self.tokenizer.eos_id, self.tokenizer.dtype
        end = np.array([] if eos is None else [eos], dtype=dtype)
        parts: list[NDArray[Any]] = []
        for ids in documents:
            parts.append(ids)
            ended = eos is None or (len(ids) > 0 and ids[-1] == eos)
            if not ended:
                parts.append(end)
                self.eos_added += 1
            self.lengths[(len(ids) + (not ended)).bit_length()] += 1
        if not parts:
            return np.zeros(self.tokenizer.vocab_size, dtype=np.int64)
        run = np.concatenate(parts).astype(dtype, copy=False)
        self.documents += len(documents)
        self.tokens += len(run)
        self.digest.update(run.tobytes())
        step = max(1, CHUNK_BYTES // dtype.itemsize)  # a long document fills several items: chunks keep their size
        for start in range(0, len(run), step):
            self._write(run[start : start + step])
        counts = np.bincount(run, minlength=self.tokenizer.vocab_size)
        if len(counts) > self.tokenizer.vocab_size:
            raise ValueError(f"the tokenizer gave id {len(counts) - 1}, its vocabulary is {self.tokenizer.vocab_size}")
        return counts

    def _write(self, ids: NDArray[Any]) -> None:
        if self._writer is None:
            from litdata.streaming.writer import BinaryWriter

            from depthlit.data.shards import SpanLoader

            self._writer = BinaryWriter(str(self.folder), chunk_bytes=CHUNK_BYTES, item_loader=SpanLoader())
            self._writer._rank = self.piece  # names the chunks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an item larger than a chunk is fine
            self._writer.add_item(self.items, ids)
        self.items += 1

    def close(self) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = []
        config = None
        if self._writer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._writer.done()
            index = self.folder / f"{self.piece}.index.json"
            content = json.loads(index.read_text())
            index.unlink()
            config = content["config"]
            chunks = [chunk | {"crc32": checksum(self.folder / chunk["filename"])} for chunk in content["chunks"]]
        return {"documents": self.documents, "tokens": self.tokens, "eos_added": self.eos_added, "chunks": chunks,
                "lengths": self.lengths, "digest": self.digest.hexdigest(), "config": config}  # fmt: skip


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            value = zlib.crc32(part, value)
    return value
