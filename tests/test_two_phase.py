"""What is done, scored once for all later readers and mixed once for several, against readers that ask alone."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from models import TINY, tokens_for
from torch import Tensor

from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.engines import FSDP2, shards_weights
from depthlit.interventions import abreast, rerouted, swapped, swapping, without
from depthlit.mixers import depth
from depthlit.residuals import HAARES, WAV, BlockAttnRes, DeltaAttnRes, FullAttnRes, bank, sources
from depthlit.shape import ShapeSpec

STRATEGIES = [
    FullAttnRes(),
    FullAttnRes(key_gain=False),
    BlockAttnRes(num_blocks=3),
    BlockAttnRes(block_size=1),
    DeltaAttnRes(gate="sigmoid", null_source=True),
    DeltaAttnRes(deltas="block", num_blocks=3),
    WAV(num_blocks=3),
    WAV(block_size=4, mask_duplicates=True, details=("split", "random")),
    HAARES(num_blocks=2),
]


DEEP = replace(TINY, n_layer=15, d_model=16, d_ff=24)
"""Thirty readers: two and a half windows of the usual length."""


def pair(
    strategy: ResidualStrategy, dtype: torch.dtype = torch.float64, shape: ShapeSpec = TINY
) -> tuple[Decoder, Decoder]:
    """One with a bank and one without, of the same random weights."""
    together, alone = (Decoder(shape, strategy, seed=0, join=join).to(dtype) for join in (True, False))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in together.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=dtype)
    alone.load_state_dict(together.state_dict())
    return together, alone


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return found


@pytest.fixture(params=[1, 3, 8])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Readers of the toy, all of which are in windows of these lengths; 8 is longer than the network."""
    monkeypatch.setattr(bank, "WINDOW", request.param)
    monkeypatch.setattr(bank, "WORTHWHILE", 1)
    return request.param


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.usefixtures("window")
def test_losses_and_gradients_are_those_of_readers_that_ask_alone(strategy: ResidualStrategy) -> None:
    agree(*pair(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_so_they_are_in_a_deep_network(strategy: ResidualStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "WINDOW", 12)
    agree(*pair(strategy, shape=DEEP))


def agree(together: Decoder, alone: Decoder) -> None:
    tokens = tokens_for(together.shape)
    losses = [decoder(tokens, tokens.roll(-1, 1)) for decoder in (together, alone)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=1e-11)
    weights = torch.randn_like(losses[0])
    for loss in losses:
        (loss * weights).sum().backward()
    first, second = gradients(together), gradients(alone)
    assert first.keys() == second.keys() == dict(together.named_parameters()).keys()
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


def test_how_often_what_is_done_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "WINDOW", 3)
    scored: list[int] = []
    mixed: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []
    scores, mix_ahead, mix, dots = bank.scores, bank.mix_ahead, sources.mix, depth._dots
    monkeypatch.setattr(bank, "scores", lambda keys, value: scored.append(len(keys)) or scores(keys, value))

    def ahead(many: Any, rows: Any, bias: Any) -> Any:
        found = mix_ahead(many, rows, bias)
        mixed.append((len(many), len(found)))
        return found

    monkeypatch.setattr(bank, "mix_ahead", ahead)
    monkeypatch.setattr(sources, "mix", lambda many, *rest: own.append((len(many), 0)) or mix(many, *rest))

    def asked(values: Any, other: Any) -> Any:
        own.append((own.pop()[0], len(values)))
        return dots(values, other)

    monkeypatch.setattr(depth, "_dots", asked)
    together, alone = pair(FullAttnRes())
    tokens, n = tokens_for(TINY), TINY.n_sublayer
    together(tokens, tokens)
    # readers: sublayers 1 to n - 1 and the exit. The embedding serves them all, each output all but the first two
    assert n == 8 and scored == [n, *range(n - 1, 0, -1)]
    # three readers each: the first window has one tensor that is done, which does not pay, the next ones 4 and 7
    assert mixed == [(4, 3), (7, 2)]
    # of the sources that each mixes itself, one has no dot product yet, the newest
    assert own == [(count, 1) for count in (2, 3, 4, 1, 2, 3, 1, 2)]
    own.clear()
    alone(tokens, tokens)
    assert own == [(count, count) for count in range(2, n + 2)] and len(scored) == n and len(mixed) == 2


def test_who_only_looks_or_recomputes_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    banks: list[Any] = []
    monkeypatch.setattr(sources, "Bank", lambda readers: banks.append(readers) or bank.Bank(readers))
    together, _ = pair(WAV(num_blocks=3))
    tokens = tokens_for(TINY)
    with torch.no_grad():
        together(tokens)
    together.blocks[1].recompute = True
    together(tokens)
    assert not banks
    together.blocks[1].recompute = False
    together(tokens)
    assert len(banks) == 1


@pytest.mark.parametrize("strategy", [FullAttnRes(), WAV(num_blocks=3)], ids=str)
@pytest.mark.usefixtures("window")
def test_other_orders_have_gradients_too(strategy: ResidualStrategy) -> None:
    """Readers that come earlier than a tensor was scored for ask themselves; joined batches share the keys."""
    together, alone = pair(strategy)
    tokens, order = tokens_for(TINY), together.order
    routes = [order, swapped(order, 1, 2), (*order[:1], *order[:0:-1]), order[1:], (*order, *order[1:])]
    for decoder in (together, alone):
        with abreast(decoder, 3):
            torch.stack([loss.mean() for loss in decoder(tokens, tokens, routes=routes)]).sum().backward()
    torch.testing.assert_close(gradients(together), gradients(alone), rtol=1e-9, atol=1e-10)


def test_bf16_streams_are_scored_in_fp32() -> None:
    together, alone = pair(BlockAttnRes(num_blocks=3), torch.bfloat16)
    tokens = tokens_for(TINY)
    kept: list[Any] = []
    together.blocks[0].register_forward_pre_hook(lambda block, call: kept.append(call[0].done[0].scored[0]))
    with torch.autocast("cpu", torch.bfloat16):
        first, second = together(tokens, tokens), alone(tokens, tokens)
    assert {row.dtype for row in (*kept[0].now, *kept[0].later)} == {torch.float32}
    torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)


def test_a_block_that_took_another_s_place_is_asked_itself() -> None:
    together, alone = pair(FullAttnRes())
    for decoder in (together, alone):
        torch.manual_seed(3)
        decoder.blocks[2] = copy.deepcopy(decoder.blocks[1])  # type: ignore[index]
    agree(together, alone)
    agree(copy.deepcopy(together), copy.deepcopy(alone))


@pytest.mark.parametrize("strategy", [FullAttnRes(), WAV(num_blocks=3)], ids=str)
def test_who_is_not_asked_has_no_gradient(strategy: ResidualStrategy) -> None:
    """Nor momentum that goes on without it."""
    together, _ = pair(strategy)
    tokens = tokens_for(TINY)
    with rerouted(together, without(together.order, 2)):
        together(tokens, tokens).sum().backward()
    assert all(p.grad is None for p in together.blocks[2].parameters())
    assert all(p.grad is not None for p in together.blocks[3].parameters())


def test_swapped_queries_are_used_with_gradients_too() -> None:
    together, _ = pair(FullAttnRes())
    tokens, order = tokens_for(TINY), together.order
    losses = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), swapping(together, "depthbench"):
            losses.append(torch.stack(together(tokens, tokens, routes=[order, swapped(order, 1, 2)])))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(losses[0][0], losses[0][1])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_an_empty_batch_and_one_without_storage(strategy: ResidualStrategy) -> None:
    together, _ = pair(strategy)
    empty = tokens_for(TINY)[:0]
    together(empty, empty).sum().backward()
    assert all(not p.grad.any() for p in together.parameters() if p.grad is not None)
    assert together.to("meta")(tokens_for(TINY).to("meta")).shape == (*tokens_for(TINY).shape, TINY.vocab_size)


def test_mixtures_ahead_are_not_kept() -> None:
    together, _ = pair(DeltaAttnRes(), shape=DEEP)
    tokens, made = tokens_for(DEEP), list[weakref.ref[Tensor]]()
    real = bank.mix_ahead

    def watched(*call: Any) -> Any:
        found = real(*call)
        made.extend(weakref.ref(z) for z, _ in found)
        return found

    with patch.object(bank, "mix_ahead", watched):
        loss = together(tokens, tokens).sum()
    assert len(made) > 20 and all(z() is None for z in made) and loss.requires_grad


def test_engines_that_shard_weights_do_without() -> None:
    third, second = (Mock(spec=DeepSpeedStrategy, zero_stage_3=stage) for stage in (True, False))
    assert all(map(shards_weights, (FSDP2(), Mock(spec=FSDPStrategy), third)))
    assert not any(map(shards_weights, (None, Mock(spec=DDPStrategy), Mock(spec=SingleDeviceStrategy), second)))
    assert not Decoder(TINY, FullAttnRes(), seed=0, join=False).in_turn
