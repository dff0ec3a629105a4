"""What designs that attend over depth hold between sublayers: sums of outputs, and what is known about them."""

# no postponed annotations, as in depthlit/connection.py
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from depthlit.mixers.depth import Ahead, Parts

if TYPE_CHECKING:
    from depthlit.residuals.bank import Bank


class Detail(NamedTuple):
    plus: Tensor | None  # (B, T, D) sum of the outputs with sign +1; the group's total itself if that is all of them
    scale: Tensor  # (B, T): see `depthlit.mixers.depth`
    match: Tensor  # (B, T)


class Group(NamedTuple):
    total: Tensor  # (B, T, D) sum of the outputs; in the first group of a state, the embedding
    scale: Tensor  # (B, T) inverse RMS of the total
    details: tuple[Detail, ...] = ()
    scored: tuple["Scored", ...] = ()  # once the group is done, if there is a bank: of each of `tensors`

    @property
    def tensors(self) -> list[Tensor]:
        """(B, T, D) each: those that the total and the details are made of, once each."""
        pluses = [detail.plus for detail in self.details if detail.plus is not None]
        return list({id(x): x for x in (self.total, *pluses)}.values())

    @property
    def each(self) -> list[tuple[Tensor, "Scored"]]:
        return list(zip(self.tensors, self.scored, strict=True)) if self.scored else []

    def known(self, place: int) -> dict[int, Tensor]:
        """By id of a tensor its dot products (B, T) with the query of one reader, as far as they are there."""
        return {id(x): row for x, each in self.each if (row := each.row(place)) is not None}

    def window(self, place: int) -> dict[int, Tensor]:
        """Likewise (B, T, G) for the window of readers that begins with this one, if one does."""
        return {id(x): rows for x, each in self.each if (rows := each.window(place)) is not None}


class Scored(NamedTuple):
    """Dot products of one tensor with the queries of all readers from `first` on, who come in windows."""

    first: int
    now: tuple[Tensor, ...]  # (B, T) each: for what is left of the window that `first` is in
    later: tuple[Tensor, ...]  # (B, T, G) each, one reader behind the other in memory: for the windows behind it

    def row(self, place: int) -> Tensor | None:
        """(B, T) for one reader; None if it was not to come."""
        i = place - self.first
        if i < len(self.now):
            return self.now[i] if i >= 0 else None
        i -= len(self.now)
        for rows in self.later:
            if i < rows.shape[-1]:
                return rows[..., i]
            i -= rows.shape[-1]
        return None

    def window(self, place: int) -> Tensor | None:
        """(B, T, G) for the readers of the window that begins with this one; None if none does or is to come."""
        i = place - self.first - len(self.now)
        for rows in self.later:
            if i <= 0:
                return rows if i == 0 else None
            i -= rows.shape[-1]
        return None


class Mixed(NamedTuple):
    """What was mixed ahead for the readers from `first` on: the sources of the first `upto` groups."""

    first: int
    upto: int
    each: tuple[Ahead, ...]


class Sources(NamedTuple):
    done: tuple[Group, ...]  # the embedding, and the groups before the newest
    run: Group | None = None  # the newest group, until another begins
    only: Tensor | None = None  # (B, T, D): what a reader at the border of a group takes instead of its mixture
    bank: "Bank | None" = None  # while training, if weights are at hand everywhere
    ahead: Mixed | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.done if self.run is None else (*self.done, self.run)

    @property
    def stream(self) -> Tensor:
        """(B, T, D): the sum of all, which is what a plain residual stream holds."""
        return reduce(torch.add, (group.total for group in self.groups))

    def mixed(self, place: int) -> tuple[int, Ahead | None]:
        """How many groups were mixed ahead for a reader, and what became of them."""
        if self.ahead is None or not 0 <= place - self.ahead.first < len(self.ahead.each):
            return 0, None
        return self.ahead.upto, self.ahead.each[place - self.ahead.first]


def next_output(state: Sources) -> Sources:
    """Skip a block. If the next reader stands at the border of a group, it takes the newest source as it is.

    DepthBench (arXiv:2609.32534): the rule by which its causal score skips a layer of AttnRes.
    """
    return state._replace(only=state.groups[-1].total)


def parts_of(total: Tensor, plus: Tensor | None) -> Parts:
    """The detail 2 A - C as tensors and factors."""
    if plus is None:
        return ((total, -1.0),)
    return ((total, 1.0),) if plus is total else ((plus, 2.0), (total, -1.0))
