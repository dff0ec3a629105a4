"""What can be done to a network for a while.

    with rerouted(decoder, swapped(decoder.order, 3, 9)):
        loss = decoder(tokens, targets)

`without` and `swapped` turn one order into another; `rerouted`, `silenced`, `headless` and `tapped` are contexts that
leave no trace. A diagnostic calls the wrapper's own forward inside them, so that they hold under every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

from torch import Tensor, nn

from depthlit.connection import Reader, State
from depthlit.decoder import Decoder, Order


def without(order: Order, *blocks: int, rule: str = "pass") -> Order:
    """Leave blocks out.

    Args:
        order: the steps to change.
        blocks: the blocks to skip.
        rule: what becomes of the state there. "pass": it stays as it is; "silent": it takes part in the block's
            routing, but the branches add nothing; or a name from the strategy's `skip_rules`.
    """
    if rule == "pass":
        return tuple(step for step in order if step not in blocks)
    return tuple((rule, step) if isinstance(step, int) and step in blocks else step for step in order)


def swapped(order: Order, a: int, b: int) -> Order:
    """Let two blocks trade places, whole: branches, norms, routing and constants."""
    places = {a: b, b: a}
    return tuple(places.get(step, step) if isinstance(step, int) else step for step in order)


def check_rule(decoder: Decoder, kind: Literal["skip", "swap"], rule: str) -> None:
    """Refuse a rule of skipping or swapping that the decoder's strategy does not know.

    Raises:
        ValueError: lists those that it knows.
    """
    own = decoder.strategy.skip_rules if kind == "skip" else decoder.strategy.swap_rules
    known = (*(("pass", "silent") if kind == "skip" else ("whole",)), *own)
    if rule not in known:
        name = type(decoder.strategy).__name__
        raise ValueError(f"{name} has no {kind} rule {rule!r}; known: {', '.join(known)}")


def prefixes(*orders: Order) -> int:
    """Number of distinct non-empty beginnings of these orders: what walking them as routes costs, in steps."""
    count, before = 0, cast(Order, ())
    for order in sorted(set(orders), key=lambda order: [str(step) for step in order]):
        shared = next((n for n, (a, b) in enumerate(zip(before, order, strict=False)) if a != b), None)
        count += len(order) - (min(len(before), len(order)) if shared is None else shared)
        before = order
    return count


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
    with ExitStack() as stack:
        for i in blocks:
            stack.enter_context(decoder.blocks[i].silenced())
        yield


@contextmanager
def headless(decoder: Decoder) -> Iterator[None]:
    """Leave out the logits, for those who look at states only: `decoder(...)` returns an empty tensor."""
    before, decoder.headless = decoder.headless, True
    try:
        yield
    finally:
        decoder.headless = before


@contextmanager
def abreast(decoder: Decoder, n: int) -> Iterator[None]:
    """Let up to n states of different routes go through a block as one batch."""
    before, decoder.abreast = decoder.abreast, n
    try:
        yield
    finally:
        decoder.abreast = before


@contextmanager
def swapping(decoder: Decoder, rule: str) -> Iterator[None]:
    """Let blocks trade places by a named rule of the strategy, while routes are walked that begin with the intact one.

    Attributes and parameters that do not move with their block are exchanged in the connections for the length of
    their forward. They are copied as the intact route passes, when sharded weights are whole. Routes are walked one by
    one, not `abreast`.
    """
    if rule == "whole":
        yield
        return
    handed_on, stays = decoder.strategy.swap_rules[rule]
    places: dict[Reader, tuple[int, int]] = {decoder.exit: (len(decoder.blocks), 0)}  # block, which of its connections
    for i, block in enumerate(decoder.blocks):
        places |= {block.join_attn: (i, 0), block.join_mlp: (i, 1)}
    intact: dict[tuple[int, int], dict[str, Any]] = {}
    kept: dict[Reader, dict[str, Any]] = {}

    def before(reader: Reader, call: tuple[State]) -> None:
        own, (path,) = places[reader], decoder.paths
        if all(step == i for i, step in enumerate(path)) and own[0] == len(path):
            names = [name for name in {*handed_on, *stays} if hasattr(reader, name)]
            intact[own] = {
                name: value.detach().clone() if isinstance(value := getattr(reader, name), Tensor) else value
                for name in names
            }
            return
        other: dict[str, Any] = {}
        if own[1] == 0 and path:
            other |= {name: intact[cast(int, path[-1]) + 1, 0].get(name) for name in handed_on}
        if own[0] < len(decoder.blocks):
            other |= {name: intact[len(path), own[1]].get(name) for name in stays}
        kept[reader] = {name: getattr(reader, name) for name in other if hasattr(reader, name)}
        for name in kept[reader]:
            value = other[name]
            setattr(reader, name, nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value)

    def after(reader: Reader, call: tuple[State], output: State) -> None:
        for name, value in kept.pop(reader, {}).items():
            setattr(reader, name, value)

    with ExitStack() as hooks:
        for reader in places:
            hooks.callback(reader.register_forward_pre_hook(before).remove)
            hooks.callback(reader.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def tapped(decoder: Decoder, see: Callable[[Reader, State], None], sublayers: bool = False) -> Iterator[None]:
    """Call see(reader, state) when a state reaches a block's first connection, and when it reaches the exit.

    The call happens inside the block's own forward, where sharded weights are whole; the reader may be asked for its
    lens, probe, flow or telemetry there. While routes are walked, `decoder.path` tells which steps the state took.

    Args:
        decoder: the network to look into.
        see: the looking function.
        sublayers: look at a block's second connection too.
    """
    readers: list[Reader] = [decoder.exit]
    for block in decoder.blocks:
        readers += [block.join_attn, block.join_mlp] if sublayers else [block.join_attn]

    def look(reader: Reader, call: tuple[State]) -> None:
        for path, state in zip(decoder.paths, decoder.apart(call[0]), strict=True):
            decoder.path = path
            see(reader, state)

    handles = [reader.register_forward_pre_hook(look) for reader in readers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
