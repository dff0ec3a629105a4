"""Attention over depth: its schedule, its slots, how it starts and is looked at, what it keeps and costs.

The mixture itself: test_depth_mixing.py; networks against their equations: test_equations.py; ties: test_ties.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import TINY, build, known, label, seats, tokens_for
from test_groups import SCHEDULES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlit.connection import Flow, ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.interventions import rerouted, tapped, without
from depthlit.residuals import HAARES, WAV, BlockAttnRes, DeltaAttnRes, FullAttnRes, PreLN
from depthlit.residuals.groups import groups_of
from depthlit.shape import ShapeSpec

OVER_DEPTH = (FullAttnRes, BlockAttnRes, WAV, HAARES, DeltaAttnRes)
every = pytest.mark.parametrize("strategy", [s for s in known() if isinstance(s, OVER_DEPTH)], ids=label)


# ------------------------------------------------------------------------------------------------ slots and flows


def walk(strategy: ResidualStrategy, shape: ShapeSpec, see: Callable[[int, Any, Any], None]) -> Any:
    """see(k, reader, state) at every sublayer and, as k = 2 L, at the exit. Branches write unit vectors: the embedding
    is unit vector 0, sublayer k writes k + 1."""

    def unit(index: int) -> Tensor:
        x = torch.zeros(1, 1, shape.d_model, dtype=torch.float64)
        x[..., index] = 1
        return x

    decoder = build(strategy, shape, random=True)
    state = decoder.entry(unit(0))
    for seat in seats(decoder):
        see(seat.sublayer, seat.join, state)
        state = seat.join(state, lambda x, k=seat.sublayer: unit(k + 1).expand_as(x))
    see(shape.n_sublayer, decoder.exit, state)
    return decoder


def expected_slots(lengths: tuple[int, ...], k: int, details: tuple[str, ...], width: int) -> list[list[float]]:
    """What the slots hold before sublayer k, told from the definition: {e} and (C, D, ...) of every group begun."""

    def holding(content: dict[int, float]) -> list[float]:
        return [content.get(i, 0.0) for i in range(width)]

    slots, start = [holding({0: 1.0})], 0
    for m in lengths:
        members = [i for i in range(start, start + m) if i < k]
        if members:
            slots.append(holding({i + 1: 1.0 for i in members}))
            for detail in details:
                signs = {
                    "phase": lambda i, start=start, m=m: 1.0 if i % 2 == 0 else -1.0,
                    "split": lambda i, start=start, m=m: 1.0 if i - start + 1 <= m / 2 else -1.0,
                }[detail]
                slots.append(holding({i + 1: signs(i) for i in members}))
        start += m
    return slots


EVEN = {"num_blocks": 3, "remainder": "balanced"}
SLOTTED: list[tuple[ResidualStrategy, tuple[str, ...]]] = [
    (FullAttnRes(), ()),
    *((BlockAttnRes(**settings), ()) for _, settings, _ in SCHEDULES.values() if settings.get("remainder") != "error"),
    *((cls(**settings), details)
      for cls, details in ((WAV, ("phase", "split")), (HAARES, ("split",)))
      for settings in ({}, {"block_size": 3}, {"block_size": 4}, EVEN, {"num_blocks": 1})),
    (DeltaAttnRes(), ()),
    (DeltaAttnRes(deltas="block", block_size=3), ()),
]  # fmt: skip


@pytest.mark.parametrize("strategy, details", SLOTTED, ids=label)
@pytest.mark.parametrize("n_layer", [1, 4, 5])
def test_slots_hold_what_the_definition_says(strategy: Any, details: tuple[str, ...], n_layer: int) -> None:
    """Slots by flow algebra = the definition, and what is read is read . slots, at every sublayer and the exit."""
    shape = ShapeSpec(n_layer=n_layer, d_model=24, n_head=2, vocab_size=7)
    lengths = strategy.groups(shape).lengths
    slots = torch.zeros(0)

    def see(k: int, reader: Any, state: Any) -> None:
        nonlocal slots
        flow: Flow = reader.flow(state)
        if k == 0:
            slots = torch.zeros(flow.read.shape[-1], shape.d_model, dtype=torch.float64)
            slots[:, 0] = torch.tensor([1.0] + [0.0] * (1 + len(details)), dtype=torch.float64)
        wanted = torch.tensor(expected_slots(lengths, k, details, shape.d_model), dtype=torch.float64)
        empty = 1 + len(details) if k == 0 else 0  # the running slots are there before anything runs
        assert len(slots) == len(wanted) + empty == flow.read.shape[-1]
        assert torch.equal(slots[: len(wanted)], wanted) and not slots[len(wanted) :].any()
        none = k == 0 or isinstance(strategy, DeltaAttnRes)
        assert reader.running_slot(state) == (None if none else len(slots) - 1 - len(details))
        looked_at = reader.read(state) if hasattr(reader, "read") else reader.lens(state)
        torch.testing.assert_close(looked_at[0, 0], flow.read.expand(1, 1, -1)[0, 0] @ slots, rtol=1e-12, atol=1e-14)
        if k < shape.n_sublayer:
            assert flow.carry is not None and flow.write is not None
            written = torch.zeros(shape.d_model, dtype=torch.float64)
            written[k + 1] = 1
            starts = [sum(lengths[:g]) for g in range(len(lengths))]
            assert (len(flow.carry) > len(slots)) == (k > 0 and k in starts), "a border lies where a group begins"
            slots = flow.carry @ slots + flow.write[:, None] * written

    walk(strategy, shape, see)


@pytest.mark.parametrize("b", [1, 2, 3, 5, 8])
def test_number_of_sources(b: int) -> None:
    """Full: k + 1. Block: 1 + floor(k / b) + [k mod b != 0]. All of them are read: no weight is zero."""
    shape, counts = ShapeSpec(n_layer=5, d_model=24, n_head=2, vocab_size=7), []
    strategy = FullAttnRes() if b == 1 else BlockAttnRes(block_size=b)
    walk(strategy, shape, lambda k, reader, state: counts.append(int((reader.flow(state).read != 0).sum())))
    assert counts[:-1] == [1 + k // b + (k % b != 0) for k in range(10)]
    assert counts[-1] == 1 + -(-10 // b)


def test_one_block_is_the_sum_and_the_embedding_apart() -> None:
    read: list[Tensor] = []
    walk(BlockAttnRes(num_blocks=1), TINY, lambda k, reader, state: read.append(reader.flow(state).read))
    assert [r.shape[-1] for r in read] == [2] * 9


# ------------------------------------------------------------------------------------------------ start as Pre-LN


@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes()], ids=label)
def test_zero_queries_are_pre_ln_with_the_usual_eps(strategy: ResidualStrategy) -> None:
    """24 layers at the true initial weights, whose embedding has a mean square of 4e-4: what counts is the eps behind a
    mean of up to 49 sources. With 1e-5 there, as DepthBench has it, the network starts as another one."""
    shape = ShapeSpec(n_layer=24, d_model=32, n_head=2, vocab_size=61, norm_eps=1e-22)
    tokens = tokens_for(shape)

    @torch.no_grad()
    def off(other: ResidualStrategy) -> float:
        plain, logits = (build(each, shape)(tokens) for each in (PreLN(), other))
        return float((logits - plain).norm() / plain.norm())

    assert off(strategy) < 2e-6
    assert off(type(strategy)(norm_eps=1e-22)) < 1e-12  # type: ignore[call-arg]
    assert off(type(strategy)(preset="depthbench")) > 1e-2  # type: ignore[call-arg]


def test_queries_can_be_drawn() -> None:
    decoder = Decoder(TINY, FullAttnRes(query_std=0.02), seed=0)
    queries = torch.cat([p.detach() for name, p in decoder.named_parameters() if name.endswith("query")])
    assert len(queries) == 2 * TINY.n_layer * TINY.d_model and 0.017 < queries.std() < 0.021
    assert decoder.exit.query is not None and decoder.blocks[0].join_attn.query is None


@pytest.mark.parametrize("gain", [True, False])
def test_parameters(gain: bool) -> None:
    """4 d L more than Pre-LN, 2 d L without the keys' gain; WAV two biases per reader more, HAARES one."""

    def extra(strategy: ResidualStrategy) -> int:
        counts = [sum(p.numel() for p in Decoder(TINY, s).parameters()) for s in (strategy, PreLN())]
        return counts[0] - counts[1]

    per, sites = (2 if gain else 1) * TINY.d_model, TINY.n_sublayer
    assert extra(FullAttnRes(key_gain=gain)) == extra(BlockAttnRes(key_gain=gain)) == per * sites
    assert extra(WAV(key_gain=gain)) == per * sites + 2 * (sites - 1)
    assert extra(HAARES(key_gain=gain)) == per * sites + (sites - 1)
    assert extra(WAV(key_gain=gain, learn_bias=False)) == per * sites
    assert extra(DeltaAttnRes(key_gain=gain)) == per * (sites - 1)
    assert extra(DeltaAttnRes(key_gain=gain, gate="zero")) == (per + 1) * (sites - 1)


# ------------------------------------------------------------------------------------------------ looking


def looked(decoder: Decoder, see: Callable[[Any, Any], Any]) -> list[Any]:
    found: list[Any] = []
    with tapped(decoder, lambda reader, state: found.append(see(reader, state)), sublayers=True):
        decoder(tokens_for(TINY))
    return found


@pytest.mark.parametrize("preset", ["paper", "depthbench"])
def test_probe(preset: Any) -> None:
    """DepthBench looks at the mixture at borders, else at the running sum; the default looks at mixtures everywhere."""
    decoder = build(BlockAttnRes(preset=preset, block_size=3), random=True)

    def see(reader: Any, state: Any) -> tuple[Tensor, Tensor, Any]:
        return reader.probe(state), reader.read(state), state

    for k, (probe, mixture, state) in enumerate(looked(decoder, see)):
        within = preset == "depthbench" and k % 3 != 0 and k < TINY.n_sublayer
        assert torch.equal(probe, state.run.total if within else mixture)


@every
def test_telemetry_is_what_flow_tells(strategy: ResidualStrategy) -> None:
    decoder = build(strategy, random=True)

    def see(reader: Any, state: Any) -> None:
        figures = reader.telemetry(state)
        if getattr(reader, "query", None) is None:
            assert figures == {}
            return
        p, reading = reader.shares(state)
        assert float(p.detach().sum(-1).max()) <= 1 + 1e-12
        torch.testing.assert_close(figures["entropy"], -(p * p.log()).sum(-1).mean())
        torch.testing.assert_close(figures["embedding_share"], p[..., 0].mean())
        totals = [j for j, kind in enumerate(reading.kinds) if kind is None]
        torch.testing.assert_close(figures["running_share"], p[..., totals[-1]].mean())
        if reader.shown:
            torch.testing.assert_close(figures["detail_share"], 1 - p[..., totals].sum(-1).mean())
            assert torch.equal(figures[f"bias_{reader.mixing.bases[0]}"], reader.bias[0])
        if type(strategy) in (FullAttnRes, BlockAttnRes):
            read = reader.flow(state).read.mean((0, 1))
            torch.testing.assert_close(figures["running_share"], read[reader.running_slot(state)])

    looked(decoder, see)


@pytest.mark.parametrize(
    "strategy, skipped, at_border",
    [(FullAttnRes(), 1, True), (BlockAttnRes(block_size=4), 1, True), (BlockAttnRes(block_size=4), 2, False)],
    ids=label,
)
def test_the_rule_of_the_next_output(strategy: ResidualStrategy, skipped: int, at_border: bool) -> None:
    """A skipped block adds no source; if the next reader stands at a border it takes the newest source alone."""
    decoder, place = build(strategy, random=True), 2 * skipped  # of the reader behind the gap
    with rerouted(decoder, without(decoder.order, skipped, rule="next_output")):
        seen = looked(decoder, lambda reader, state: (state, reader.read(state), reader.flow(state)))
    with rerouted(decoder, without(decoder.order, skipped)):
        plain = looked(decoder, lambda reader, state: reader.read(state))
    state, read, flow = seen[place]
    if at_border:
        assert torch.equal(read, state.groups[-1].total)
        assert float(flow.read.sum()) == 1 and flow.read[-1] == 1
    else:
        assert torch.equal(read, plain[place])
    assert seen[place + 1][0].only is None, "it holds for one reader"
    assert torch.equal(seen[place - 1][1], plain[place - 1])


# ------------------------------------------------------------------------------------------------ ways to run


def losses(decoder: Decoder, run: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
    decoder.zero_grad()
    tokens = tokens_for(TINY)
    loss = run(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in decoder.parameters() if p.grad is not None]


@every
def test_checkpointing_changes_nothing(strategy: ResidualStrategy) -> None:
    decoder = build(strategy, random=True).float()
    loss, gradients = losses(decoder, decoder)
    for block in decoder.blocks:
        block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)  # type: ignore[method-assign]
    again, others = losses(decoder, decoder)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@every
@pytest.mark.slow
def test_compiled_in_one_graph(strategy: ResidualStrategy) -> None:
    torch._dynamo.reset()
    decoder = build(strategy, random=True)
    loss, gradients = losses(decoder, decoder)
    again, others = losses(decoder, torch.compile(decoder, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "strategy, limit",
    [(FullAttnRes(), 1.05), (BlockAttnRes(), 1.05), (WAV(), 1.10), (HAARES(), 1.05), (DeltaAttnRes(), 1.05)],
    ids=label,
)
def test_saved_activations(strategy: ResidualStrategy, limit: float) -> None:
    """Bytes that autograd keeps, against Pre-LN, at 24 layers of width 256: a figure without noise."""
    assert kept_bytes(strategy, 24) / kept_bytes(PreLN(), 24) <= limit


def test_saved_activations_grow_with_depth_as_those_of_pre_ln() -> None:
    """But for one number per token and source read: 2 L (2 L + 1) / 2 of them."""
    for strategy in (FullAttnRes(), WAV()):
        small, large = (kept_bytes(strategy, L) - 4 * 16 * L * (2 * L + 1) for L in (8, 32))
        assert large / small < 4.1


def kept_bytes(strategy: ResidualStrategy, n_layer: int) -> int:
    shape = ShapeSpec(n_layer=n_layer, d_model=256, n_head=4, vocab_size=64)
    decoder, held = Decoder(shape, strategy, seed=0), dict[int, int]()
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = tokens_for(shape, 1, 17)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        decoder(tokens[:, :-1], tokens[:, 1:]).mean()
    return sum(held.values())


# ------------------------------------------------------------------------------------------------ cost


def test_flops() -> None:
    """DepthBench, App. D: Full 4 d L (2 L + 3); Block 4 d [sum_k (2 + floor(k / b)) + 9], one source too many at
    each border."""
    shape = ShapeSpec(n_layer=24, d_model=64, n_head=2, vocab_size=7)

    def total(strategy: ResidualStrategy, counting: Any) -> float:
        decoder = Decoder(shape, strategy)
        return sum(seat.join.flops(counting) for seat in seats(decoder)) + decoder.exit.flops(counting)

    d, L, b = 64, 24, 6
    assert total(FullAttnRes(), "paper") == total(FullAttnRes(), "exact") == 4 * d * L * (2 * L + 3)
    paper = 4 * d * (sum(2 + k // b for k in range(1, 2 * L)) + 9)
    assert total(BlockAttnRes(), "paper") == paper
    assert total(BlockAttnRes(), "exact") == paper - 4 * d * 7
    assert total(DeltaAttnRes(), "exact") == 4 * d * sum(k + 1 for k in range(1, 2 * L))
    assert total(BlockAttnRes(), "exact") < total(HAARES(), "exact") < total(WAV(), "exact")


def test_details_of_one_sign_cost_nothing() -> None:
    """WAV in groups of 4: before each sublayer of a group the open one is held in 1, 2, 2 tensors, then in 3."""
    groups = groups_of(8, None, 4, "extra")
    assert [groups.tensors(k, ("phase", "split")) for k in range(9)] == [1, 2, 3, 4, 4, 5, 6, 7, 7]
    assert [groups.sources(k, 2) for k in range(9)] == [1, 4, 4, 4, 4, 7, 7, 7, 7]
