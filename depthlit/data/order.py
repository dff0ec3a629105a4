"""Which block comes when: an order that is computed, not stored, so that any place in it can be entered at once.

A position counts the blocks that training has consumed, over all ranks and epochs. Everything here is a pure function
of the seed and the position: it does not depend on ranks, workers or batch sizes, needs no memory that grows with the
corpus, and does not change with the version of a random number library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROUNDS = 6
ROUND_TRIP = 4096
"""Positions after which every corpus of a mixture has had its exact share."""


def key_of(*parts: object) -> int:
    """A 64-bit key from anything that prints the same everywhere."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def scramble(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), keyed."""
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permuted(index: Ints, size: int, key: int) -> Ints:
    """Where a keyed permutation of range(size) sends `index`: a Feistel network on a rectangle, walked until inside.

    Args:
        index: any shape, values in [0, size).
        size: how many there are.
        key: 64 bits that choose the permutation.
    """
    a = max(1, int(np.ceil(np.sqrt(size))))
    b = -(-size // a)
    keys = [key_of(key, i) for i in range(ROUNDS)]

    def turn(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = x // np.uint64(b), x % np.uint64(b)
        for i, round_key in enumerate(keys):
            if i % 2:
                low = (low + scramble(high, round_key) % np.uint64(b)) % np.uint64(b)
            else:
                high = (high + scramble(low, round_key) % np.uint64(a)) % np.uint64(a)
        return high * np.uint64(b) + low

    x = turn(np.atleast_1d(np.asarray(index)).astype(np.uint64))
    while (outside := x >= np.uint64(size)).any():
        x[outside] = turn(x[outside])
    return x.astype(np.int64).reshape(np.shape(index))


class Order:
    """The endless order of one split: every epoch visits every block once, shuffled anew by seed + epoch.

    Args:
        per_chunk: number of blocks that begin in each chunk.
        seed: of the shuffling.
        window: how many chunks are shuffled together; None shuffles the whole split. A window keeps the chunks that
            are read at one time few, which is what a small cache before an object store needs: the chunks are
            shuffled, cut into windows, and the blocks shuffled within each.
    """

    def __init__(self, per_chunk: Sequence[int] | Ints, seed: int, window: int | None = None) -> None:
        self.seed, self.window = seed, window
        self.per_chunk = np.asarray(per_chunk, dtype=np.int64)
        self.first = np.concatenate(([0], np.cumsum(self.per_chunk)))  # first block of each chunk
        self.size = int(self.first[-1])
        self._known: dict[int, tuple[Ints, Ints, Ints]] = {}

    def _windows(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """The chunks in the epoch's order, the first place of each, and the first place of each window."""
        if epoch not in self._known:
            self._known = {epoch: self._windows_of(epoch)}
        return self._known[epoch]

    def _windows_of(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        n = len(self.per_chunk)
        if self.window is None or self.window >= n:
            chunks, width = np.arange(n), max(n, 1)
        else:
            chunks, width = permuted(np.arange(n), n, key_of("chunks", self.seed, epoch)), self.window
        places = np.concatenate(([0], np.cumsum(self.per_chunk[chunks])))
        return chunks, places, np.append(places[:-1][::width], self.size)

    def __call__(self, positions: Ints) -> Ints:
        """The blocks at some positions; a position may lie in any epoch."""
        positions = np.asarray(positions, dtype=np.int64)
        blocks = np.empty_like(positions)
        epochs = positions // self.size
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            blocks[here] = self._within(int(epoch), positions[here] - epoch * self.size)
        return blocks

    def _within(self, epoch: int, places: Ints) -> Ints:
        chunks, starts, windows = self._windows(epoch)
        out = np.empty_like(places)
        inside = np.searchsorted(windows, places, side="right") - 1
        for w in np.unique(inside).tolist():
            here, begin = inside == w, int(windows[w])
            shuffled = permuted(places[here] - begin, int(windows[w + 1]) - begin, key_of(self.seed, epoch, w)) + begin
            k = np.searchsorted(starts, shuffled, side="right") - 1
            out[here] = self.first[chunks[k]] + shuffled - starts[k]
        return out


class Mixture:
    """Which corpus serves each position, by weights: exact over every 4096 positions, shuffled within them.

    Args:
        weights: one positive number per corpus, of any sum.
        seed: of the shuffling.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        share = np.asarray(weights, dtype=np.float64)
        self.seed, self.edges = seed, np.concatenate(([0.0], np.cumsum(share / share.sum())))
        self.edges[-1] = 1.0

    def _before(self, rounds: int) -> Ints:
        """How many positions each corpus has had after some whole rounds."""
        reached: Ints = np.floor(self.edges * rounds * ROUND_TRIP + 0.5).astype(np.int64)
        return reached[1:] - reached[:-1]

    def _round(self, r: int) -> tuple[Ints, Ints]:
        """Corpus and running number within the corpus of each position of a round."""
        before = self._before(r)
        counts = self._before(r + 1) - before
        corpus = np.repeat(np.arange(len(counts)), counts)
        corpus = corpus[permuted(np.arange(ROUND_TRIP), ROUND_TRIP, key_of("mixture", self.seed, r))]
        number = np.empty_like(corpus)
        for c in range(len(counts)):
            number[corpus == c] = before[c] + np.arange(counts[c])
        return corpus, number

    def __call__(self, positions: Ints) -> tuple[Ints, Ints]:
        """Corpus, and position within the corpus, of some positions."""
        if len(self.edges) == 2:
            return np.zeros_like(positions), positions
        corpus, number = np.empty_like(positions), np.empty_like(positions)
        rounds = positions // ROUND_TRIP
        for r in np.unique(rounds).tolist():
            here = rounds == r
            c, n = self._round(int(r))
            place = positions[here] - r * ROUND_TRIP
            corpus[here], number[here] = c[place], n[place]
        return corpus, number
