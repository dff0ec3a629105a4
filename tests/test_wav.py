"""WAV and HAARES: what is special about details. Slots and signs: test_attnres.py; the equations: test_equations.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import TINY, build, label, seats, tokens_for
from torch import Tensor

from depthlit.decoder import Decoder
from depthlit.interventions import tapped
from depthlit.residuals import HAARES, WAV, BlockAttnRes
from depthlit.residuals.groups import groups_of
from depthlit.shape import ShapeSpec


def states(decoder: Decoder) -> list[tuple[Any, Any]]:
    """(reader, state) at every sublayer and the exit."""
    found: list[tuple[Any, Any]] = []
    with torch.no_grad(), tapped(decoder, lambda reader, state: found.append((reader, state)), sublayers=True):
        decoder(tokens_for(TINY))
    return found


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def test_the_first_output_counts_more_than_once() -> None:
    """At first the embedding and the sum weigh 1 each, both details e^-2; sum and details are one tensor."""
    reader, state = states(build(WAV(block_size=4)))[1]
    read = reader.flow(state).read.mean((0, 1))
    detail, match = math.exp(-2), float(state.run.details[0].match.mean())
    wanted = torch.tensor([1, 1, detail * match, detail * match], dtype=read.dtype) / (2 + 2 * detail)
    torch.testing.assert_close(read, wanted, rtol=1e-6, atol=0)
    assert 0.99 < match < 1, "the match of a sum with itself falls short of one by eps / RMS"
    assert all(d.plus is state.run.total for d in state.run.details)


@pytest.mark.parametrize("most", [4.0, 1.2])
def test_details_are_as_loud_as_the_sum(most: float) -> None:
    decoder = build(WAV(block_size=4, max_match=most), random=True)
    with torch.no_grad():
        for k, seat in enumerate(seats(decoder)):
            seat.branch.out.weight.mul_(1 + 2 * (k % 3))  # type: ignore[union-attr, operator]
    clipped = 0
    for reader, state in states(decoder)[:-1]:
        for group in state.groups[1:]:
            for detail in group.details:
                d = (0 if detail.plus is None else 2 * detail.plus) - group.total
                wanted = (rms(group.total) / (rms(d) + 1e-6)).clamp(1 / most, most)
                torch.testing.assert_close(detail.match, wanted, rtol=1e-12, atol=0)
                clipped += int(((wanted == most) | (wanted == 1 / most)).sum())
                score = detail.scale * (d * reader.d_model**-0.5).sum(-1)
                key = wanted[..., None] * d
                key = key / (key.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                torch.testing.assert_close(score, key.sum(-1) * reader.d_model**-0.5, rtol=1e-10, atol=1e-12)
    assert (clipped > 0) == (most < 4)


def test_the_factor_carries_no_gradient() -> None:
    decoder, tokens = build(WAV(block_size=4), random=True), tokens_for(TINY)
    met: list[Tensor] = []
    with tapped(decoder, lambda reader, state: met.extend(d.match for g in state.groups for d in g.details)):
        decoder(tokens)
    assert met and not any(m.requires_grad for m in met)


@pytest.mark.parametrize("m, early", [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_halves_of_a_group_count_its_own_length(m: int, early: int) -> None:
    """r_i = +1 for i <= m / 2: of an odd number the smaller half, of a short last group its own half."""
    groups = groups_of(12 + m, None, 6, "extra")
    assert groups.lengths == ((6, 6, m) if m < 6 else (6, 6, 6))
    assert [groups.signs(12 + i, ["split"])[0] for i in range(m)] == [True] * early + [False] * (m - early)


def test_controls() -> None:
    groups = groups_of(200, None, 100, "error")
    assert all(groups.signs(k, ["duplicate"])[0] for k in range(200))
    signs = [groups.signs(k, ["random"])[0] for k in range(200)]
    assert 70 < sum(signs) < 130 and signs == [groups.signs(k, ["random"])[0] for k in range(200)]
    decoder = build(WAV(details=("duplicate", "random"), block_size=4, learn_bias=False, detail_bias=-0.7), random=True)
    assert not [name for name, _ in decoder.named_parameters() if name.endswith("bias")]
    for reader, state in states(decoder)[1:-1]:
        p, reading = reader.shares(state)
        totals = {
            slot: j for j, (slot, kind) in enumerate(zip(reading.slots, reading.kinds, strict=True)) if kind is None
        }
        for j, (slot, kind) in enumerate(zip(reading.slots, reading.kinds, strict=True)):
            if kind == 0:  # the same scores as the sum's, but for the bias and the match
                ratio = p[..., j] / p[..., totals[slot - 1]]
                torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(-0.7)), rtol=0.05, atol=0)


@pytest.mark.parametrize("strategy", [WAV(), HAARES()], ids=label)
def test_the_exit_reads_the_embedding_and_the_sums(strategy: Any) -> None:
    details = len(strategy.mixing().bases)
    reader, state = states(build(strategy, random=True))[-1]
    read = reader.flow(state).read
    sums = [0, *range(1, read.shape[-1], 1 + details)]
    others = [slot for slot in range(read.shape[-1]) if slot not in sums]
    assert (read[..., sums] > 0).all() and not read[..., others].any()
    torch.testing.assert_close(read.sum(-1), torch.ones_like(read[..., 0]))
    assert reader.bias is None


def test_masked_duplicates() -> None:
    """In groups of 4, the split of an open group is its sum once more before sublayers 1 and 2, the phase before 1."""
    decoder = build(WAV(block_size=4, mask_duplicates=True), random=True)
    read = [
        (reader.flow(state).read != 0).flatten(0, -2).any(0)[-3:].tolist() for reader, state in states(decoder)[1:-1]
    ]
    read.insert(0, [False] * 3)
    inside = [[True, False, False], [True, True, False], [True, True, True]]
    assert read[1:4] == inside and read[5:8] == inside
    assert read[4] == [True] * 3, "at a border the newest group is complete, and nothing is hidden"
    biases = [0 if seat.join.bias is None else len(seat.join.bias) for seat in seats(decoder)]  # type: ignore[arg-type]
    assert biases == [0, 0, 1, 2, 2, 2, 2, 2], "no bias without a detail to read"


def test_biases_belong_to_reader_and_detail() -> None:
    """Raising a reader's bias of the phase raises the share of each phase it reads, by one factor, and no other."""
    decoder = build(WAV(block_size=4), random=True)
    reader, state = states(decoder)[6]
    before, reading = reader.shares(state)
    with torch.no_grad():
        reader.bias[0] += 0.5
    after, _ = reader.shares(state)
    ratio = (after / before).detach()
    phases = torch.tensor([kind == 0 for kind in reading.kinds])
    assert int(phases.sum()) == 2
    one = ratio[..., ~phases][..., :1]
    torch.testing.assert_close(ratio[..., ~phases], one.expand_as(ratio[..., ~phases]))
    torch.testing.assert_close(ratio[..., phases], (one * math.exp(0.5)).expand_as(ratio[..., phases]))


def test_both_details_of_a_pair_are_the_same() -> None:
    """In groups of one layer attention is the early half: phase and split are one tensor, computed and kept once."""
    for _, state in states(build(WAV(block_size=2), random=True))[:-1]:
        for group in state.groups[1:]:
            assert group.details[0].plus is group.details[1].plus


def test_groups_may_begin_with_a_feed_forward() -> None:
    """With an odd length the second group's phase starts at minus its sum."""
    shape = ShapeSpec(n_layer=3, d_model=24, n_head=2, vocab_size=61)
    _, state = states(build(WAV(block_size=3), shape, random=True))[4]
    assert state.run.details[0].plus is None and state.run.details[1].plus is state.run.total


def test_a_detail_of_zero_is_harmless() -> None:
    """Two equal outputs: the detail vanishes, its match is at the cap, its score the bias, every gradient finite."""
    decoder = build(WAV(block_size=2), random=True)
    state = decoder.entry(decoder.embed(tokens_for(TINY)))
    y = torch.randn(2, 9, TINY.d_model, dtype=torch.float64, requires_grad=True)
    for seat in list(seats(decoder))[:2]:
        state = seat.join(state, lambda x: y + 0 * x)
    assert (state.run.details[0].match == 4).all()
    z = decoder.blocks[1].join_attn.read(state)
    z.square().sum().backward()
    assert z.isfinite().all() and y.grad is not None and y.grad.isfinite().all()


def test_more_sources_same_backbone() -> None:
    """Four biases per layer are all that WAV has more than Block AttnRes, but for the first sublayer's two."""
    counts = [sum(p.numel() for p in Decoder(TINY, s).parameters()) for s in (WAV(), BlockAttnRes())]
    assert counts[0] - counts[1] == 4 * TINY.n_layer - 2
