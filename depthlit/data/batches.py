"""Batches of blocks, and the two loaders: an endless one to train on, and one that covers a split exactly once."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthlit.data.order import ROUND_TRIP as RUN
from depthlit.data.order import Mixture, Order

if TYPE_CHECKING:
    from depthlit.data.shards import Shards

Batch = dict[str, Tensor]
ENDLESS = 1 << 40
"""Batches that the training loader claims to hold: a length, so that Lightning does not read one batch ahead."""


class Positions(Protocol):
    """Something that turns `count` places of a stream into shards and blocks; None marks padding."""

    def __call__(self, start: int, count: int) -> list[tuple[Shards, int] | None]: ...


class Shuffled:
    """The endless training stream: every corpus by its weight, each of its blocks once per epoch.

    Args:
        shards: of the corpora. Only whole blocks are trained on.
        weights: of the corpora.
        seed: of the order.
        window: see `Order`.
    """

    def __init__(self, shards: Sequence[Shards], weights: Sequence[float], seed: int, window: int | None) -> None:
        self.shards, self.mixture = list(shards), Mixture(weights, seed)
        self.orders = [Order(s.whole_per_chunk, seed + i, window) for i, s in enumerate(shards)]
        self._runs: dict[int, list[tuple[Shards, int]]] = {}

    def __call__(self, start: int, count: int) -> list[tuple[Shards, int] | None]:
        found: list[tuple[Shards, int] | None] = []
        while count:
            run, offset = divmod(start, RUN)
            part = self._run(run)[offset : offset + count]
            found += part
            start, count = start + len(part), count - len(part)
        return found

    def _run(self, run: int) -> list[tuple[Shards, int]]:
        """4096 places at once: computing an order one block at a time costs more than reading the blocks."""
        if run not in self._runs:
            corpus, places = self.mixture(np.arange(run * RUN, (run + 1) * RUN))
            blocks = np.empty_like(places)
            for c in np.unique(corpus).tolist():
                blocks[corpus == c] = self.orders[c](places[corpus == c])
            if len(self._runs) > 1:
                del self._runs[min(self._runs)]
            pairs = zip(corpus.tolist(), blocks.tolist(), strict=True)
            self._runs[run] = [(self.shards[c], b) for c, b in pairs]
        return self._runs[run]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}


class InOrder:
    """Every block of some corpora once, the shorter last ones included; places beyond are padding."""

    def __init__(self, shards: Sequence[Shards]) -> None:
        self.shards = list(shards)
        self.first = [0, *accumulate(len(s) for s in shards)]

    def __call__(self, start: int, count: int) -> list[tuple[Shards, int] | None]:
        found: list[tuple[Shards, int] | None] = []
        for place in range(start, start + count):
            corpus = bisect_right(self.first, place) - 1
            found.append((self.shards[corpus], place - self.first[corpus]) if place < self.first[-1] else None)
        return found


class Batches(Dataset[Batch]):
    """The batch of B blocks that begins at a place of a stream.

    Args:
        positions: the stream.
        batch_size: B.
        block_size: T.
        vocab_size: ids at or above it are refused.
        eos_id: ends a document; None if documents are not marked.
        document_mask: add `documents` (B, T), the running number of each token's document within its block.
        mask_document_starts: do not count the first token of a document as a target.
    """

    def __init__(
        self, positions: Positions, batch_size: int, block_size: int, vocab_size: int, eos_id: int | None = None,
        document_mask: bool = False, mask_document_starts: bool = False,
    ) -> None:  # fmt: skip
        self.positions, self.batch_size, self.block_size, self.vocab_size = (
            positions,
            batch_size,
            block_size,
            vocab_size,
        )
        self.eos_id, self.document_mask, self.mask_document_starts = eos_id, document_mask, mask_document_starts

    def __getitem__(self, place: int) -> Batch:
        T = self.block_size
        ids = np.full((self.batch_size, T + 1), -1, dtype=np.int64)
        for row, found in zip(ids, self.positions(place, self.batch_size), strict=True):
            if found is not None:
                shards, block = found
                tokens = shards[block]
                row[: len(tokens)] = tokens
        if int(ids.max()) >= self.vocab_size:
            where = next(f"{s.folder}, block {b}" for f in self.positions(place, self.batch_size) if f
                         for s, b in [f] if int(s[b].max()) >= self.vocab_size)  # fmt: skip
            raise ValueError(f"{where}: token id {int(ids.max())} is not below the vocabulary of {self.vocab_size}")
        return self.arrange(torch.from_numpy(ids))

    def arrange(self, ids: Tensor) -> Batch:
        """Inputs and targets of some token rows.

        Args:
            ids: (B, T + 1) int64, -1 where there is nothing.
        """
        tokens, targets = ids[:, :-1].clamp_min(0), ids[:, 1:].clone()
        batch = {"tokens": tokens, "targets": targets}
        if self.eos_id is not None:
            ended = tokens == self.eos_id
            if self.mask_document_starts:
                targets[ended] = -1
            if self.document_mask:
                batch["documents"] = ended.cumsum(1) - ended.long()  # an EOS belongs to the document that it ends
        return batch


def in_turn(batches: Batches, places: range, num_workers: int) -> Iterator[Batch]:
    """The batches at some places, in that order with any number of workers.

    Raises:
        ValueError: what a worker found wrong, in one line, without the worker's traceback.
    """
    loader = DataLoader(
        batches, batch_size=None, sampler=places, num_workers=num_workers, pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that iterating leaves the global random state alone
        prefetch_factor=4 if num_workers else None,
    )  # fmt: skip
    try:
        yield from loader
    except ValueError as error:
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None


class Counter(Protocol):
    """Holds the number of blocks that training has consumed, over all ranks and epochs."""

    position: int


class TrainLoader:
    """Endless batches of one rank, from the counter's position on. Every step takes world x B consecutive places.

    The counter moves when a batch is handed out; Lightning saves it with the DataModule.
    """

    def __init__(self, batches: Batches, counter: Counter, rank: int, world: int, num_workers: int) -> None:
        self.batches, self.counter, self.rank, self.world, self.num_workers = batches, counter, rank, world, num_workers

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        B = self.batches.batch_size
        places = range(self.counter.position + self.rank * B, sys.maxsize // 2, self.world * B)
        for batch in in_turn(self.batches, places, self.num_workers):
            self.counter.position += self.world * B
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Empty: the DataModule saves the position. Its presence tells Lightning that this loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class CoveringLoader:
    """Every block exactly once over all ranks, and equally many batches on each: missing blocks are padding."""

    def __init__(self, batches: Batches, blocks: int, rank: int, world: int, num_workers: int) -> None:
        step = world * batches.batch_size
        self.batches, self.num_workers = batches, num_workers
        self.places = range(rank * batches.batch_size, -(-blocks // step) * step, step)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Batch]:
        return in_turn(self.batches, self.places, self.num_workers)
