"""Which slot holds which sublayer: branches write unit vectors, so that a slot's channels are its list of contents.

    python tests/test_symbolic.py "BlockAttnRes(block_size=3)"      print the ledger of a strategy

The embedding is unit vector 0, sublayer k (from 0) writes unit vector k + 1; what a slot then holds in channel j is
the factor with which j went in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import CLASSES, TINY, build, known, label, seats, tokens_for
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.interventions import tapped
from depthlit.shape import ShapeSpec

SHAPE = ShapeSpec(n_layer=5, d_model=36, n_head=2, vocab_size=7)
M = SHAPE.n_sublayer
Slots = list[list[float]]


def unit(index: int) -> Tensor:
    x = torch.zeros(1, 1, SHAPE.d_model, dtype=torch.float64)
    x[..., index] = 1
    return x


def slots(state: Any) -> Slots:
    """The contents of each slot: factors of the embedding and of sublayers 0 ... 2 L - 1."""
    leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.shape[-1] == SHAPE.d_model]
    return [row[: M + 1].tolist() for leaf in leaves for row in leaf.detach().reshape(-1, SHAPE.d_model)]


def states(strategy: ResidualStrategy, change: Callable[[Decoder], None] | None = None) -> Iterator[Slots]:
    """The slots at entry, then behind each sublayer."""
    decoder = build(strategy, SHAPE)
    if change is not None:
        change(decoder)
    state = decoder.entry(unit(0))
    yield slots(state)
    for seat in seats(decoder):
        state = seat.join(state, lambda x, k=seat.sublayer: unit(k + 1).expand_as(x))
        yield slots(state)


def spelled(slot: list[float]) -> str:
    """[e +0 -1 +0.5*2]: the embedding, sublayer 0, minus sublayer 1, half of sublayer 2."""
    words = []
    for index, factor in enumerate(slot):
        if abs(factor) > 1e-6:
            name = "e" if index == 0 else f"{index - 1}"
            size = "" if abs(abs(factor) - 1) < 1e-6 else f"{abs(factor):.3g}*"
            words.append(("-" if factor < 0 else "+") + size + name)
    return "[" + " ".join(words).removeprefix("+") + "]"


def ledger(strategy: ResidualStrategy) -> str:
    rows = [" ".join(spelled(slot) for slot in content) for content in states(strategy)]
    return "\n".join(f"  behind {'entry' if k == 0 else k - 1:>5}: {row}" for k, row in enumerate(rows))


HAS_PATHS = {
    "PreLN", "LNS", "ReZero", "MoDA", "HC", "MHC", "FullAttnRes", "BlockAttnRes", "WAV", "HAARES", "DeltaAttnRes",
}  # fmt: skip
"""Streams without a norm or a gain per channel on them: whatever is read is a weighted sum of what was written."""


@pytest.mark.parametrize("strategy", known(), ids=label)
def test_who_has_paths(strategy: ResidualStrategy) -> None:
    flows = []
    decoder = build(strategy, TINY, random=True)
    with tapped(decoder, lambda reader, state: flows.append(reader.flow(state)), sublayers=True):
        decoder(tokens_for(TINY))
    del flows[-1]  # the exit may read scalars even where there are no paths
    if type(strategy) in CLASSES and type(strategy).__module__.startswith("depthlit."):
        assert all(flow is not None for flow in flows) == (type(strategy).__name__ in HAS_PATHS)


@pytest.mark.parametrize(
    "strategy", [s for s in known() if type(s).__name__ in HAS_PATHS - {"MoDA", "ReZero"}], ids=label
)
def test_what_was_written_is_held_and_nothing_else(strategy: ResidualStrategy) -> None:
    print(f"{label(strategy)}\n{ledger(strategy)}")
    for k, content in enumerate(states(strategy)):
        held = torch.tensor(content).abs().amax(0)
        assert (held[: k + 1] > 0.1).all() and (held[k + 1 :] == 0).all()


def test_pre_ln_holds_the_sum() -> None:
    for k, content in enumerate(states(residuals.PreLN())):
        assert content == [[1.0] * (k + 1) + [0.0] * (M - k)]


# ------------------------------------------------------------------------------------------------ streams


def shifting(decoder: Decoder) -> None:
    """Sublayer k writes to stream k mod 4 only, and hands each stream s on to stream s + 1 mod 4."""
    for seat in seats(decoder):
        shift, target = (
            torch.eye(4, dtype=torch.float64).roll(1, 0),
            torch.eye(4, dtype=torch.float64)[seat.sublayer % 4],
        )
        with torch.no_grad():
            if hasattr(seat.join, "carry"):
                seat.join.carry.copy_(shift)  # type: ignore[union-attr, operator]
                seat.join.write.copy_(target)  # type: ignore[union-attr, operator]
            else:  # logits: 2 sigmoid(0) is one, and Sinkhorn leaves a permutation
                seat.join.bias[4:8] = 80 * target - 80  # type: ignore[union-attr, operator, index]
                seat.join.bias[8:] = 80 * shift.flatten()  # type: ignore[union-attr, operator, index]


@pytest.mark.parametrize("name", ["HC", "MHC"])
def test_streams_are_carried_from_the_last_index_to_the_one_before(name: str) -> None:
    """A transposed mixing matrix is still doubly stochastic and trains well; here it puts things into other streams."""
    last = list(states(getattr(residuals, name)(), shifting))[-1]
    for k in range(M):
        where = (k % 4 + (M - 1 - k)) % 4
        for stream in range(4):
            assert abs(last[stream][k + 1] - (stream == where)) < 1e-6
    print("\n".join(spelled(slot) for slot in last))


@pytest.mark.parametrize("name", ["HC", "MHC"])
def test_sublayers_read_the_streams_in_turn(name: str) -> None:
    decoder, read = build(getattr(residuals, name)(), SHAPE), []
    with tapped(decoder, lambda reader, state: read.append(reader.flow(state)), sublayers=True):
        decoder(tokens_for(SHAPE))
    for k, flow in enumerate(read[:-1]):
        assert flow is not None and int(flow.read.reshape(-1, 4)[0].argmax()) == k % 4


# ------------------------------------------------------------------------------------------------ sources


if __name__ == "__main__":
    for text in sys.argv[1:] or [cls.__name__ for cls in CLASSES if cls.__name__ in HAS_PATHS - {"MoDA"}]:
        strategy = eval(text if "(" in text else text + "()", vars(residuals))
        print(f"{label(strategy)}\n{ledger(strategy)}\n")
