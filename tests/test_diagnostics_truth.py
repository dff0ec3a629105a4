"""Diagnostics where the answer is known beforehand, and path weights against what they stand for."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from models import build, known, label, seats, tokens_for
from torch import Tensor, nn

from callbacks import (
    AngularDistance,
    BlockReads,
    CausalScore,
    LayerPruning,
    LogitLens,
    PathWeights,
    PermutationScore,
    Propagation,
    RoutingTelemetry,
)
from callbacks.angular_distance import angle
from callbacks.propagation import effective_rank, overlap
from depthlit.connection import Flow, ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.diagnostic import Answer
from depthlit.residuals import HC, PreLN
from depthlit.shape import ShapeSpec
from depthlit.statistics import bootstrap, late_pairs, sweep

every = pytest.mark.parametrize("strategy", known(), ids=label)
SHAPE = ShapeSpec(n_layer=4, d_model=16, n_head=2, d_ff=24, vocab_size=23)
L, D = SHAPE.n_layer, SHAPE.d_model
TEXT = tokens_for(SHAPE, 4, 9)


# ------------------------------------------------------------------------------------------------ planted


@torch.no_grad()
def planted(updates: Tensor) -> Decoder:
    """A network whose embedding is e_0 everywhere; layer l adds the vector updates[l], whatever it reads."""
    decoder = build(PreLN(), ShapeSpec(len(updates), D, n_head=1, d_ff=D, vocab_size=5))
    decoder.embed.weight.zero_()
    decoder.embed.weight[:, 0] = 1
    for block, update in zip(decoder.blocks, updates, strict=True):
        block.attn.out.weight.zero_()
        block.join_mlp.forward = lambda h, branch, update=update: h + update  # type: ignore[method-assign, misc]
    return decoder


def test_identity_branches_turn_nothing() -> None:
    """Branches at zero: every angle is exactly 0, no layer depends on another, and none can be told from another."""
    decoder = build(PreLN(), SHAPE, random=True)
    with torch.no_grad():
        for seat in seats(decoder):
            seat.branch.out.weight.zero_()  # type: ignore[union-attr, operator]
    distance = AngularDistance().ask(decoder, TEXT).values["distance"]
    assert (distance[np.triu_indices(L + 1)] == 0).all()
    causal, swaps = CausalScore().ask(decoder, TEXT), PermutationScore().ask(decoder, TEXT)
    assert np.nanmax(causal.values["score"]) == 0 and causal.numbers["R_causal"] == 0
    assert np.nanmax(swaps.values["score"]) == 0 and swaps.numbers["R_perm"] == 0
    assert (LayerPruning().ask(decoder, TEXT).values["change"] == 0).all()
    lens = LogitLens().ask(decoder, TEXT).values
    assert (lens["kl"] == 0).all() and lens["agreement"] == pytest.approx(1)


def test_orthogonal_updates_have_known_angles() -> None:
    """z_l is the sum of l + 1 unit vectors, so that cos(z_i, z_j) = sqrt((i + 1) / (j + 1))."""
    decoder = planted(torch.eye(D, dtype=torch.float64)[1 : L + 1])
    distance = AngularDistance().ask(decoder, TEXT % 5).values["distance"]
    for i in range(L + 1):
        for j in range(i + 1, L + 1):
            assert distance[i, j] == pytest.approx(math.acos(math.sqrt((i + 1) / (j + 1))) / math.pi, abs=1e-12)
    causal = CausalScore().ask(decoder, TEXT % 5)
    assert np.nanmax(causal.values["score"]) < 1e-12, "constant updates depend on nobody"


def test_angles_of_equal_opposite_and_zero_vectors() -> None:
    draw = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-7), (torch.float64, 1e-15)):
        u = nn.functional.normalize(torch.randn(2000, 64, generator=draw, dtype=dtype), dim=-1)
        assert (angle(u, u) == 0).all()
        assert (angle(u, -u) == 1).all()
        assert (angle(u, torch.zeros_like(u)) - 0.5).abs().max() < 1e-6
        assert (angle(torch.zeros_like(u), torch.zeros_like(u)) == 0).all()
        turned = u.clone()
        a = 3e-5 * math.pi
        turned[:, 0], turned[:, 1] = (
            math.cos(a) * u[:, 0] - math.sin(a) * u[:, 1],
            math.sin(a) * u[:, 0] + math.cos(a) * u[:, 1],
        )
        plane = u[:, :2].norm(dim=-1)
        exact = 2 / math.pi * torch.asin(plane.double() * math.sin(a / 2))
        assert (angle(u, turned).double() - exact).abs().max() < tolerance


def test_an_inert_layer_stands_out() -> None:
    """A layer whose branches are zero moves nothing and nobody depends on it; leaving it out costs nothing."""
    decoder = build(PreLN(), SHAPE, random=True)
    with torch.no_grad():
        decoder.blocks[2].attn.out.weight.zero_()
        decoder.blocks[2].mlp.out.weight.zero_()
    score = CausalScore().ask(decoder, TEXT).values["score"]
    assert score[2, 3] < 1e-12 < score[1, 3] and score[0, 2] < 1e-12
    change = LayerPruning().ask(decoder, TEXT).values["change"]
    assert abs(change[2]) < 1e-12 and np.abs(np.delete(change, 2)).min() > 1e-4
    assert AngularDistance().ask(decoder, TEXT).values["distance"][2, 3] < 1e-12


def test_duplicated_layers_may_trade_places() -> None:
    decoder = build(PreLN(), SHAPE, random=True)
    decoder.blocks[3].load_state_dict(decoder.blocks[1].state_dict())
    score = PermutationScore().ask(decoder, TEXT).values["score"]
    assert score[1, 3] == 0
    assert np.nanmin(np.delete(score.ravel(), 1 * L + 3)) > 1e-4


def test_the_fraction_of_late_pairs() -> None:
    """Layers 1, 2, 3 of 4 are late: the pairs (1, 2), (1, 3) and (2, 3)."""
    score = np.arange(16.0).reshape(4, 4)
    assert late_pairs(score).tolist() == [6, 7, 11]
    assert sweep(late_pairs(score), np.array([0, 6, 7, 11])) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [len(late_pairs(np.zeros((n, n)))) for n in (1, 2, 5, 24, 32)] == [0, 0, 3, 153, 276]


# ------------------------------------------------------------------------------------------------ paths


@every
def test_paths_are_products_of_coefficients(strategy: ResidualStrategy) -> None:
    """Against a loop over sources: start a unit in one place and carry it on, one token at a time."""
    decoder = build(strategy, SHAPE, random=True)
    answer = PathWeights(batch_size=2).ask(decoder, TEXT)
    tokens, flows = TEXT[:, :-1], []
    handles = [
        reader.register_forward_pre_hook(lambda reader, call: flows.append(reader.flow(call[0])))  # type: ignore[misc]
        for reader in (*(seat.join for seat in seats(decoder)), decoder.exit)
    ]
    with torch.no_grad():
        decoder(tokens)
    for handle in handles:
        handle.remove()
    flows = [None if flow is None else Flow(*(None if x is None else x.detach() for x in flow)) for flow in flows]
    whole = flows.index(None) if None in flows else len(flows)
    if whole == 0:
        assert not answer.values and "no scalar paths" in answer.notes[0]
        return
    assert bool(answer.notes) == (whole < len(flows))

    def at(x: Tensor, dims: int, b: int, t: int) -> Tensor:
        return x if x.dim() == dims else x[b, t]

    for i in range(whole):  # the source: the embedding, or sublayer i - 1
        found: list[list[float]] = [[] for _ in range(whole)]
        for b, t in np.ndindex(*tokens.shape):
            path = decoder.entry.write(decoder.embed(tokens)).detach() if i == 0 else at(flows[i - 1].write, 1, b, t)
            for k in range(i, whole):
                found[k].append(float(at(flows[k].read, 1, b, t).double() @ path.double()))
                if flows[k].carry is not None:
                    path = at(flows[k].carry, 2, b, t) @ path
        for k in range(i, whole):
            assert answer.values["weight"][k, i] == pytest.approx(np.mean(found[k]), abs=1e-10)
            assert answer.values["spread"][k, i] == pytest.approx(np.std(found[k]), abs=1e-7)
        assert np.isnan(answer.values["weight"][:i, i]).all()
    assert np.isnan(answer.values["weight"][whole:]).all()


def test_a_plain_sum_has_paths_of_one() -> None:
    weight = PathWeights().ask(build(PreLN(), SHAPE, random=True), TEXT).values["weight"]
    assert weight.shape == (2 * L + 1, 2 * L + 1)
    assert (weight[np.tril_indices(2 * L + 1)] == 1).all() and np.isnan(weight[np.triu_indices(2 * L + 1, 1)]).all()


def hand_made(maps: list[Tensor]) -> Decoder:
    """Static streams with these residual maps (out, in), each read from stream 0 and written to stream 1."""
    M = len(maps[0])
    decoder = build(HC(streams=M, dynamic=False), ShapeSpec(len(maps) // 2, D, n_head=1, d_ff=D, vocab_size=23))
    with torch.no_grad():
        for seat, carry in zip(seats(decoder), maps, strict=True):
            seat.join.carry.copy_(carry)  # type: ignore[operator, union-attr]
            seat.join.read.copy_(torch.eye(M)[0])  # type: ignore[operator, union-attr]
            seat.join.write.copy_(torch.eye(M)[1])  # type: ignore[operator, union-attr]
    return decoder


def test_propagation_of_hand_made_maps() -> None:
    """Identity: rank 4; a projection on two streams: rank 2; averaging: rank 1; a rotation of two: still 4."""
    one, two, mean = torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0])), torch.full((4, 4), 0.25)
    turn = torch.eye(4)
    turn[:2, :2] = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    for maps, rank, alike in (
        ([one, one], 4, 0),
        ([one, two], 2, 0),
        ([mean, turn], 1, 1),
        ([turn, one], 4, 0),
        (
            [torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0])), one],
            math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)),
            0,
        ),
    ):
        answer = Propagation(batch_size=2).ask(hand_made(maps), TEXT)
        assert answer.numbers["final_erank"] == pytest.approx(rank, abs=1e-6)
        assert answer.numbers["final_erank_low"] == pytest.approx(rank, abs=1e-6), "the same for all tokens"
        assert answer.numbers["final_overlap"] == pytest.approx(alike, abs=1e-6)
        assert len(answer.values["erank"]) == 1 and len(answer.values["spectrum"]) == 4
    chain = Propagation().ask(hand_made([one, turn, mean, one, two, turn]), TEXT)
    assert chain.values["erank"] == pytest.approx([4, 1, 1], abs=1e-6)


def test_paths_of_hand_made_maps() -> None:
    """The order of the product matters: P = A_1 A_0, and stream 0 is read where stream 1 was written."""
    draw = torch.Generator().manual_seed(0)
    maps = [torch.randn(3, 3, generator=draw) for _ in range(4)]
    weight = PathWeights().ask(hand_made(maps), TEXT).values["weight"]
    assert weight[2, 1] == pytest.approx(float(maps[1][0, 1]), abs=1e-6)  # written by 0, carried by 1, read by 2
    assert weight[3, 1] == pytest.approx(float((maps[2] @ maps[1])[0, 1]), abs=1e-6)
    assert weight[3, 0] == pytest.approx(float((maps[2] @ maps[1] @ maps[0])[0].sum()), abs=1e-5)  # the embedding
    assert weight[4, 1] == pytest.approx(float((maps[3] @ maps[2] @ maps[1])[:, 1].sum()), abs=1e-5)  # the exit sums


def test_effective_rank() -> None:
    for sigma, rank in (([1, 1, 0, 0], 2), ([1, 1, 1, 1], 4), ([5, 0, 0, 0], 1), ([0, 0, 0, 0], 0)):
        assert float(effective_rank(torch.tensor(sigma, dtype=torch.float64))) == pytest.approx(rank, abs=1e-12)
    assert float(overlap(torch.eye(3).double())) == 0
    assert float(overlap(torch.tensor([[1.0, -2.0], [1.0, -2.0]]))) == pytest.approx(1)


@every
def test_propagation_against_numpy(strategy: ResidualStrategy) -> None:
    decoder = build(strategy, SHAPE, random=True)
    answer = Propagation(batch_size=2).ask(decoder, TEXT)
    maps: list[Tensor] = []
    for seat in seats(decoder):

        def keep(reader: nn.Module, call: tuple[Tensor, ...]) -> None:
            flow = reader.flow(call[0])  # type: ignore[operator]
            if flow is not None:
                maps.append(flow.carry.double())

        seat.join.register_forward_pre_hook(keep)
    with torch.no_grad():
        decoder(TEXT[:, :-1])
    if len(maps) < 2 * L or maps[0].shape[-1] == 1 or any(m.shape[-1] != m.shape[-2] for m in maps):
        assert not answer.values and len(answer.notes) == 1
        return
    full = [m.expand(4, 8, *m.shape[-2:]).numpy() for m in maps]
    ranks, cosines = [], []
    for b, t in np.ndindex(4, 8):
        product = np.eye(len(full[0][b, t]))
        for m in full:
            product = m[b, t] @ product
        s = np.linalg.svd(product, compute_uv=False)
        p = s / s.sum()
        ranks.append(math.exp(-sum(x * math.log(x) for x in p if x > 0)))
        columns = product.T / np.linalg.norm(product.T, axis=1, keepdims=True)
        cosines.append(np.mean([abs(columns[i] @ columns[j]) for i in range(len(s)) for j in range(i)]))
    assert answer.numbers["final_erank"] == pytest.approx(np.mean(ranks), abs=1e-9)
    assert answer.numbers["final_overlap"] == pytest.approx(np.mean(cosines), abs=1e-9)


# ------------------------------------------------------------------------------------------------ telemetry, intervals


@every
def test_telemetry(strategy: ResidualStrategy) -> None:
    """Norms of states, updates and gradients against plain loops; the connections' own figures by their names."""
    decoder = build(strategy, SHAPE, random=True)
    told: list[dict[str, Tensor]] = []
    states: list[Tensor] = []
    for k, seat in enumerate(seats(decoder)):

        def tell(reader: nn.Module, call: tuple[Tensor, ...], k: int = k) -> None:
            told.append(reader.telemetry(call[0]))  # type: ignore[operator]
            if k % 2 == 0:
                states.append(reader.probe(call[0]).detach())  # type: ignore[operator]

        seat.join.register_forward_pre_hook(tell)

    def tell_last(reader: nn.Module, call: tuple[Tensor, ...]) -> None:
        told.append(reader.telemetry(call[0]))  # type: ignore[operator]
        states.append(reader.probe(call[0]).detach())  # type: ignore[operator]

    last = decoder.exit.register_forward_pre_hook(tell_last)
    loss = decoder(TEXT[:, :-1], TEXT[:, 1:]).mean()
    loss.backward()
    gradient = [
        math.sqrt(sum(float((p.grad**2).sum()) for p in b.parameters() if p.grad is not None)) for b in decoder.blocks
    ]
    last.remove()
    for seat in seats(decoder):
        seat.join._forward_pre_hooks.clear()
    before = {name: p.grad for name, p in decoder.named_parameters()}
    answer = RoutingTelemetry(batch_size=3).ask(decoder, TEXT)
    assert all(p.grad is before[name] for name, p in decoder.named_parameters()), "the gradients were not put back"
    assert answer.values["gradient_norm"] == pytest.approx(gradient, rel=1e-9)
    sizes = [z.norm(dim=-1) for z in states]
    moves = [(b - a).norm(dim=-1) for a, b in pairwise(states)]
    assert answer.values["state_norm"] == pytest.approx([float(x.mean()) for x in sizes], rel=1e-9)
    assert answer.values["update_norm"] == pytest.approx([float(x.mean()) for x in moves], rel=1e-9)
    relative = [float((m / s).mean()) for m, s in zip(moves, sizes, strict=False)]
    assert answer.values["relative_update"] == pytest.approx(relative, rel=1e-9)
    names = {name for row in told for name in row}
    assert names == set(answer.values) - {"gradient_norm", "state_norm", "update_norm", "relative_update"}
    for name in names:
        expected = [float(row[name]) if name in row else math.nan for row in told]
        assert answer.values[name] == pytest.approx(expected, nan_ok=True, rel=1e-9)


@every
def test_block_reads(strategy: ResidualStrategy) -> None:
    """Shares add up to the whole read, and the running sum's is the slot that the reader names."""
    decoder = build(strategy, SHAPE, random=True)
    reads: list[tuple[Tensor | None, int | None]] = []
    for reader in (*(seat.join for seat in seats(decoder)), decoder.exit):
        reader.register_forward_pre_hook(
            lambda reader, call: reads.append(
                (None if (flow := reader.flow(call[0])) is None else flow.read, reader.running_slot(call[0]))  # type: ignore[operator]
            )
        )
    with torch.no_grad():
        decoder(TEXT[:, :-1])
    for reader in (*(seat.join for seat in seats(decoder)), decoder.exit):
        reader._forward_pre_hooks.clear()
    answer = BlockReads(batch_size=3).ask(decoder, TEXT)
    if all(slot is None for _, slot in reads):
        assert not answer.values and "no running sum" in answer.notes[0]
        return
    for k, (read, slot) in enumerate(reads):
        assert read is not None
        whole = read.expand(4, 8, -1).mean((0, 1))
        expected = math.nan if slot is None else float(whole[slot])
        assert answer.values["running"][k] == pytest.approx(expected, nan_ok=True, abs=1e-9)
        assert answer.values["saved"][k] == pytest.approx(
            float(whole.sum()) - (0 if slot is None else expected), abs=1e-9
        )
    by_layer = [np.nanmean(answer.values["running"][2 * l : 2 * l + 2]) for l in range(L)]
    assert answer.values["by_layer"] == pytest.approx(by_layer)
    segment = next((l for l in range(L) if by_layer[l] >= 0.05), L)
    assert answer.numbers["low_use_segment"] == segment


def test_documents_are_resampled_where_their_borders_are_known() -> None:
    decoder = build(PreLN(), SHAPE, random=True)
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [2] * 8, [2] * 8, [3, 3, 4, 4, 4, 5, 5, 5]])
    batch = {"tokens": TEXT[:, :-1], "targets": TEXT[:, 1:].clone(), "documents": documents}
    batch["targets"][3, 2:5] = -1  # a document that does not count
    answer = LayerPruning(batch_size=4).ask(decoder, batch)
    assert answer.windows["unit"] == "document"
    assert answer.values["unit_tokens"].tolist() == [5, 3, 8, 8, 2, 3]
    nll = decoder(batch["tokens"], batch["targets"], documents).detach()
    assert answer.values["unit_totals"][:, 0] == pytest.approx(
        [float(nll[r, a:b].sum()) for r, a, b in ((0, 0, 5), (0, 5, 8), (1, 0, 8), (2, 0, 8), (3, 0, 2), (3, 5, 8))]
    )
    assert LayerPruning().ask(decoder, TEXT).windows["unit"] == "window"


def test_the_bootstrap_interval_covers() -> None:
    """Over 200 draws of 60 units, the 95 % interval of a ratio of sums holds the truth about 95 % of the time."""
    draw, hits = np.random.default_rng(0), 0
    for seed in range(200):
        numbers = draw.integers(5, 50, 60)
        totals = draw.normal(2.0 * numbers, numbers**0.5)[:, None]
        low, high = bootstrap(totals, numbers.astype(float), seed, resamples=400)
        hits += int(low[0] <= 2.0 <= high[0])
    assert 180 <= hits <= 199
    assert np.isnan(bootstrap(np.ones((1, 3)), np.ones(1), 0)).all()
    low, high = bootstrap(np.ones((5, 2, 3)), np.ones(5), 0)
    assert low.shape == (2, 3) and (low == 1).all() and (high == 1).all()


def test_answers_survive_the_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    answer = PermutationScore().ask(build(PreLN(), ShapeSpec(1, D, n_head=1, vocab_size=23)), TEXT, step=7)
    assert math.isnan(answer.numbers["R_perm"])
    again = Answer.load(answer.save(tmp_path))
    assert (
        again.step == 7 and math.isnan(again.numbers["R_perm"]) and again.options == answer.options | {"fractions": []}
    )
    for key, value in answer.values.items():
        assert np.array_equal(again.values[key], value, equal_nan=True)
    with pytest.raises(ValueError, match="no answer of a diagnostic at"):
        Answer.load(tmp_path / "Nothing.json")
    text = (tmp_path / "PermutationScore.json").read_text().replace('"version": 1', '"version": 2')
    (tmp_path / "PermutationScore.json").write_text(text)
    with pytest.raises(ValueError, match="later version"):
        Answer.load(tmp_path / "PermutationScore.json")
