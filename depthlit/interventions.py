"""What can be done to a network for a while.

    with rerouted(decoder, swapped(decoder.order, 3, 9)):
        loss = decoder(tokens, targets)

`without` and `swapped` turn one order into another; `rerouted`, `silenced` and `tapped` are contexts that leave no
trace. A diagnostic calls the wrapper's own forward inside them, so that they hold under every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from depthlit.connection import Reader, State
from depthlit.decoder import Decoder, Order


def without(order: Order, *blocks: int) -> Order:
    """Leave blocks out: the state passes them by unchanged."""
    return tuple(i for i in order if i not in blocks)


def swapped(order: Order, a: int, b: int) -> Order:
    """Let two blocks trade places, whole: branches, norms, routing and constants."""
    return tuple({a: b, b: a}.get(i, i) for i in order)


@contextmanager
def rerouted(decoder: Decoder, order: Order) -> Iterator[None]:
    """Walk the blocks in this order. A prefix exits early; a repeated index runs a block twice."""
    before, decoder.order = decoder.order, tuple(order)
    try:
        yield
    finally:
        decoder.order = before


@contextmanager
def silenced(decoder: Decoder, *blocks: int) -> Iterator[None]:
    """Let blocks take part in the routing but contribute nothing: their branches return zero."""
    branches = [branch for i in blocks for branch in (decoder.blocks[i].attn, decoder.blocks[i].mlp)]
    handles = [branch.out.register_forward_hook(lambda *call: torch.zeros_like(call[-1])) for branch in branches]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def tapped(decoder: Decoder, see: Callable[[Reader, State], None]) -> Iterator[None]:
    """Call see(reader, state) when a state reaches a block's first connection, and when it reaches the exit.

    The call happens inside the block's own forward, where sharded weights are whole; the reader may be asked for its
    lens, probe, flow or telemetry there. While routes are walked, `decoder.path` tells which blocks the state passed.
    """
    readers: list[Reader] = [*(block.join_attn for block in decoder.blocks), decoder.exit]
    handles = [
        reader.register_forward_pre_hook(lambda reader, call: see(reader, call[0])) for reader in readers
    ]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
