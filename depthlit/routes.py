"""Walking several orders in one forward: what they share is computed once, and what is alike goes together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from depthlit.connection import State
from depthlit.layers import Context

if TYPE_CHECKING:
    from depthlit.decoder import Decoder, Order, Step


class Node(NamedTuple):
    """A state that has been reached, and the routes that go on from it (or end at it)."""

    path: Order
    state: State
    routes: list[Order]


def walk(
    decoder: Decoder, state: State, context: Context, routes: Sequence[Order], targets: Tensor | None
) -> list[Tensor]:
    """What `read_out` gives at the end of each route. Every distinct beginning is computed once.

    States that reach the same block after equally many steps go through it as one batch, at most `decoder.abreast` of
    them; with 1 none do, and only the states of one path are alive at a time. What was asked for first comes first.
    """
    results: dict[Order, Tensor] = {}
    try:
        _walk(decoder, [Node((), state, list(dict.fromkeys(routes)))], context, targets, results)
    finally:
        decoder.at(())
    return [results[route] for route in routes]


def _walk(
    decoder: Decoder, nodes: list[Node], context: Context, targets: Tensor | None, results: dict[Order, Tensor]
) -> None:
    while nodes:
        branches: dict[Step, list[Node]] = {}
        for path, state, routes in nodes:
            onward: dict[Step, list[Order]] = {}
            for route in routes:
                if len(route) == len(path):
                    decoder.at(path)
                    results[route] = decoder.read_out(state, targets)
                else:
                    onward.setdefault(route[len(path)], []).append(route)
            for step, some in onward.items():
                branches.setdefault(step, []).append(Node(path, state, some))
        packs = list(_packs(branches, decoder.abreast))
        if len(packs) != 1:
            for pack in packs:
                _walk(decoder, _advance(decoder, pack, context), context, targets, results)
            return
        nodes = _advance(decoder, packs[0], context)


def _packs(branches: dict[Step, list[Node]], size: int) -> Iterator[list[tuple[Step, list[Node]]]]:
    """Steps to take, each with states that are built alike, such that at most `size` states come out of a pack."""
    pack: list[tuple[Step, list[Node]]] = []
    room = size
    for step, nodes in branches.items():
        alike: dict[object, list[Node]] = {}
        for node in nodes:
            alike.setdefault(_build(node.state) if size > 1 else id(node), []).append(node)
        for some in alike.values():
            while some:
                chunk, some = some[:room], some[room:]
                pack.append((step, chunk))
                room -= len(chunk)
                if not room:
                    yield pack
                    pack, room = [], size
    if pack:
        yield pack


def _advance(decoder: Decoder, pack: list[tuple[Step, list[Node]]], context: Context) -> list[Node]:
    """Take these steps; states that take the same one take it together."""
    reached = []
    for step, nodes in pack:
        n, wide = len(nodes), repeated(context, len(nodes))
        apart = partial(parted, n=n, wide=wide, context=context)
        decoder.at(*(node.path for node in nodes), apart=apart)
        after = decoder.take(step, joined([node.state for node in nodes], context, wide), wide)
        reached += [Node((*path, step), state, on) for (path, _, on), state in zip(nodes, apart(after), strict=True)]
    return reached


def _build(state: State) -> object:
    """How a state is built: its structure, its shapes, and which of its tensors are one and the same."""
    leaves, structure = tree_flatten(state)
    same: dict[int, int] = {}
    ids = tuple(same.setdefault(id(leaf), i) for i, leaf in enumerate(leaves))
    return str(structure), ids, tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def joined(states: Sequence[State], context: Context, wide: Context) -> State:
    """States that are built alike as one with a longer batch. Tensors that are one stay one; those of the context,
    which a state may hold too, become those of the wide context."""
    if len(states) == 1:
        return states[0]
    rows, structure = zip(*(tree_flatten(state) for state in states), strict=True)
    made: dict[int, Any] = {id(old): new for old, new in zip(context, wide, strict=True)}
    leaves = []
    for column in zip(*rows, strict=True):
        leaf = column[0]
        if id(leaf) not in made:
            made[id(leaf)] = torch.cat(column) if isinstance(leaf, Tensor) else leaf
        leaves.append(made[id(leaf)])
    return tree_unflatten(leaves, structure[0])


def parted(state: State, n: int, wide: Context, context: Context) -> list[State]:
    """The n states that were joined."""
    if n == 1:
        return whole(state)
    leaves, structure = tree_flatten(state)
    parts: dict[int, Sequence[Any]] = {id(new): [old] * n for old, new in zip(context, wide, strict=True)}
    for leaf in leaves:
        if id(leaf) not in parts:
            parts[id(leaf)] = leaf.chunk(n) if isinstance(leaf, Tensor) else [leaf] * n
    return [tree_unflatten([parts[id(leaf)][i] for leaf in leaves], structure) for i in range(n)]


def whole(state: State) -> list[State]:
    """A state that was not joined."""
    return [state]


def repeated(context: Context, n: int) -> Context:
    """The context of n batches that are one; what is the same for every row is left alone."""
    if n == 1 or context.mask is None:
        return context
    return Context(*(x.repeat(n, 1, 1, 1) for x in (context.cos, context.sin, context.mask)))
