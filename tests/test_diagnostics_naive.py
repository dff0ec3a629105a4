"""Every diagnostic of orders and states against a plain loop, for every strategy, in fp64 at random weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from models import build, known, label, set_eps, tokens_for
from torch import Tensor

from callbacks import AngularDistance, CausalScore, LayerPruning, LogitLens, PermutationScore
from depthlit.connection import ResidualStrategy, State
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Batch
from depthlit.interventions import abreast, prefixes, swapped, tapped, without
from depthlit.layers import Context
from depthlit.shape import ShapeSpec

every = pytest.mark.parametrize("strategy", known(), ids=label)
SHAPE = ShapeSpec(n_layer=5, d_model=16, n_head=2, d_ff=24, vocab_size=23)
L = SHAPE.n_layer
CLOSE = 1e-9


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Five windows of eight tokens, some of which do not count."""
    text = tokens_for(SHAPE, 5, 9)
    targets = text[:, 1:].clone()
    targets[0, 3] = targets[2, :2] = targets[4, 6] = -1
    return {"tokens": text[:, :-1], "targets": targets}


@torch.no_grad()
def walk(decoder: Decoder, tokens: Tensor, order: list[int]) -> tuple[dict[int, Tensor], State]:
    """{place: probe before that block, and at the exit}, and the last state: one block after the other."""
    context = Context.of(decoder.shape, tokens, decoder.embed.weight.dtype)
    state, seen = decoder.entry(decoder.embed(tokens)), {}
    for i in order:
        seen[i] = decoder.blocks[i].join_attn.probe(state)
        state = decoder.blocks[i](state, context)
    seen[L] = decoder.exit.probe(state)
    return seen, state


@torch.no_grad()
def loss(decoder: Decoder, batch: Batch, order: list[int]) -> float:
    _, state = walk(decoder, batch["tokens"], order)
    log_p = decoder.head(decoder.exit(state, decoder.norm)).log_softmax(-1)
    found = [
        -log_p[b, t, target].item()
        for b, row in enumerate(batch["targets"].tolist())
        for t, target in enumerate(row)
        if target >= 0
    ]
    return sum(found) / len(found)


def tokens_that_count(batch: Batch) -> Iterator[tuple[int, int]]:
    for b, t in np.ndindex(*batch["targets"].shape):
        if batch["targets"][b, t] >= 0:
            yield b, t


@contextmanager
def counted(decoder: Decoder) -> Iterator[list[int]]:
    ran: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda module, call, i=i: ran.append(i))  # type: ignore[misc]
        for i, block in enumerate(decoder.blocks)
    ]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


@every
def test_angular_distance(strategy: ResidualStrategy, batch: dict[str, Tensor]) -> None:
    decoder = build(strategy, SHAPE, random=True)
    found = AngularDistance(batch_size=2).ask(decoder, batch).values["distance"]
    seen, _ = walk(decoder, batch["tokens"], list(range(L)))
    for i in range(L + 1):
        for j in range(L + 1):
            if j <= i:
                assert found[i, j] == 0 if i == j else math.isnan(found[i, j])
                continue
            angles = []
            for b, t in tokens_that_count(batch):
                x, y = seen[i][b, t], seen[j][b, t]
                angles.append(math.acos(max(-1.0, min(1.0, float(x @ y / x.norm() / y.norm())))) / math.pi)
            assert found[i, j] == pytest.approx(sum(angles) / len(angles), abs=CLOSE)


@every
@pytest.mark.parametrize(("late_only", "abreast"), [(False, 1), (True, 1), (False, 3), (False, 9)])
def test_causal_score(strategy: ResidualStrategy, batch: dict[str, Tensor], late_only: bool, abreast: int) -> None:
    decoder = build(strategy, SHAPE, random=True)
    asker = CausalScore(batch_size=2, late_only=late_only, abreast=abreast)
    with counted(decoder) as ran:
        answer = asker.ask(decoder, batch)
    skipped = list(range(math.ceil(L / 4) if late_only else 0, L - 1))
    evaluations = 3 * (L + sum(L - 1 - s for s in skipped))
    assert evaluations == 3 * asker.steps(tuple(range(L))) == answer.cost["block_evaluations"]
    assert len(ran) == evaluations if abreast == 1 else len(ran) < 0.9 * evaluations
    clean, _ = walk(decoder, batch["tokens"], list(range(L)))
    for s in range(L):
        other = walk(decoder, batch["tokens"], [i for i in range(L) if i != s])[0] if s in skipped else None
        for l in range(L):
            values = [answer.values[key][s, l] for key in ("ratios", "norms")]
            if other is None or l <= s:
                assert np.isnan(values).all()
                continue
            up, down = [], []
            for b, t in tokens_that_count(batch):
                u = clean[l + 1][b, t] - clean[l][b, t]
                up.append(float((other[l + 1][b, t] - other[l][b, t] - u).norm()))
                down.append(float(u.norm()))
            ratios = [x / max(y, 1e-8) for x, y in zip(up, down, strict=True)]
            assert values[0] == pytest.approx(sum(ratios) / len(ratios), rel=CLOSE)
            assert values[1] == pytest.approx(sum(up) / sum(down), rel=CLOSE)
    late = [answer.values["score"][s, l] for s in range(math.ceil(L / 4), L) for l in range(s + 1, L)]
    assert answer.numbers["R_causal"] == sum(c > 0.45 for c in late) / len(late)


@every
def test_causal_score_with_silent_layers(strategy: ResidualStrategy, batch: dict[str, Tensor]) -> None:
    """The skipped layer runs with its out-projections at zero."""
    decoder = build(strategy, SHAPE, random=True)
    asker = CausalScore(skip="silent", abreast=1)
    with counted(decoder) as ran:
        score = asker.ask(decoder, batch).values["score"]
    assert len(ran) == 2 * asker.steps(tuple(range(L)))
    clean, _ = walk(decoder, batch["tokens"], list(range(L)))
    mask = batch["targets"] >= 0
    for s in range(L - 1):
        mute = build(strategy, SHAPE, random=True)
        with torch.no_grad():
            mute.blocks[s].attn.out.weight.zero_()
            mute.blocks[s].mlp.out.weight.zero_()
        other, _ = walk(mute, batch["tokens"], list(range(L)))
        for l in range(s + 1, L):
            u = clean[l + 1] - clean[l]
            ratio = (other[l + 1] - other[l] - u).norm(dim=-1) / u.norm(dim=-1)
            assert score[s, l] == pytest.approx(float(ratio[mask].mean()), rel=CLOSE)


@every
@pytest.mark.parametrize(("late_only", "abreast"), [(False, 1), (True, 1), (False, 3), (False, 9)])
def test_permutation_score(strategy: ResidualStrategy, batch: dict[str, Tensor], late_only: bool, abreast: int) -> None:
    decoder = build(strategy, SHAPE, random=True)
    asker = PermutationScore(batch_size=2, late_only=late_only, abreast=abreast)
    with counted(decoder) as ran:
        answer = asker.ask(decoder, batch)
    first = math.ceil(L / 4) if late_only else 0
    evaluations = 3 * (L + sum((L - 1 - a) * (L - a) for a in range(first, L)))
    assert evaluations == 3 * asker.steps(tuple(range(L))) == answer.cost["block_evaluations"]
    assert len(ran) == evaluations if abreast == 1 else len(ran) < 0.9 * evaluations
    base = loss(decoder, batch, list(range(L)))
    assert answer.numbers["loss"] == pytest.approx(base, rel=CLOSE)
    for a in range(L):
        for b in range(L):
            signed, score = answer.values["signed"][a, b], answer.values["score"][a, b]
            if a >= b or a < first:
                assert math.isnan(signed) and math.isnan(score)
                continue
            order = list(range(L))
            order[a], order[b] = b, a
            assert signed == pytest.approx((loss(decoder, batch, order) - base) / base, abs=CLOSE)
            assert score == abs(signed)
    late = [answer.values["score"][a, b] for a in range(math.ceil(L / 4), L) for b in range(a + 1, L)]
    assert answer.numbers["R_perm"] == sum(p > 0.15 for p in late) / len(late)


@pytest.mark.parametrize("strategy", [s for s in known() if s.skip_rules], ids=label)
def test_causal_score_by_the_strategys_own_rules(strategy: ResidualStrategy, batch: dict[str, Tensor]) -> None:
    decoder = build(strategy, SHAPE, random=True)
    clean, _ = walk(decoder, batch["tokens"], list(range(L)))
    context, mask = Context.of(SHAPE, batch["tokens"], torch.float64), batch["targets"] >= 0
    for rule, passed in strategy.skip_rules.items():
        score = CausalScore(skip=rule, batch_size=2).ask(decoder, batch).values["score"]
        assert not np.allclose(score, CausalScore().ask(decoder, batch).values["score"], equal_nan=True)
        for s in range(L - 1):
            with torch.no_grad():
                state, other = decoder.entry(decoder.embed(batch["tokens"])), {}
                for i in range(L):
                    other[i] = decoder.blocks[i].join_attn.probe(state)
                    state = passed(state) if i == s else decoder.blocks[i](state, context)
                other[L] = decoder.exit.probe(state)
            for l in range(s + 1, L):
                u = clean[l + 1] - clean[l]
                ratio = (other[l + 1] - other[l] - u).norm(dim=-1) / u.norm(dim=-1)
                assert score[s, l] == pytest.approx(float(ratio[mask].mean()), rel=CLOSE)


@pytest.mark.parametrize("strategy", [s for s in known() if "depthbench" in s.swap_rules], ids=label)
def test_permutation_score_by_the_authors_rule(strategy: ResidualStrategy, batch: dict[str, Tensor]) -> None:
    """Against tensors exchanged in place, as the authors do: all of two blocks but the queries of their first sites,
    and the queries of the sites that read next; what depends on the place stays there."""
    decoder = set_eps(build(strategy, SHAPE, random=True), 1e-6)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    asker = PermutationScore(swap="depthbench", batch_size=2)
    answer = asker.ask(decoder, batch)
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items()), "left a trace"
    assert answer.cost["block_evaluations"] == 3 * asker.steps(tuple(range(L)))
    assert not np.allclose(
        answer.values["signed"], PermutationScore().ask(decoder, batch).values["signed"], equal_nan=True
    )
    base = loss(decoder, batch, list(range(L)))

    def next_site(block: int, name: str) -> str:
        return f"exit.{name}" if block + 1 == L else f"blocks.{block + 1}.join_attn.{name}"

    for a in range(L):
        for b in range(a + 1, L):
            other, weights = set_eps(build(strategy, SHAPE, random=True), 1e-6), dict(before)
            for name in before:
                own = f"blocks.{a}."
                if name.startswith(own) and name not in (f"{own}join_attn.query", f"{own}join_attn.gain"):
                    twin = f"blocks.{b}.{name.removeprefix(own)}"
                    weights[name], weights[twin] = before[twin], before[name]
            for name in ("query", "gain"):
                one, two = next_site(a, name), next_site(b, name)
                weights[one], weights[two] = before[two], before[one]
            other.load_state_dict(weights)
            assert answer.values["signed"][a, b] == pytest.approx(
                (loss(other, batch, list(range(L))) - base) / base, abs=CLOSE
            )


@every
def test_layer_pruning(strategy: ResidualStrategy, batch: dict[str, Tensor]) -> None:
    decoder = build(strategy, SHAPE, random=True)
    asker = LayerPruning(batch_size=2)
    answer = asker.ask(decoder, batch)
    assert answer.cost["block_evaluations"] == 3 * asker.steps(tuple(range(L))) == 3 * (L + L * (L - 1) / 2)
    base = loss(decoder, batch, list(range(L)))
    for s in range(L):
        pruned = loss(decoder, batch, [i for i in range(L) if i != s])
        assert answer.values["change"][s] == pytest.approx(pruned - base, abs=CLOSE)
    low, high = answer.values["low"], answer.values["high"]
    assert (low <= answer.values["change"]).all() and (answer.values["change"] <= high).all() and (low < high).all()


@every
@pytest.mark.parametrize("chunk", [5, 1000])
def test_logit_lens(strategy: ResidualStrategy, batch: dict[str, Tensor], chunk: int) -> None:
    decoder = build(strategy, SHAPE, random=True)
    answer = LogitLens(top=3, chunk=chunk, batch_size=2).ask(decoder, batch)
    tokens, targets = batch["tokens"], batch["targets"]
    mask = targets >= 0
    with torch.no_grad():
        final = decoder(tokens).log_softmax(-1)[mask]
        context = Context.of(decoder.shape, tokens, torch.float64)
        state = decoder.entry(decoder.embed(tokens))
        for l in range(L + 1):
            reader = decoder.blocks[l].join_attn if l < L else decoder.exit
            guess = decoder.head(reader.normed(state, decoder.norm)).log_softmax(-1)[mask]
            state = decoder.blocks[l](state, context) if l < L else state
            kl = (final.exp() * (final - guess)).sum(-1).mean()
            ce = -guess[torch.arange(len(guess)), targets[mask]].mean()
            same = [len({*a.topk(3).indices.tolist()} & {*b.topk(3).indices.tolist()}) / 3
                    for a, b in zip(guess, final, strict=True)]  # fmt: skip
            for key, value in (("kl", kl), ("ce", ce), ("agreement", np.mean(same))):
                assert answer.values[key][l] == pytest.approx(float(value), abs=CLOSE)
    assert answer.values["kl"][-1] == 0 and answer.values["agreement"][-1] == pytest.approx(1)


@pytest.mark.parametrize("n", [1, 2, 24])
def test_evaluations_are_the_distinct_prefixes(n: int) -> None:
    """At 24 layers: 0.522 and 0.694 of running each intervention from the start; 0.289 and 0.293 late only."""
    order = tuple(range(n))
    naive = ((n - 1) ** 2, n * (n - 1) // 2 * n)
    kinds = [CausalScore(), PermutationScore(), CausalScore(late_only=True), PermutationScore(late_only=True)]
    shares = []
    for kind, whole in zip(kinds, naive * 2, strict=True):
        routes = kind.routes(order)  # type: ignore[attr-defined]
        beginnings = {route[:k] for route in routes for k in range(1, len(route) + 1)}
        assert kind.steps(order) == len(beginnings) == prefixes(*routes)
        shares.append((len(beginnings) - n) / max(whole, 1))
    if n == 24:
        assert [round(share, 3) for share in shares] == [0.522, 0.694, 0.289, 0.293]


@every
def test_routes_abreast_are_routes_one_by_one(strategy: ResidualStrategy) -> None:
    """Also with documents, with skipped and silent blocks, and with states that are built unlike each other."""
    decoder = build(strategy, SHAPE, random=True)
    text, documents = tokens_for(SHAPE, 2, 9), torch.tensor([[0] * 3 + [1] * 5, [2] * 6 + [3] * 2])
    order = tuple(range(L))
    routes = [order, *(without(order, s) for s in order), *(without(order, s, rule="silent") for s in order),
              *(swapped(order, a, b) for a in order for b in range(a)), (), order[:2], (3, 3, 1)]  # fmt: skip
    met: list[Order] = []
    with torch.no_grad():
        for where in (None, documents):
            one = decoder(text[:, :-1], text[:, 1:], documents=where, routes=routes)
            for n in (2, 5, 100):
                met.clear()
                with abreast(decoder, n), tapped(decoder, lambda reader, state: met.append(decoder.path)):
                    many = decoder(text[:, :-1], text[:, 1:], documents=where, routes=routes)
                torch.testing.assert_close(torch.stack(many), torch.stack(one), rtol=1e-11, atol=1e-11)
                assert decoder.path == () and decoder.paths == ((),) and decoder.abreast == 1
                assert set(routes) <= set(met)
