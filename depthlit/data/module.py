"""The DataModule: prepared corpora as batches of token blocks."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from depthlit.data.batches import Batch, Batches, CoveringLoader, InOrder, Shuffled, TrainLoader
from depthlit.data.corpus import Corpus, open_corpus
from depthlit.data.manifest import SPLITS
from depthlit.data.order import key_of, permuted
from depthlit.data.shards import Shards
from depthlit.data.sources import BUILTIN

CHECKED = 1 << 29
"""Corpora of fewer tokens are compared with their checksums before use; of larger ones only the sizes of the chunks."""


def _bytes_of(size: str | int | None) -> int | None:
    """Bytes of a size such as 500MB, 50GB or 1000000."""
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(size), re.IGNORECASE)
    found = 0 if match is None else int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))
    if not found:
        raise ValueError(f"data.cache_size {size!r} is not a size such as 500MB or 50GB")
    return found


class TokenData(LightningDataModule):
    """Blocks of tokens from folders made by tools/prepare.py, streamed through LitData.

    Training goes through every block of a corpus once per epoch, in an order shuffled by seed + epoch, without an end.
    The order does not depend on ranks, workers or batch size, so a resumed run goes on exactly where it stopped, also
    with another batch size or on another number of ranks. Validation covers every token once on any number of ranks.

    Args:
        path: a prepared folder or the URL of one (s3://, gs://, hf://), or several; `builtin:pydoc` is the corpus
            that every Python carries.
        block_size: context T in tokens.
        batch_size: blocks per micro-batch on one rank.
        weights: shares of several corpora in training, of any sum; equal if left out.
        num_workers: processes that read ahead; 0 reads in the main process, which is right on a CPU.
        seed: of the order of the training blocks.
        vocab_multiple: round the vocabulary up to a multiple of this (8 makes GPT-NeoX's 50277 ids 50280).
        document_mask: let attention stay within documents.
        mask_document_starts: do not train on predicting the first token of the next document.
        shuffle_window: chunks (of 64 MB) that are shuffled together; the whole corpus if left out. Needed with a
            cache smaller than the corpus.
        cache_dir: where chunks behind a URL are kept; $DEPTHLIT_CACHE or ~/.cache/depthlit if left out.
        cache_size: room for the chunks of each corpus behind a URL, such as 50GB; the ones unused for longest are
            removed. Everything is kept if left out.
    """

    def __init__(
        self,
        path: str | list[str] = "builtin:pydoc",
        block_size: int = 256,
        batch_size: int = 8,
        weights: list[float] | None = None,
        num_workers: int = 0,
        seed: int = 42,
        vocab_multiple: int = 1,
        document_mask: bool = False,
        mask_document_starts: bool = False,
        shuffle_window: int | None = None,
        cache_dir: str | None = None,
        cache_size: str | int | None = None,
    ) -> None:
        super().__init__()
        paths = [path] if isinstance(path, str) else list(path)
        if not paths:
            raise ValueError("data.path names no corpus; give a folder made by tools/prepare.py, or builtin:pydoc")
        for name, value, least in (
            ("block_size", block_size, 1),
            ("batch_size", batch_size, 1),
            ("vocab_multiple", vocab_multiple, 1),
            ("shuffle_window", shuffle_window, 1),
            ("num_workers", num_workers, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"data.{name} must be at least {least}, not {value}")
        self.weights = [1.0] * len(paths) if weights is None else list(weights)
        if len(self.weights) != len(paths):
            raise ValueError(f"data.weights has {len(self.weights)} numbers for {len(paths)} corpora")
        if not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"data.weights {self.weights}: every one must be a positive number")
        if min(self.weights) / sum(self.weights) < 5e-4:
            raise ValueError(f"data.weights {self.weights}: every share must be at least 0.0005")
        self.block_size, self.batch_size, self.num_workers, self.seed = block_size, batch_size, num_workers, seed
        self.document_mask, self.mask_document_starts = document_mask, mask_document_starts
        self.shuffle_window = shuffle_window
        self.corpora: list[Corpus] = [
            open_corpus(p, Path(cache_dir).expanduser() if cache_dir else None, _bytes_of(cache_size)) for p in paths
        ]
        first = self.corpora[0]
        for other in self.corpora[1:]:
            if other.manifest["tokenizer"]["fingerprint"] != first.manifest["tokenizer"]["fingerprint"]:
                raise ValueError(f"{other.path} and {first.path} were prepared with different tokenizers")
        if (document_mask or mask_document_starts) and first.eos_id is None:
            raise ValueError(f"{first.path} does not mark where documents end (prepared with --eos none)")
        self.vocab_size = -(-max(c.vocab_size for c in self.corpora) // vocab_multiple) * vocab_multiple
        self.position = 0  # blocks consumed in training, over all ranks and epochs
        self._shards: dict[tuple[str, int], list[Shards]] = {}

    # What the corpora are

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Name, kind and fingerprint of the tokenizer."""
        return dict(self.corpora[0].manifest["tokenizer"])

    @property
    def eos_id(self) -> int | None:
        return self.corpora[0].eos_id

    @property
    def fingerprint(self) -> str:
        """Of the token ids of all corpora and their order."""
        return hashlib.blake2b("/".join(c.fingerprint for c in self.corpora).encode(), digest_size=8).hexdigest()

    @property
    def unigram_entropy(self) -> float | None:
        """Nats per token of the best model that knows only how often each token occurs; None for several corpora."""
        return float(self.corpora[0].manifest["unigram_entropy"]) if len(self.corpora) == 1 else None

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one micro-batch on one rank: B T."""
        return self.batch_size * self.block_size

    def describe(self) -> str:
        """Lines for the summary at start: documents, tokens, blocks and the unread tail of every split."""
        lines = []
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            m = corpus.manifest
            python = f", Python {m['versions']['python']}" if corpus.path.startswith(BUILTIN) else ""
            share = f", {weight / sum(self.weights):.1%} of training" if len(self.corpora) > 1 else ""
            lines.append(
                f"{corpus.path}: {m['documents']:,} documents, {m['tokens']:,} tokens, vocabulary {m['vocab_size']:,}, "
                f"unigram entropy {m['unigram_entropy']:.4f} nats/token, hash {corpus.fingerprint}{python}{share}"
            )
            for split, counts in m["splits"].items():
                whole = max(0, counts["tokens"] - 1) // self.block_size
                tail = max(0, counts["tokens"] - 1 - whole * self.block_size)
                unread = f"unread tail {tail} tokens" if split == "train" else f"tail of {tail} tokens read too"
                lines.append(f"  {split}: {counts['tokens']:,} tokens, {whole:,} blocks of {self.block_size}, {unread}")
        return "\n".join(lines)

    # Loaders

    def setup(self, stage: str) -> None:
        for corpus in self.corpora:
            for split in SPLITS:
                if corpus.has(split) and corpus.mirror is None:
                    corpus.check(split, content=corpus.manifest["tokens"] < CHECKED)
        if self.trainer is not None and self.trainer.is_global_zero:
            print(self.describe(), flush=True)

    def train_dataloader(self) -> TrainLoader:
        rank, world = self._place()
        shards = self._open("train")
        for corpus, s in zip(self.corpora, shards, strict=True):
            self._need(
                corpus, "train", s.whole, world * self.batch_size, f"{world} x {self.batch_size} blocks per step"
            )
            self._fits(corpus, s)
        stream = Shuffled(shards, self.weights, self.seed, self.shuffle_window)
        return TrainLoader(self._batches(stream, self.batch_size), self, rank, world, self.num_workers)

    def val_dataloader(self) -> CoveringLoader | list[Any]:
        """Every token of the held-out splits once; nothing when none was held out."""
        return self._covering("val")

    def test_dataloader(self) -> CoveringLoader | list[Any]:
        return self._covering("test")

    def predict_dataloader(self) -> CoveringLoader | list[Any]:
        return self._covering("val")

    def windows(self, count: int, length: int, seed: int = 0) -> Batch:
        """Fixed windows of the validation split for diagnostics, the same on every rank; documents may cross them.

        Args:
            count: how many.
            length: tokens of each.
            seed: chooses them.

        Returns:
            A batch of `count` rows of `length` tokens.

        Raises:
            ValueError: when the split holds fewer.
        """
        split = "val" if any(c.has("val") for c in self.corpora) else "train"
        shards = [c.shards(split, length) for c in self.corpora if c.has(split)]
        first = np.cumsum([0, *(s.whole for s in shards)])
        if first[-1] < count:
            raise ValueError(
                f"{self._names(split)} holds {first[-1]} windows of {length} tokens, {count} needed: "
                "take fewer or shorter ones"
            )
        chosen = np.sort(permuted(np.arange(count), int(first[-1]), key_of("windows", seed)))
        corpus = np.searchsorted(first, chosen, side="right") - 1
        rows = [shards[c][int(b - first[c])].astype(np.int64) for c, b in zip(corpus, chosen, strict=True)]
        return self._batches(InOrder(shards), count, length).arrange(torch.from_numpy(np.stack(rows)))

    def _covering(self, split: str) -> CoveringLoader | list[Any]:
        corpora = [c for c in self.corpora if c.has(split)]
        if not corpora:
            return []
        rank, world = self._place()
        shards = self._open(split)
        blocks = sum(len(s) for s in shards)
        if not blocks:
            raise ValueError(
                f"{self._names(split)} is empty, nothing was held out: prepare it with a larger --{split}_fraction, "
                "--split position, or more text"
            )
        return CoveringLoader(self._batches(InOrder(shards), self.batch_size), blocks, rank, world, self.num_workers)

    def _batches(self, positions: Any, batch_size: int, block_size: int | None = None) -> Batches:
        return Batches(
            positions, batch_size, block_size or self.block_size, self.vocab_size, self.eos_id,
            self.document_mask, self.mask_document_starts,
        )  # fmt: skip

    def _open(self, split: str) -> list[Shards]:
        key = (split, self.block_size)
        if key not in self._shards:
            self._shards[key] = [c.shards(split, self.block_size) for c in self.corpora if c.has(split)]
        return self._shards[key]

    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks among those that see different data."""
        if self.trainer is None:
            return 0, 1
        kwargs = self.trainer.distributed_sampler_kwargs or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def _names(self, split: str) -> str:
        return ", ".join(f"{c.path}/{split}" for c in self.corpora if c.has(split))

    def _need(self, corpus: Corpus, split: str, found: int, needed: int, why: str) -> None:
        if found < needed:
            raise ValueError(
                f"{corpus.path}/{split} holds {found} blocks of {self.block_size} tokens, {needed} needed ({why}): "
                "prepare more text, or take a smaller block_size or batch_size"
            )

    def _fits(self, corpus: Corpus, shards: Shards) -> None:
        """A cache that cannot hold what is shuffled together would fetch a chunk for every block."""
        if shards.fetcher is None or corpus.mirror is None or corpus.mirror.cache_size is None:
            return
        sizes = [chunk["chunk_bytes"] for chunk in shards.fetcher.chunks]
        room = corpus.mirror.cache_size // max(sizes) - 1
        if sum(sizes) > corpus.mirror.cache_size and (self.shuffle_window or len(sizes)) > room:
            raise ValueError(
                f"data.cache_size holds {room + 1} of the {len(sizes)} chunks of {corpus.path}/train: "
                + (
                    f"set data.shuffle_window to at most {room}"
                    if room > 0
                    else f"it must exceed {2 * max(sizes)} bytes"
                )
            )

    # Resuming

    def _identity(self) -> dict[str, Any]:
        """What decides the order of the training stream; batch size and number of ranks do not."""
        return {
            "fingerprint": self.fingerprint, "block_size": self.block_size, "seed": self.seed,
            "weights": self.weights, "shuffle_window": self.shuffle_window,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The position in the training stream, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped; what does not train has no place to go on from and may read other data.

        Raises:
            ValueError: when the position has no meaning any more, with both values named.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return
        for name, now in self._identity().items():
            if state_dict[name] != now:
                raise ValueError(
                    f"the checkpoint was trained with data.{name} {state_dict[name]}, this run has {now}: the place in "
                    "the data cannot be carried over. Set it back, or begin a new run."
                )
        self.position = int(state_dict["position"])
