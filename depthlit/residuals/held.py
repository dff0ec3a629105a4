"""What designs that attend over depth hold between sublayers: sums of outputs, and what is known about them."""

# no postponed annotations, as in depthlit/connection.py
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from depthlit.mixers.depth import Parts, scores


class Detail(NamedTuple):
    plus: Tensor | None  # (B, T, D) sum of the outputs with sign +1; the group's total itself if that is all of them
    scale: Tensor  # (B, T): see `depthlit.mixers.depth`
    match: Tensor  # (B, T)


class Group(NamedTuple):
    total: Tensor  # (B, T, D) sum of the outputs; in the first group of a state, the embedding
    scale: Tensor  # (B, T) inverse RMS of the total
    details: tuple[Detail, ...] = ()
    scored: tuple[tuple[Tensor, ...], ...] = ()
    """Once the group is done, if there is a bank: for each of `tensors`, its dot products (B, T) with the queries of
    the last readers, as many as were still to come."""

    @property
    def tensors(self) -> list[Tensor]:
        """(B, T, D) each: those that the total and the details are made of, once each."""
        pluses = [detail.plus for detail in self.details if detail.plus is not None]
        return list({id(x): x for x in (self.total, *pluses)}.values())

    def known(self, left: int) -> dict[int, Tensor]:
        """By id of a tensor its dot products (B, T) with a reader's query, as far as they are there.

        Args:
            left: readers from that one on, itself included.
        """
        each = zip(self.tensors, self.scored, strict=True) if self.scored else ()
        return {id(x): rows[-left] for x, rows in each if left <= len(rows)}


class Bank:
    """The keys of all readers, so that what is done is read once for all of them. No tuple: no batch is in it.

    Attributes:
        keys: (R, D) in fp32 or wider.
        each: the same one by one.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.each = keys, keys.unbind()

    def scored(self, group: Group, first: int) -> Group:
        """A group that is done, with the dot products for the readers from `first` on."""
        if first >= len(self.each):
            return group
        return group._replace(scored=tuple(scores(self.keys[first:], x) for x in group.tensors))


class Sources(NamedTuple):
    done: tuple[Group, ...]  # the embedding, and the groups before the newest
    run: Group | None = None  # the newest group, until another begins
    only: Tensor | None = None  # (B, T, D): what a reader at the border of a group takes instead of its mixture
    bank: Bank | None = None  # while training, if weights are at hand everywhere

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.done if self.run is None else (*self.done, self.run)

    @property
    def stream(self) -> Tensor:
        """(B, T, D): the sum of all, which is what a plain residual stream holds."""
        return reduce(torch.add, (group.total for group in self.groups))


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
