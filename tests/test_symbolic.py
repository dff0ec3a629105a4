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


def holds(*sublayers: int) -> list[float]:
    """A slot that holds these sublayers; -1 is the embedding."""
    return [float(j - 1 in sublayers) for j in range(M + 1)]


E, GROUPS_OF_3 = -1, ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))
SCHEDULES: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "Full: one slot each": ("FullAttnRes", {}, tuple((k,) for k in range(10))),
    "Block, three at a time": ("BlockAttnRes", {"block_size": 3}, GROUPS_OF_3),
    "Block, four groups and what remains": (
        "BlockAttnRes", {"num_blocks": 4}, ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
    ),
    "Block, three groups and one more": ("BlockAttnRes", {"num_blocks": 3}, GROUPS_OF_3),
    "Block, four groups as equal as can be": (
        "BlockAttnRes", {"num_blocks": 4, "remainder": "balanced"}, ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9)),
    ),
    "Block, more groups than sublayers": ("BlockAttnRes", {"num_blocks": 99}, tuple((k,) for k in range(10))),
    "Block, one group": ("BlockAttnRes", {"num_blocks": 1}, (tuple(range(10)),)),
    "Delta: one slot each": ("DeltaAttnRes", {}, tuple((k,) for k in range(10))),
    "Delta of blocks, not of differences of blocks": (
        "DeltaAttnRes", {"deltas": "block", "block_size": 3}, GROUPS_OF_3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, settings, groups", SCHEDULES.values(), ids=SCHEDULES)
def test_which_source_holds_which_sublayer(
    name: str, settings: dict[str, Any], groups: tuple[tuple[int, ...], ...]
) -> None:
    """The embedding in a slot of its own; then every group's sum, from zero; the last is the group still open."""
    strategy = getattr(residuals, name)(**settings)
    print(f"{label(strategy)}\n{ledger(strategy)}")
    for k, content in enumerate(states(strategy)):
        begun = [[j for j in group if j < k] for group in groups]
        assert content == [holds(E)] + [holds(*group) for group in begun if group]


@pytest.mark.parametrize("name, settings, groups", SCHEDULES.values(), ids=SCHEDULES)
def test_zero_queries_read_the_mean_of_the_sources(
    name: str, settings: dict[str, Any], groups: tuple[tuple[int, ...], ...]
) -> None:
    """So each source is counted once: a group that is just full is not also the running one."""
    for k, x in enumerate(reads(getattr(residuals, name)(**settings))):
        sources = [holds(E)] + [holds(*(j for j in group if j < k)) for group in groups if group[0] < k]
        expected = torch.tensor(sources).mean(0)
        if name == "DeltaAttnRes":
            expected = torch.tensor(holds(*range(-1, k))) + (expected if k else 0)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, per_group", [("BlockAttnRes", 1), ("HAARES", 2), ("WAV", 3)])
def test_the_running_slot_is_the_newest_sum(name: str, per_group: int) -> None:
    """At a border that is the group just finished, as in DepthBench's figure of read weights."""
    decoder = build(getattr(residuals, name)(block_size=3), SHAPE)
    found = []
    with tapped(decoder, lambda reader, state: found.append(reader.running_slot(state)), sublayers=True):
        decoder(tokens_for(SHAPE))
    for k, slot in enumerate(found[:-1]):
        assert slot == (1 + per_group * ((k - 1) // 3) if k else None)


def reads(strategy: ResidualStrategy, change: Callable[[Decoder], None] | None = None) -> Iterator[Tensor]:
    """What each sublayer reads, before its norm, in factors of the embedding and the sublayers."""
    decoder = build(strategy, SHAPE)
    if change is not None:
        change(decoder)
    state = decoder.entry(unit(0))
    got: list[Tensor] = []
    for seat in seats(decoder):
        seat.join.norm.register_forward_pre_hook(lambda module, call: got.append(call[0]))  # type: ignore[union-attr, operator]
        state = seat.join(state, lambda x, k=seat.sublayer: unit(k + 1).expand_as(x))
        yield got[-1].detach()[0, 0, : M + 1].float()


DETAILS: dict[str, tuple[str, dict[str, Any], int, Callable[[int, int, int], int]]] = {
    "phase of WAV": ("WAV", {"block_size": 4}, 0, lambda k, i, m: 1 if k % 2 == 0 else -1),
    "split of WAV": ("WAV", {"block_size": 4}, 1, lambda k, i, m: 1 if i <= m / 2 else -1),
    "split of HAARES": ("HAARES", {"block_size": 4}, 0, lambda k, i, m: 1 if i <= m / 2 else -1),
    "phase of WAV, odd groups": ("WAV", {"block_size": 3}, 0, lambda k, i, m: 1 if k % 2 == 0 else -1),
    "split of HAARES, odd groups": ("HAARES", {"block_size": 3}, 0, lambda k, i, m: 1 if i <= m / 2 else -1),
}


@pytest.mark.parametrize("name, settings, index, sign", DETAILS.values(), ids=DETAILS)
def test_details_carry_the_signs_of_the_paper(
    name: str, settings: dict[str, Any], index: int, sign: Callable[[int, int, int], int]
) -> None:
    """A large bias leaves the softmax one kind of detail; each is read at the loudness of its group's sum, here equal.

    The true length of the last, short group is known before it is full: its split stands in its own middle.
    """

    def prefer(decoder: Decoder) -> None:
        for seat in seats(decoder):
            if seat.sublayer > 0:
                with torch.no_grad():
                    seat.join.bias[index] = 99  # type: ignore[union-attr, operator, index]

    size = settings["block_size"]
    for k, x in enumerate(reads(getattr(residuals, name)(**settings), prefer)):
        if k == 0:
            continue
        details = []
        for start in range(0, k, size):
            m = min(size, M - start)
            row = [0.0] * (M + 1)
            for i, j in enumerate(range(start, min(start + size, k)), 1):
                row[j + 1] = sign(j, i, m)
            details.append(row)
        print(f"sublayer {k} reads {spelled((x * len(details)).tolist())} / {len(details)}")
        torch.testing.assert_close(x, torch.tensor(details).mean(0), rtol=0, atol=1e-5)


if __name__ == "__main__":
    for text in sys.argv[1:] or [cls.__name__ for cls in CLASSES if cls.__name__ in HAS_PATHS - {"MoDA"}]:
        strategy = eval(text if "(" in text else text + "()", vars(residuals))
        print(f"{label(strategy)}\n{ledger(strategy)}\n")
