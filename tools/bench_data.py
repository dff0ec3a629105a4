"""How fast the data is: the loader against a bare memory map, preparation against the tokenizer alone.

    python tools/bench_data.py
    python tools/bench_data.py --text corpus.parquet --tokenizer tokenizer.json --json bench.json

The loader is read beside an np.memmap behind a DataLoader with the same workers, the same collation and the same
tokens, in turns; the ratio of the two is what counts. Preparation is timed beside a pool of as many processes that do
nothing but tokenize the same documents, which they hold already.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthlit.data import TokenData
from depthlit.data.order import permuted
from depthlit.data.prepare import Preparation, prepare
from depthlit.data.sources import Piece, Reading, cut, list_files, read
from depthlit.data.tokenizers import Tokenizer, load_tokenizer, open_tokenizer


class Mapped(Dataset[Tensor]):
    """The usual thing: one flat file, block i at i T."""

    def __init__(self, path: Path, block_size: int, dtype: Any) -> None:
        self.tokens, self.block_size = np.memmap(path, dtype=dtype, mode="r"), block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.block_size
        return torch.from_numpy(self.tokens[start : start + self.block_size + 1].astype(np.int64))


def bench(
    text: str | None = None,
    tokenizer: str = "bytes",
    block_size: int = 512,
    batch_size: int = 16,
    tokens: int = 20_000_000,
    workers: list[int] | None = None,
    rounds: int = 5,
    prepare_workers: int = os.cpu_count() or 1,
    json_file: str | None = None,
) -> dict[str, Any]:
    """Print both comparisons.

    Args:
        text: documents to prepare, as for tools/prepare.py; the built-in corpus, in many parts, if left out.
        tokenizer: as for tools/prepare.py; `bytes`, `chars` or a tokenizer.json.
        block_size: context T.
        batch_size: blocks per batch.
        tokens: size of the corpus that the loaders read, made of random ids.
        workers: numbers of DataLoader processes to try; 0, 1 and 2 if left out.
        rounds: how often each is timed, in turns; the median counts.
        prepare_workers: processes that prepare.
        json_file: also write the figures here.
    """
    results: dict[str, Any] = {"loader": [], "preparation": {}}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        flat = random_corpus(here, tokens)
        for n in [0, 1, 2] if workers is None else workers:
            row = race(here / "corpus", flat, block_size, batch_size, n, rounds)
            results["loader"].append(row)
            print(
                f"loader, {n} workers: {row['tokens_per_sec']:,.0f} tokens/s; "
                f"memmap {row['memmap_tokens_per_sec']:,.0f}; ratio {row['ratio']:.2f}",
                flush=True,
            )
        results["preparation"] = row = race_preparation(here, text, tokenizer, prepare_workers, rounds)
        print(
            f"preparation, {prepare_workers} workers: {row['tokens_per_sec']:,.0f} tokens/s; tokenizer alone "
            f"{row['tokenizer_tokens_per_sec']:,.0f}; ratio {row['ratio']:.2f}",
            flush=True,
        )
    if json_file:
        Path(json_file).write_text(json.dumps(results, indent=1))
    return results


def random_corpus(folder: Path, tokens: int) -> Path:
    """A prepared corpus of documents of about 1000 random bytes each, and the same tokens in one flat file."""
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, tokens, dtype=np.uint8)
    ends = np.cumsum(rng.integers(100, 2000, tokens // 1000))
    parts = np.split(letters, ends[ends < tokens])
    with open(folder / "source.jsonl", "w") as file:
        file.writelines(f'{{"text": "{part.tobytes().decode()}"}}\n' for part in parts if len(part))
    prepare(Preparation([str(folder / "source.jsonl")], "bytes", val_fraction=0.0), folder / "corpus", 0, quiet=True)
    flat = folder / "flat.bin"
    with open(flat, "wb") as file:
        for part in parts:
            if len(part):
                file.write(np.append(part.astype(np.uint16), np.uint16(256)).tobytes())
    return flat


def race(corpus: Path, flat: Path, block_size: int, batch_size: int, workers: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of both loaders, timed in turns over the same number of shuffled batches."""
    data = TokenData(str(corpus), block_size, batch_size, num_workers=workers)
    collate = data._batches(None, batch_size).arrange
    mapped = Mapped(flat, block_size, np.uint16)
    order = permuted(np.arange(len(mapped)), len(mapped), 1).tolist()
    count = len(mapped) // batch_size

    def ours() -> Iterable[Any]:
        data.position = 0
        return islice(iter(data.train_dataloader()), count)

    def theirs() -> Iterable[Any]:
        return islice(
            iter(
                DataLoader(
                    mapped, batch_size, sampler=order, num_workers=workers, prefetch_factor=4 if workers else None,
                    collate_fn=lambda rows: collate(torch.stack(rows)),
                )
            ),
            count,
        )  # fmt: skip

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for name, stream in (("ours", ours), ("theirs", theirs)):
            times[name].append(seconds_of(stream))
    read_tokens = count * batch_size * block_size
    mine, bare = (read_tokens / statistics.median(times[name]) for name in ("ours", "theirs"))
    return {"workers": workers, "tokens_per_sec": mine, "memmap_tokens_per_sec": bare, "ratio": mine / bare}


def seconds_of(stream: Callable[[], Iterable[Any]]) -> float:
    """From the first batch to the last: starting worker processes is not reading."""
    batches = iter(stream())
    next(batches)
    begun = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begun


_job: tuple[str, int | None] = ("", None)
_texts: list[list[str]] = []
_tokenizer: Tokenizer


def _tokenize(piece: int) -> int:
    texts = _texts[piece]
    return sum(len(ids) for i in range(0, len(texts), 512) for ids in _tokenizer.encode(texts[i : i + 512]))


def _alone() -> None:
    global _tokenizer
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
    _tokenizer = load_tokenizer(*_job)


def race_preparation(folder: Path, text: str | None, tokenizer: str, workers: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of a whole preparation, and of the tokenizer alone on documents already in memory."""
    global _job, _texts
    if text is None:
        documents = [d.text for d in read(Piece("builtin:pydoc", "builtin"), Reading())]
        text = str(folder / "text.jsonl")
        with open(text, "w") as file:
            file.writelines(json.dumps({"text": d}) + "\n" for _ in range(8) for d in documents)
    pieces = cut(list_files([text]), Reading())
    _texts = [[d.text for d in read(piece, Reading()) if d.text] for piece in pieces]
    alone, whole, total = [], [], 0
    for i in range(rounds):
        out = folder / f"prepared{i}"
        begun = time.perf_counter()
        manifest = prepare(Preparation([text], tokenizer, val_fraction=0.01), out, workers, quiet=True)
        whole.append(time.perf_counter() - begun)
        named = open_tokenizer(tokenizer)
        content = named.content() if named else (out / "tokenizer.json").read_text()
        _job, total = (content, manifest["eos_id"]), manifest["tokens"]
        begun = time.perf_counter()
        with mp.get_context("fork").Pool(workers, _alone) as pool:
            list(pool.imap_unordered(_tokenize, range(len(pieces))))
        alone.append(time.perf_counter() - begun)
    mine, bare = total / statistics.median(whole), total / statistics.median(alone)
    return {"workers": workers, "tokens_per_sec": mine, "tokenizer_tokens_per_sec": bare, "ratio": mine / bare}


if __name__ == "__main__":
    torch.set_num_threads(1)
    auto_cli(bench)
    sys.exit(0)
