"""Which sublayers share a group, and with which sign each counts in a group's details: all that is fixed beforehand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

Remainder = Literal["extra", "balanced", "error"]
Basis = Literal["phase", "split", "duplicate", "random"]

SIGNS: dict[str, Callable[[int, int, int], bool]] = {
    "phase": lambda k, i, m: k % 2 == 0,
    "split": lambda k, i, m: i <= m / 2,
    "duplicate": lambda k, i, m: True,
    "random": lambda k, i, m: zlib.crc32(f"sign of sublayer {k}".encode()) % 2 == 0,
}
"""Whether sublayer k (from 0), the i-th (from 1) of the m of its group, has sign +1: attention against feed-forward;
the early half against the late one; and two controls, the sum once more and signs without meaning, always the same."""


@dataclass(frozen=True)
class Groups:
    """How many sublayers each group holds, in order. The one place where this is known."""

    lengths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))[:-1]

    def index(self, sublayer: int) -> int:
        """The group that holds a sublayer."""
        return max(g for g, start in enumerate(self.starts) if start <= sublayer)

    def signs(self, sublayer: int, bases: Sequence[Basis]) -> tuple[bool, ...]:
        """For each detail, whether the sublayer counts with sign +1."""
        g = self.index(sublayer)
        return tuple(SIGNS[basis](sublayer, sublayer - self.starts[g] + 1, self.lengths[g]) for basis in bases)

    def so_far(self, sublayer: int, group: int, bases: Sequence[Basis]) -> list[tuple[bool, ...]]:
        """For each detail, the signs of those of the group's sublayers that come before a sublayer."""
        start = self.starts[group]
        before = range(start, min(start + self.lengths[group], sublayer))
        return [tuple(self.signs(k, [basis])[0] for k in before) for basis in bases]

    def sources(self, sublayer: int, details: int = 0) -> int:
        """How many sources there are for a sublayer to read, or for the exit if it is 2 L.

        With groups of one length b this is 1 + floor(k / b) + [k mod b != 0]; each detail counts as one more.
        """
        return 1 + sum(start < sublayer for start in self.starts) * (1 + details)

    def printed(self, sublayer: int) -> int:
        """The number of sources that DepthBench's FLOPs assume (App. D, arXiv:2609.32534), also for the exit at 2 L.

        2 + floor(k / b) with b = 2 L / N for N groups, not rounded: one too many at borders. At the exit 1 + N.
        """
        n_sublayer, number = sum(self.lengths), self.lengths.count(self.lengths[0])
        if self.lengths[0] == 1:
            return self.sources(sublayer)
        return 1 + number if sublayer == n_sublayer else 2 + sublayer * number // n_sublayer

    def tensors(self, sublayer: int, bases: Sequence[Basis] = ()) -> int:
        """How many different tensors those sources are made of. A detail of one sign only is its total once more."""
        begun = [g for g, start in enumerate(self.starts) if start < sublayer]
        mixed = [{row for row in self.so_far(sublayer, g, bases) if len(set(row)) == 2} for g in begun]
        return 1 + sum(1 + len(rows) for rows in mixed)

    def described(self, bases: Sequence[Basis] = ()) -> str:
        """The schedule in words, for the summary at start."""
        counts = [self.sources(k, len(bases)) for k in range(sum(self.lengths))]
        at_exit = self.sources(sum(self.lengths))
        return f"{self}\nsources read, sublayer by sublayer: {_short(counts)}; at the exit: {at_exit}"

    def __str__(self) -> str:
        """9 groups of sublayers: 8 of 6, 1 of 2"""
        runs = [(size, len(list(same))) for size, same in groupby(self.lengths)]
        return f"{len(self.lengths)} groups of sublayers: " + ", ".join(f"{number} of {size}" for size, number in runs)


def _short(counts: Sequence[int]) -> str:
    """Numbers that never fall, in few words: "1, 2 x 6, 3 x 6", or "1 to 48" where each is one more."""
    if len(counts) > 2 and list(counts) == list(range(counts[0], counts[0] + len(counts))):
        return f"{counts[0]} to {counts[-1]}"
    runs = [(value, len(list(same))) for value, same in groupby(counts)]
    return ", ".join(f"{value} x {times}" if times > 1 else f"{value}" for value, times in runs)


def groups_of(n_sublayer: int, num_blocks: int | None, block_size: int | None, remainder: Remainder) -> Groups:
    """Tell off sublayers in groups.

    Args:
        n_sublayer: 2 L.
        num_blocks: wanted number of groups N, 8 if neither is given; one for each sublayer if there are fewer.
        block_size: wanted sublayers per group S.
        remainder: what to do where it does not come out even. "extra": groups of S, or of floor(2 L / N), and a shorter
            one of what remains; so there are more than N. "balanced": N, or ceil(2 L / S), groups whose lengths differ
            by at most one, the longer ones first. "error": refuse.

    Raises:
        ValueError: both are given, or one is not positive, or it does not come out even under "error".
    """
    check_groups(num_blocks, block_size, remainder)
    if block_size is None:
        number = min(num_blocks or 8, n_sublayer)
        size = n_sublayer // number
    else:
        size = min(block_size, n_sublayer)
        number = -(-n_sublayer // size)
    if number * size != n_sublayer and remainder == "error":
        asked = f"{num_blocks or 8} blocks" if block_size is None else f"blocks of {block_size}"
        raise ValueError(f"{n_sublayer} sublayers do not divide into {asked}: choose remainder 'extra' or 'balanced'")
    if remainder == "balanced":
        short, longer = divmod(n_sublayer, number)
        return Groups((short + 1,) * longer + (short,) * (number - longer))
    whole, left = divmod(n_sublayer, size)
    return Groups((size,) * whole + (left,) * bool(left))


def check_groups(num_blocks: int | None, block_size: int | None, remainder: str) -> None:
    """Raise ValueError for settings that no network can meet."""
    if num_blocks is not None and block_size is not None:
        raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} exclude each other: give one of them")
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if remainder not in ("extra", "balanced", "error"):
        raise ValueError(f"remainder must be 'extra', 'balanced' or 'error', not {remainder!r}")


def check_details(bases: Sequence[str], most: float) -> tuple[Basis, ...]:
    """The names as a tuple.

    Raises:
        ValueError: a name is unknown or given twice, or `most` is below 1.
    """
    for basis in bases:
        if basis not in SIGNS or list(bases).count(basis) > 1:
            raise ValueError(f"details must be different ones of {', '.join(SIGNS)}, not {', '.join(bases)}")
    if most < 1:
        raise ValueError(f"max_match must be at least 1, not {most}")
    return tuple(bases)  # type: ignore[arg-type]
