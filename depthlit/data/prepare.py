"""Text into LitData shards, once: documents in, token ids out, a manifest last.

A prepared folder holds

    manifest.json           what is inside; written last, so that a folder without it is not whole
    tokenizer.json          the tokenizer, to decode with
    train/ val/ test/       LitData shards: index.json and chunks; items are runs of documents, end to end

The order of the tokens depends on the sources alone, not on the number of workers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing as mp
import os
import platform
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from depthlit import __version__
from depthlit.data.sources import BUILTIN, Document, Piece, Reading, cut, kind_of, list_files, read, row_of
from depthlit.data.tokenizers import Chars, Tokenizer, load_tokenizer, open_tokenizer

FORMAT = 1
SPLITS = ("train", "val", "test")
CHUNK_BYTES = 1 << 26
BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 1 << 20
PARTS = ".parts"


@dataclass(frozen=True)
class Preparation:
    """What decides the content of a prepared folder; stored in its manifest.

    Args:
        input: files, folders, globs, URLs (s3://, gs://, hf://), Hugging Face dataset ids, or `builtin:pydoc`.
            Parquet, JSON lines (.gz, .zst) and plain text (.gz, .zst) are told apart by their endings.
        tokenizer: `chars`, `bytes`, a tokenizer.json, or a Hugging Face id.
        text_column: column or key that holds the text.
        separator: what stands between the documents of a plain text file, such as `<|endoftext|>`; newlines around it
            go with it. Without it every file is one document.
        eos: id of the token put after each document; `auto` looks it up in the tokenizer, `none` leaves documents
            unmarked. 50279 reproduces the ids of DepthBench's variant of the GPT-NeoX tokenizer.
        split: `hash` sends a document to a split by a hash of its text (the same in any order of files, and equal
            documents land on one side); `file` holds out the files that match `val_files`; `position` cuts off the
            end of every document.
        val_fraction: share that is held out for validation; 0 for none.
        test_fraction: share that is held out for testing.
        val_files: with `--split file`, parts of the names of the files that are held out.
    """

    input: list[str]
    tokenizer: str
    text_column: str = "text"
    separator: str | None = None
    eos: int | Literal["auto", "none"] = "auto"
    split: Literal["hash", "file", "position"] = "hash"
    val_fraction: float = 0.01
    test_fraction: float = 0.0
    val_files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.input:
            raise ValueError("nothing to prepare: give --input")
        if min(self.val_fraction, self.test_fraction) < 0 or self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction and test_fraction must be at least 0 and leave something for training")
        if self.split == "file" and not self.val_files:
            raise ValueError("--split file needs --val_files: parts of the names of the files that are held out")


def prepare(settings: Preparation, output: str | Path, num_workers: int = 0, overwrite: bool = False,
            quiet: bool = False) -> dict[str, Any]:  # fmt: skip
    """Turn text into LitData shards of token ids.

    Args:
        settings: what to read, how to tokenize it, what to hold out.
        output: the folder to write. One that was left half-written is continued if its settings are the same, else
            begun anew; one that holds anything else is refused.
        num_workers: processes; 0 works in this one.
        overwrite: replace a folder that was prepared with other settings.
        quiet: print nothing.

    Returns:
        The manifest.

    Raises:
        ValueError: one line that names file and row, for input that cannot be read.
    """
    job = _Job(settings, Path(output), num_workers, quiet)
    try:
        with job.alone():
            done = job.existing(overwrite)
            return job.run() if done is None else done
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{output}: the disk is full; make room and run the same command again to go on") from None
        raise


class _Job:
    """One run of a preparation."""

    def __init__(self, settings: Preparation, output: Path, num_workers: int, quiet: bool) -> None:
        self.output, self.workers, self.quiet = output, num_workers, quiet
        self.files = list_files(settings.input)
        documents_are_files = settings.separator is None and all(kind_of(f) == "text" for f in self.files)
        if settings.split == "hash" and documents_are_files and len(self.files) == 1 and settings.val_fraction > 0:
            settings = Preparation(**{**asdict(settings), "split": "position"})
            self.say("the text is one document: its end is held out (--split position)")
        self.settings = settings
        sources = [
            {"path": f, "bytes": None if f.startswith(BUILTIN) or "://" in f else os.stat(f).st_size}
            for f in self.files
        ]
        self.sources = sources
        self.identity = _digest(
            {"settings": asdict(settings), "sources": sources, "format": FORMAT, "python": _python(self.files)}
        )
        self.how = Reading(settings.text_column, settings.separator)

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def existing(self, overwrite: bool) -> dict[str, Any] | None:
        """The manifest, if the folder was already prepared just so; clears or keeps what a broken run left."""
        out = self.output
        if not out.exists():
            return None
        if out.is_file():
            raise ValueError(f"{out} is a file, not a folder")
        if (out / "manifest.json").exists():
            manifest = json.loads((out / "manifest.json").read_text())
            if manifest.get("identity") == self.identity:
                self.say(f"{out} is already prepared with these settings")
                return manifest
            if not overwrite:
                raise ValueError(
                    f"{out} is already prepared with other settings; give another --output, or --overwrite"
                )
            self._clear()
        elif not (out / PARTS).is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty and was not made by prepare; give another --output")
        elif (out / PARTS).is_dir():
            identity = out / PARTS / "identity"
            if identity.is_file() and identity.read_text() == self.identity:
                self.say(f"{out} was left half-written; going on")
            else:
                self._clear()
        return None

    def _clear(self) -> None:
        (self.output / "manifest.json").unlink(missing_ok=True)  # first: from here on the folder is not whole
        for name in (*SPLITS, PARTS):
            shutil.rmtree(self.output / name, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time writes a folder; workers of a killed run hold the lock until they have ended."""
        from filelock import FileLock, Timeout  # comes with LitData

        self.output.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.output.with_name(f".{self.output.name}.lock"))
        try:
            lock.acquire(timeout=10)
        except Timeout:
            raise ValueError(f"{self.output} is being written by another process") from None
        try:
            yield
        finally:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)

    def run(self) -> dict[str, Any]:
        begun, parts = time.time(), self.output / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        write_whole(parts / "identity", self.identity)
        pieces = cut(self.files, self.how)
        with _Pool(self.workers, len(pieces)) as pool:
            tokenizer = self._tokenizer(pool, pieces)
            for split in SPLITS:
                (self.output / split).mkdir(exist_ok=True)
            write_whole(parts / "tokenizer.json", tokenizer.content())
            work = [
                _Work(i, piece, self.settings, self.how, str(self.output), tokenizer.eos_id)
                for i, piece in enumerate(pieces)
            ]
            _loaded[str(parts / "tokenizer.json")] = tokenizer
            todo = [w for w in work if not _is_whole(w)]
            progress = _Progress(sum(w.piece.size for w in todo), quiet=self.quiet)
            for w, report in pool.each(_write_piece, todo):
                progress.add(w.piece.size, report["documents"], report["tokens"])
            progress.close()
        reports = [json.loads(_part_file(w.output, w.index).read_text()) for w in work]
        return self._finish(tokenizer, reports, time.time() - begun)

    def _tokenizer(self, pool: _Pool, pieces: list[Piece]) -> Tokenizer:
        tokenizer = open_tokenizer(self.settings.tokenizer, self.settings.eos)
        if tokenizer is None:
            stored = self.output / PARTS / "alphabet.json"
            if stored.exists():
                alphabet = json.loads(stored.read_text())
            else:
                found = pool.each(_characters, [(piece, self.how) for piece in pieces])
                alphabet = "".join(sorted(set().union(*(characters for _, characters in found))))
                write_whole(stored, json.dumps(alphabet))
            tokenizer = Chars(alphabet, self.settings.eos)
        eos = "none: documents are not marked" if tokenizer.eos_id is None else str(tokenizer.eos_id)
        self.say(f"tokenizer {self.settings.tokenizer}: {tokenizer.vocab_size} ids, end of document {eos}")
        return tokenizer

    def _finish(self, tokenizer: Tokenizer, reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Index each split, then write the manifest; until then nothing reads the folder."""
        splits: dict[str, Any] = {}
        counts: NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for i in range(len(reports)):
            counts += np.load(_part_file(str(self.output), i).with_suffix(".npy"))
        wanted = {"train": True, "val": self.settings.val_fraction > 0 or self.settings.split == "file",
                  "test": self.settings.test_fraction > 0}  # fmt: skip
        for split in SPLITS:
            folder = self.output / split
            if not wanted[split]:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            rows = [report["splits"][split] for report in reports]
            chunks = [chunk for row in rows for chunk in row["chunks"]]
            config = next((row["config"] for row in rows if row["config"]), None)
            known = {chunk["filename"] for chunk in chunks}
            for stray in set(os.listdir(folder)) - known:  # of a run that was killed
                (folder / stray).unlink()
            for name in known:
                with open(folder / name, "rb") as file:
                    os.fsync(file.fileno())  # on disk before the manifest says so
            write_whole(folder / "index.json", json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))
            splits[split] = {k: sum(row[k] for row in rows) for k in ("documents", "tokens", "eos_added")} | {
                "chunks": len(chunks), "lengths": np.sum([row["lengths"] for row in rows], axis=0).tolist(),
                "fingerprint": _digest([row["digest"] for row in rows])}  # fmt: skip
        total = {k: sum(s[k] for s in splits.values()) for k in ("documents", "tokens", "eos_added")}
        if not total["tokens"]:
            raise ValueError(f"{', '.join(self.settings.input)}: no document with text in it")
        for split, s in splits.items():
            if not s["documents"]:
                self.say(f"WARNING no document fell into {split}: raise its fraction, or give --split position")
        share = counts[counts > 0] / counts.sum()
        manifest = {
            "format": FORMAT, **total, "dropped_tokens": 0,
            "documents_in": sum(r["documents_in"] for r in reports),
            "empty_documents": sum(r["empty"] for r in reports),
            "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "dtype": tokenizer.dtype.name,
            "unigram_entropy": float(-(share * np.log(share)).sum()), "splits": splits,
            "tokenizer": {"name": self.settings.tokenizer, "kind": tokenizer.kind,
                          "fingerprint": tokenizer.fingerprint},
            "fingerprint": _digest([tokenizer.fingerprint, {k: s["fingerprint"] for k, s in splits.items()}]),
            "settings": asdict(self.settings), "sources": self.sources, "identity": self.identity,
            "versions": {"depthlit": __version__, "python": platform.python_version(), "litdata": _version("litdata"),
                         "tokenizers": _version("tokenizers")},
            "seconds": round(seconds, 1),
        }  # fmt: skip
        write_whole(self.output / "tokenizer.json", tokenizer.content())
        write_whole(self.output / "manifest.json", json.dumps(manifest, indent=1))
        shutil.rmtree(self.output / PARTS, ignore_errors=True)
        if manifest["empty_documents"]:
            first = next(r["first_empty"] for r in reports if r["first_empty"])
            self.say(f"left out {manifest['empty_documents']} empty documents, the first at {first}")
        parts = ", ".join(f"{name} {s['documents']:,} documents {s['tokens']:,} tokens" for name, s in splits.items())
        self.say(f"{self.output}: {parts}; {seconds:.1f} s")
        return manifest


@dataclass(frozen=True)
class _Work:
    """One piece for one worker."""

    index: int
    piece: Piece
    settings: Preparation
    how: Reading
    output: str
    eos_id: int | None


def _is_whole(work: _Work) -> bool:
    """Whether an earlier run wrote this piece to the end, and all of it is on disk."""
    part = _part_file(work.output, work.index)
    try:
        report = json.loads(part.read_text())
        if int(np.load(part.with_suffix(".npy")).sum()) != report["tokens"]:
            return False
        chunks = [(split, c) for split, s in report["splits"].items() for c in s["chunks"]]
        return all(checksum(Path(work.output) / split / c["filename"]) == c["crc32"] for split, c in chunks)
    except (OSError, ValueError, KeyError, EOFError):
        return False


def _part_file(output: str, index: int) -> Path:
    return Path(output) / PARTS / f"{index:06d}.json"


def _characters(job: tuple[Piece, Reading]) -> set[str]:
    found: set[str] = set()
    for document in read(*job):
        found.update(document.text)
    return found


_loaded: dict[str, Tokenizer] = {}


def _write_piece(work: _Work) -> dict[str, Any]:
    """Tokenize one piece into chunks of its own; the report, written last, says that they are whole."""
    source = Path(work.output) / PARTS / "tokenizer.json"
    if str(source) not in _loaded:
        _loaded[str(source)] = load_tokenizer(source.read_text(encoding="utf-8"), work.eos_id)
    tokenizer = _loaded[str(source)]
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
        placed = [
            (split, text) for d in full for split, text in _placed(d.text, work.settings, work.piece.path) if text
        ]
        try:
            rows = tokenizer.encode([text for _, text in placed])
        except ValueError as error:
            a, b = (row_of(work.piece, d.place) for d in (batch[0], batch[-1]))
            raise ValueError(f"{work.piece.path}, rows {a} to {b}: {error}") from None
        for split, writer in writers.items():
            counts += writer.add([ids for (s, _), ids in zip(placed, rows, strict=True) if s == split])
    report: dict[str, Any] = {
        "documents_in": documents_in, "empty": empty, "first_empty": first_empty,
        "splits": {split: writer.close() for split, writer in writers.items()},
    }  # fmt: skip
    report |= {k: sum(s[k] for s in report["splits"].values()) for k in ("documents", "tokens")}
    part = _part_file(work.output, work.index)
    with open(part.with_suffix(".tmp"), "wb") as file:
        np.save(file, counts)
    os.replace(part.with_suffix(".tmp"), part.with_suffix(".npy"))
    write_whole(part, json.dumps(report))
    return report


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


def _placed(text: str, settings: Preparation, path: str) -> list[tuple[str, str]]:
    """The split of a document, or its parts and theirs."""
    if settings.split == "file":
        held_out = any(part in Path(path).name for part in settings.val_files)
        return [("val" if held_out else "train", text)]
    if settings.split == "position":
        n = len(text)
        test = n - round(n * settings.test_fraction)
        val = test - round(n * settings.val_fraction)
        return [("train", text[:val]), ("val", text[val:test]), ("test", text[test:])]
    place = (
        int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % 10_000
    )
    held = place - round(settings.val_fraction * 10_000)
    if held < 0:
        return [("val", text)]
    return [("test" if held < round(settings.test_fraction * 10_000) else "train", text)]


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


def write_whole(path: Path, text: str) -> None:
    """Write a small file under a temporary name, then rename it: it is either whole or not there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _start_worker(threads: int, parent: int) -> None:
    """The tokenizers library takes every core for itself unless told otherwise; and no worker outlives its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


class _Pool:
    """Runs a function over jobs in some processes, or in this one.

    Args:
        workers: processes; 0 for none.
        jobs: how many there will be; with fewer jobs than workers, each gets several threads.
    """

    def __init__(self, workers: int, jobs: int) -> None:
        self.workers, self.threads = min(workers, jobs), max(1, workers // max(jobs, 1))
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Pool:
        if self.workers:
            import litdata.streaming.writer  # noqa: F401 (once here, instead of once in every worker)

            context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
            self._executor = ProcessPoolExecutor(self.workers, context, _start_worker, (self.threads, os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def each(self, function: Any, jobs: list[Any]) -> Iterator[tuple[Any, Any]]:
        """(job, result), as they are done."""
        if self._executor is None:
            for job in jobs:
                yield job, function(job)
            return
        waiting: dict[Future[Any], Any] = {self._executor.submit(function, job): job for job in jobs}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for want of memory; use fewer --num_workers and run again"
            ) from None


class _Progress:
    """Documents/s, tokens/s and time left on one line of a terminal; a line every half minute elsewhere."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.done, self.documents, self.tokens = max(total, 1), 0, 0, 0
        self.begun = self.shown = time.monotonic()
        self.quiet, self.terminal = quiet, sys.stderr.isatty()

    def add(self, size: int, documents: int, tokens: int) -> None:
        self.done, self.documents, self.tokens = self.done + size, self.documents + documents, self.tokens + tokens
        now = time.monotonic()
        if not self.quiet and now - self.shown >= (0.2 if self.terminal else 30):
            self.shown = now
            self._show(now - self.begun)

    def _show(self, seconds: float) -> None:
        share = min(self.done / self.total, 1.0)
        left = seconds / share - seconds if share else 0.0
        line = (
            f"{share:6.1%}  {self.documents:,} documents ({self.documents / seconds:,.0f}/s)  "
            f"{self.tokens:,} tokens ({self.tokens / seconds:,.0f}/s)  {int(left) // 60}:{int(left) % 60:02d} left"
        )
        print(
            f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def close(self) -> None:
        if not self.quiet and self.terminal and self.shown > self.begun:
            self._show(time.monotonic() - self.begun)
            print(file=sys.stderr)


def _digest(thing: Any) -> str:
    return hashlib.blake2b(json.dumps(thing, sort_keys=True).encode(), digest_size=8).hexdigest()


def _python(files: list[str]) -> str | None:
    """The built-in corpus is that of one Python version."""
    return platform.python_version() if any(f.startswith(BUILTIN) for f in files) else None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
