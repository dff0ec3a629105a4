"""Text into LitData shards, once: documents in, token ids out, a manifest last.

A prepared folder holds

    manifest.json           what is inside; written last, so that a folder without it is not whole
    tokenizer.json          the tokenizer, to decode with
    train/ val/ test/       LitData shards: index.json and chunks; items are runs of documents, end to end

The order of the tokens depends on the sources alone, not on the number of workers. Where a prepared folder is written
anew, the new one grows in .new/ inside it and takes its place when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from depthlit import __version__
from depthlit.data.manifest import FORMAT, SPLITS, read_manifest
from depthlit.data.sources import BUILTIN, Piece, Reading, cut, kind_of, list_files
from depthlit.data.tokenizers import Chars, Tokenizer, open_tokenizer
from depthlit.data.workers import Pool, Progress
from depthlit.data.writing import (
    PARTS,
    Rule,
    Work,
    characters,
    is_whole,
    loaded,
    part_file,
    write_piece,
)
from depthlit.files import write_text

NEW = ".new"
"""Folder, inside a prepared one, for what is to take its place."""


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
        held = (self.val_fraction, self.test_fraction)
        if not (min(held) >= 0 and sum(held) < 1):  # in this order NaN fails too
            raise ValueError(
                f"val_fraction {held[0]} and test_fraction {held[1]}: both must be at least 0, their sum below 1"
            )
        if self.separator == "":
            raise ValueError("separator is empty; leave it out where every file is one document")
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
        overwrite: replace a folder that was prepared with other settings or from files that have changed since; the
            old content stays until the new is whole.
        quiet: print nothing.

    Returns:
        The manifest.

    Raises:
        ValueError: one line that names file and row, for input that cannot be read; or what the disk refuses.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers is {num_workers}, it must be at least 0")
    output = Path(output).expanduser().absolute()
    job = _Job(settings, output, num_workers, quiet)
    try:
        with job.alone():
            done = job.existing(overwrite)
            return job.run() if done is None else done
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{output}: the disk is full; make room and run the same command again to go on") from None
        raise ValueError(f"{output}: cannot prepare ({error.strerror}: {error.filename})") from error


class _Job:
    """One run of a preparation."""

    def __init__(self, settings: Preparation, output: Path, num_workers: int, quiet: bool) -> None:
        self.output, self.workers, self.quiet = output, num_workers, quiet
        self.place = output  # where it is written: elsewhere while an older content stands there
        self.files = list_files(settings.input)
        documents_are_files = settings.separator is None and all(kind_of(f) == "text" for f in self.files)
        if settings.split == "hash" and documents_are_files and len(self.files) == 1 and settings.val_fraction > 0:
            settings = Preparation(**{**asdict(settings), "split": "position"})
            self.say("the text is one document: its end is held out (--split position)")
        self.settings = settings
        self.how = Reading(settings.text_column, settings.separator)
        self.rule = Rule(settings.split, settings.val_fraction, settings.test_fraction, tuple(settings.val_files))
        self.named = open_tokenizer(settings.tokenizer, settings.eos)
        stats = [None if f.startswith(BUILTIN) or "://" in f else os.stat(f) for f in self.files]
        sizes = [{"path": f, "bytes": s and s.st_size} for f, s in zip(self.files, stats, strict=True)]
        self.identity = _digest([
            asdict(settings), sizes, FORMAT, _python(self.files), self.named and self.named.fingerprint,
        ])  # fmt: skip
        times = ({"modified": s and s.st_mtime_ns} for s in stats)
        self.sources: list[dict[str, Any]] = [size | time for size, time in zip(sizes, times, strict=True)]
        self.mark = _digest([self.identity, self.sources])  # a changed source begins anew

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def existing(self, overwrite: bool) -> dict[str, Any] | None:
        """The manifest, if the folder was already prepared just so; clears or keeps what a broken run left."""
        out = self.output
        if (out / NEW / "manifest.json").exists():  # of a run that was killed at its very end
            self._swap()
        if (out / "manifest.json").exists():
            file, remedy, manifest = out / "manifest.json", "give another --output, or --overwrite", {}
            try:
                manifest = read_manifest(file.read_bytes(), str(file), remedy)
            except ValueError:
                if not overwrite:
                    raise
            changed = self._changed(manifest)
            if manifest.get("identity") == self.identity and not changed:
                self.say(f"{out} is already prepared with these settings")
                shutil.rmtree(out / NEW, ignore_errors=True)  # of an overwriting that failed and was given up
                return manifest
            if not overwrite:
                if changed:
                    raise ValueError(f"{changed} has changed since {out} was prepared; --overwrite prepares it anew")
                raise ValueError(f"{out} is already prepared with other settings; {remedy}")
            self.place = out / NEW
        elif not (out / PARTS).is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty and was not made by prepare; give another --output")
        if (self.place / PARTS).is_dir():
            mark = self.place / PARTS / "mark"
            if mark.is_file() and mark.read_text() == self.mark:
                self.say(f"{out} was left half-written; going on")
            else:
                for name in (*SPLITS, PARTS):
                    shutil.rmtree(self.place / name, ignore_errors=True)
        return None

    def _changed(self, manifest: dict[str, Any]) -> str | None:
        """The first source that was written since the folder was prepared, or copied anew."""
        before = {source["path"]: source for source in manifest.get("sources", [])}
        for source in self.sources:
            old = before.get(source["path"], source)
            if any(old.get(key, value) != value for key, value in source.items()):
                return str(source["path"])
        return None

    def _swap(self) -> None:
        """Let what is whole in .new take the old content's place; stopped anywhere, it can be called again."""
        new = self.output / NEW
        splits = read_manifest((new / "manifest.json").read_bytes(), str(new / "manifest.json"), "remove it")["splits"]
        (self.output / "manifest.json").unlink(missing_ok=True)  # first: from here on the folder is not whole
        for split in SPLITS:
            if (new / split).is_dir() or split not in splits:
                shutil.rmtree(self.output / split, ignore_errors=True)
            if (new / split).is_dir():
                (new / split).rename(self.output / split)
        for name in ("tokenizer.json", "manifest.json"):
            if (new / name).is_file():
                (new / name).replace(self.output / name)
        for rest in (self.output / PARTS, new):
            shutil.rmtree(rest, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time writes a folder; workers of a killed run hold the lock until they have ended."""
        from filelock import FileLock, Timeout  # comes with LitData

        if self.output.is_file():
            raise ValueError(f"{self.output} is a file, not a folder; give another --output")
        self.output.mkdir(parents=True, exist_ok=True)
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
        begun, parts = time.time(), self.place / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        write_text(parts / "mark", self.mark)
        pieces = cut(self.files, self.how)
        with Pool(self.workers, len(pieces)) as pool:
            tokenizer = self._tokenizer(pool, pieces)
            for split in SPLITS:
                (self.place / split).mkdir(exist_ok=True)
            write_text(parts / "tokenizer.json", tokenizer.content())
            work = [
                Work(i, piece, self.rule, self.how, str(self.place), tokenizer.eos_id) for i, piece in enumerate(pieces)
            ]
            loaded[str(parts / "tokenizer.json")] = tokenizer
            todo = [w for w in work if not is_whole(w)]
            progress = Progress(sum(w.piece.size for w in todo), quiet=self.quiet)
            for w, _ in pool.each(write_piece, todo, progress):
                progress.finish(w.index, w.piece.size)
            progress.close()
        reports = [json.loads(part_file(w.output, w.index).read_text()) for w in work]
        return self._finish(tokenizer, reports, time.time() - begun)

    def _tokenizer(self, pool: Pool, pieces: list[Piece]) -> Tokenizer:
        tokenizer = self.named
        if tokenizer is None:
            stored = self.place / PARTS / "alphabet.json"
            if stored.exists():
                alphabet = json.loads(stored.read_text())
            else:
                self.say("collecting the characters that occur")
                found = pool.each(characters, [(piece, self.how) for piece in pieces])
                alphabet = "".join(sorted(set().union(*(characters for _, characters in found))))
                write_text(stored, json.dumps(alphabet))
            tokenizer = Chars(alphabet, self.settings.eos)
        eos = "none: documents are not marked" if tokenizer.eos_id is None else str(tokenizer.eos_id)
        self.say(f"tokenizer {self.settings.tokenizer}: {tokenizer.vocab_size} ids, end of document {eos}")
        return tokenizer

    def _index(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Write the index of each split; what the manifest says of them."""
        splits: dict[str, Any] = {}
        wanted = {"train": True, "val": self.settings.val_fraction > 0 or self.settings.split == "file",
                  "test": self.settings.test_fraction > 0}  # fmt: skip
        for split in SPLITS:
            folder = self.place / split
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
            write_text(folder / "index.json", json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))
            splits[split] = {k: sum(row[k] for row in rows) for k in ("documents", "tokens", "eos_added")} | {
                "chunks": len(chunks), "lengths": np.sum([row["lengths"] for row in rows], axis=0).tolist(),
                "fingerprint": _digest([row["digest"] for row in rows])}  # fmt: skip
        return splits

    def _finish(self, tokenizer: Tokenizer, reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Index each split, then write the manifest; until then nothing reads the folder."""
        counts: NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for i in range(len(reports)):
            counts += np.load(part_file(str(self.place), i).with_suffix(".npy"))
        if not counts.sum():
            raise ValueError(f"{', '.join(self.settings.input)}: no document with text in it")
        splits = self._index(reports)
        total = {k: sum(s[k] for s in splits.values()) for k in ("documents", "tokens", "eos_added")}
        held = "val_files" if self.settings.split == "file" else "val_fraction"
        for split, s in splits.items():
            if not s["documents"]:
                self.say(f"WARNING no document fell into {split}: hold out another --{held}, or prepare more text")
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
        write_text(self.place / "tokenizer.json", tokenizer.content())
        write_text(self.place / "manifest.json", json.dumps(manifest, indent=1))
        shutil.rmtree(self.place / PARTS, ignore_errors=True)
        if self.place != self.output:
            self._swap()
        if manifest["empty_documents"]:
            first = next(r["first_empty"] for r in reports if r["first_empty"])
            self.say(f"left out {manifest['empty_documents']} empty documents, the first at {first}")
        parts = ", ".join(f"{name} {s['documents']:,} documents {s['tokens']:,} tokens" for name, s in splits.items())
        self.say(f"{self.output}: {parts}; {seconds:.1f} s")
        return manifest


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
