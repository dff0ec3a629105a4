"""What readers of depth can be asked before they read, so that what is done is read once for several of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthlit.layers import at_least_fp32
from depthlit.mixers.ahead import mix_ahead, scores
from depthlit.mixers.depth import Ahead
from depthlit.recipe import remember
from depthlit.residuals.held import Group, Mixed, Scored, Sources

if TYPE_CHECKING:
    from depthlit.residuals.sources import SourcesReader

WINDOW = 12
"""Readers, one behind the other, for which what is done is mixed at once."""
WORTHWHILE = 3
"""From how many tensors on."""


class Bank:
    """The readers of one forward, for whoever writes before them. No tuple: no batch is in it.

    Attributes:
        readers: those with a query, in order.
        place: the same the other way round.
        keys: (R, D) in fp32 or wider.
        each: the same one by one.
    """

    def __init__(self, readers: Sequence[SourcesReader]) -> None:
        self.readers = readers
        self.place = {reader: i for i, reader in enumerate(readers)}
        self.keys = torch.stack([reader.key for reader in readers])
        self.each = self.keys.unbind()

    def behind(self, writer: SourcesReader | None) -> int:
        """The place of the next reader; the first sublayer and, as None, the entry have none of their own."""
        return 0 if writer is None else self.place.get(writer, -1) + 1

    def scored(self, group: Group, writer: SourcesReader | None = None) -> Group:
        """A group that is done, with its dot products for all readers behind a writer."""
        place = self.behind(writer)
        left = len(self.readers) - place
        if left <= 0:
            return group
        now = min(-place % WINDOW, left)
        windows = [min(WINDOW, left - i) for i in range(now, left, WINDOW)]
        found = []
        for x in group.tensors:
            own, *later = scores(self.keys[place:], x).split((now, *windows))
            found.append(Scored(place, own.unbind(), tuple(rows.movedim(0, -1) for rows in later)))
        return group._replace(scored=tuple(found))

    def ahead(self, state: Sources, writer: SourcesReader) -> Sources:
        """With what is done mixed for the window of readers that begins behind a writer, if one does and if it pays."""
        place = self.behind(writer)
        dots = {key: rows.movedim(-1, 0) for group in state.done for key, rows in group.window(place).items()}
        if len(dots) < max(WORTHWHILE, sum(len(group.tensors) for group in state.done)):
            return state
        first = self.readers[place]
        window = self.readers[place : place + WINDOW]
        readers = [*takewhile(lambda reader: reader.shown == first.shown, window)]
        sources, _, kinds, _ = first.reading(Sources(state.done))
        if first.gate is not None:  # a factor of each reader's own, the same for all sources
            sources = [source._replace(match=None) for source in sources]
        biases = [bias for reader in readers if (bias := reader.biases(kinds)) is not None]
        own = {key: each[: len(readers)] for key, each in dots.items()}
        mixtures = mix_ahead(sources, own, torch.stack(biases, -1) if biases else None)
        totals = [group.total for group in state.done] if first.constant else []
        base = None
        if totals:  # the sum of one is that one, and needs no recipe
            base = _sum(*totals) if len(totals) == 1 else remember(_sum(*totals), _sum, *totals)
        each = (Ahead(z, w, reader.opening(w), base) for reader, (z, w) in zip(readers, mixtures, strict=True))
        return state._replace(ahead=Mixed(place, len(state.done), tuple(each)))


def _sum(*each: Tensor) -> Tensor:
    """In fp32 or wider."""
    first, *others = map(at_least_fp32, each)
    return reduce(torch.add, others, first)
