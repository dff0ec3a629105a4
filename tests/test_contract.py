"""What every residual strategy must keep, whoever wrote it: a new file in residuals/ is tested the day it appears."""

import copy
import pickle
import re
from dataclasses import asdict, is_dataclass

import pytest
import torch
import yaml
from cases import CASES
from models import CLASSES, TINY, build, known, label, seats, tokens_for
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthlit import residuals
from depthlit.connection import Connection, Flow, Reader, ResidualStrategy, State
from depthlit.decoder import Decoder
from depthlit.interventions import headless, rerouted, silenced, swapped, tapped, without
from depthlit.residuals import PreLN
from depthlit.shape import ShapeSpec

SETTINGS = [getattr(residuals, name)(**settings) for name, settings, _ in CASES if name in residuals.__all__]
EVERY = sorted({*known(), *SETTINGS}, key=label)
every = pytest.mark.parametrize("strategy", EVERY, ids=label)
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


@pytest.fixture
def tokens() -> Tensor:
    return tokens_for(TINY)


def nll(decoder: Decoder, tokens: Tensor) -> Tensor:
    return decoder(tokens[:, :-1], tokens[:, 1:]).mean()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


# ------------------------------------------------------------------------------------------------ settings


@every
def test_settings_are_frozen_values(strategy: ResidualStrategy) -> None:
    assert is_dataclass(strategy) and type(strategy).__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not [v for v in vars(strategy).values() if isinstance(v, Tensor)]
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied == strategy and hash(copied) == hash(strategy)
    assert type(strategy)(**yaml.safe_load(yaml.safe_dump(asdict(strategy)))) == strategy  # type: ignore[call-overload]


@each_class
def test_says_what_it_is(cls: type[ResidualStrategy]) -> None:
    said = "the docstring is the command line's help: the idea and its source, an arXiv number, a DOI, or `unpublished`"
    assert cls.__doc__ and re.search("arXiv|doi|unpublished", cls.__doc__), said
    if cls.presets:
        with pytest.raises(ValueError, match=f"{cls.__name__} has no preset 'no such preset'; known: "):
            cls(preset="no such preset")  # type: ignore[call-arg]


@every
def test_builds_on_meta_without_0d_parameters(strategy: ResidualStrategy) -> None:
    with torch.device("meta"):
        decoder = Decoder(TINY, strategy, seed=0)
    assert all(p.is_meta and p.dim() > 0 for p in decoder.parameters())


@every
def test_what_was_built_on_meta_gets_the_same_weights(strategy: ResidualStrategy) -> None:
    """As a sharded start does it: build on meta, allocate, set the constants, draw the rest. Memory starts as NaN."""
    with torch.device("meta"):
        decoder = Decoder(TINY, strategy, seed=0)
    decoder.to_empty(device="cpu")
    for p in [*decoder.parameters(), *decoder.buffers()]:
        p.data.fill_(torch.nan)
    for module in decoder.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    decoder.init_weights(0)
    straight = Decoder(TINY, strategy, seed=0).state_dict()
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, straight[name]), name


@every
def test_same_seed_same_backbone(strategy: ResidualStrategy) -> None:
    """Weights of one name are equal under every strategy, but for a factor that a connection may put on a branch."""
    plain, decoder = build(PreLN(), seed=3), build(strategy, seed=3)
    factors = {
        id(p)
        for seat in seats(decoder)
        if type(seat.join).init_branch is not Connection.init_branch
        for p in seat.branch.parameters()
    }
    own = dict(decoder.named_parameters())
    for name, weight in plain.named_parameters():
        if weight.dim() < 2:
            continue
        factor = 1.0
        if id(own[name]) in factors:
            factor = float(own[name].detach().norm() / weight.detach().norm())
            assert factor > 0
        torch.testing.assert_close(own[name].detach(), factor * weight.detach(), rtol=1e-6, atol=0)
    different = dict(build(strategy, seed=4).named_parameters())
    assert not torch.equal(different["head.weight"], own["head.weight"])


@every
def test_a_copy_computes_the_same(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    logits = decoder(tokens)
    twin = copy.deepcopy(decoder)
    assert torch.equal(twin(tokens), logits)
    nll(twin, tokens).backward()
    assert all(p.grad is None for p in decoder.parameters())
    fresh = build(pickle.loads(pickle.dumps(strategy)), seed=9)
    fresh.load_state_dict(decoder.state_dict())
    assert torch.equal(fresh(tokens), logits)


# ------------------------------------------------------------------------------------------------ learning


@every
def test_every_weight_learns(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    nll(decoder, tokens).backward()
    assert not [n for n, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@every
def test_every_weight_takes_part_at_the_start(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """A gradient may be zero at special initial values, but never missing: DDP would wait for it."""
    decoder = build(strategy)
    nll(decoder, tokens).backward()
    assert not [n for n, p in decoder.named_parameters() if p.grad is None]
    assert all(p.grad.isfinite().all() for p in decoder.parameters() if p.grad is not None)


@every
def test_frozen_weights_leave_the_other_gradients_as_they_are(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """Hand-written backward passes must serve whoever asks, and only them."""
    decoder = build(strategy, random=True)
    nll(decoder, tokens).backward()
    whole = {name: p.grad for name, p in decoder.named_parameters()}
    backbone = set(dict(build(PreLN()).named_parameters()))
    for half in (backbone, whole.keys() - backbone):
        decoder.zero_grad()
        for name, p in decoder.named_parameters():
            p.requires_grad_(name in half)
        if half:
            nll(decoder, tokens).backward()
        for name, p in decoder.named_parameters():
            if name in half:
                assert p.grad is not None and whole[name] is not None
                close(p.grad, whole[name], 1e-10)
            else:
                assert p.grad is None


@every
def test_gradients_add_up_and_are_not_needed(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """Two backward passes through one graph give twice the gradient; without a graph the loss is the same."""
    decoder = build(strategy, random=True)
    loss = nll(decoder, tokens)
    with torch.no_grad():
        close(nll(decoder, tokens), loss.detach(), 1e-13)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
    loss.backward()
    for p, g in zip(decoder.parameters(), once, strict=True):
        assert p.grad is not None
        close(p.grad, 2 * g)


@every
def test_rows_of_a_batch_are_strangers(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    together = decoder(tokens)
    for row in range(len(tokens)):
        close(together[row : row + 1], decoder(tokens[row : row + 1]))


@every
def test_the_future_is_not_seen(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder, other = build(strategy, random=True), tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % TINY.vocab_size
    before, after = decoder(tokens), decoder(other)
    close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-6


@every
def test_documents_are_strangers(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """A document's logits are those of the document alone, wherever it stands and whoever stands beside it."""
    decoder = build(strategy, random=True)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [7, 7, 3, 3, 3, 3, 3, 3, 8]])
    together = decoder(tokens, documents=documents)
    for row, first, end in ((0, 0, 4), (0, 4, 9), (1, 0, 2), (1, 2, 8), (1, 8, 9)):
        close(together[row : row + 1, first:end], decoder(tokens[row : row + 1, first:end]))
    assert not torch.allclose(together[:, 4:], decoder(tokens)[:, 4:])


# ------------------------------------------------------------------------------------------------ numbers


@every
@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_bf16_is_finite(strategy: ResidualStrategy, mode: str, tokens: Tensor) -> None:
    """All in bf16, or fp32 weights under autocast: finite, and the stream is as wide as the embedding's weights."""
    decoder, seen = build(strategy, random=True).float(), []
    if mode == "weights":
        decoder.bfloat16()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
        tapped(decoder, lambda reader, state: seen.append(reader.lens(state))),
    ):
        loss = decoder(tokens[:, :-1], tokens[:, 1:])
    loss.mean().backward()
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())
    assert {lens.dtype for lens in seen} == {decoder.embed.weight.dtype}
    with torch.no_grad():
        exact = build(strategy, random=True)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.mean() / exact.mean() - 1) < 0.15, "bf16 lost more than its rounding"


@every
@pytest.mark.parametrize("zeros, random", [("embedding", True), ("branches", True), ("both", False)])
def test_zeros_stay_finite(strategy: ResidualStrategy, zeros: str, random: bool, tokens: Tensor) -> None:
    """In fp64 where the whole stream is zero: there each norm in a row truly multiplies gradients by 1 / sqrt(eps)."""
    decoder = build(strategy, random=random).to(torch.float32 if zeros == "branches" else torch.float64)
    with torch.no_grad():
        if zeros != "branches":
            decoder.embed.weight.zero_()
        if zeros != "embedding":
            for seat in seats(decoder):
                seat.branch.out.weight.zero_()  # type: ignore[union-attr, operator]
    loss = nll(decoder, tokens)
    loss.backward()
    assert loss.isfinite()
    assert not [n for n, p in decoder.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


# ------------------------------------------------------------------------------------------------ the state


@every
def test_a_state_is_tensors_and_is_never_changed(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    met: list[tuple[list[Tensor], list[Tensor]]] = []
    others: list[list[object]] = []  # of each state: handed on as they are

    def keep(module: torch.nn.Module, call: tuple[State, ...]) -> None:
        leaves = [leaf for leaf in tree_leaves(call[0]) if isinstance(leaf, Tensor)]
        others.append([leaf for leaf in tree_leaves(call[0]) if not isinstance(leaf, Tensor | int | None)])
        assert leaves
        met.append((leaves, [leaf.detach().clone() for leaf in leaves]))

    for seat in seats(decoder):
        seat.join.register_forward_pre_hook(keep)
    decoder.exit.register_forward_pre_hook(keep)
    nll(decoder, tokens).backward()
    assert len(met) == TINY.n_sublayer + 1
    for leaves, values in met:
        assert all(torch.equal(leaf, value) for leaf, value in zip(leaves, values, strict=True))
    assert all(len(some) < 2 and [*map(id, some)] == [*map(id, others[0])] for some in others)


@every
def test_the_last_lens_is_the_output(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    seen: list[Tensor] = []

    def see(reader: Reader, state: State) -> None:
        seen.append(decoder.head(reader.normed(state, decoder.norm)))
        lens, probe = reader.lens(state), reader.probe(state)
        assert lens.shape == (*tokens.shape, TINY.d_model) and probe.shape[:2] == tokens.shape
        figures = reader.telemetry(state)
        assert all(v.dim() == 0 and v.isfinite() for v in figures.values())

    with tapped(decoder, see):
        logits = decoder(tokens)
    assert len(seen) == TINY.n_layer + 1
    assert torch.equal(seen[-1], logits)
    assert torch.equal(decoder(tokens), logits), "looking left a trace"
    seen.clear()
    with headless(decoder), tapped(decoder, see, sublayers=True):
        assert decoder(tokens).numel() == 0
    assert len(seen) == TINY.n_sublayer + 1 and torch.equal(seen[-1], logits)


@every
def test_paths_rebuild_what_every_reader_reads(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """A branch input is the sum of everything written before, weighed by read . carry ... carry . write.

    Checked as far down as there are scalar paths; which strategies have them all the way, test_symbolic.py says.
    """
    decoder = build(strategy, random=True)
    x = decoder.embed(tokens)
    written, paths = [x], [decoder.entry.write(x)]  # paths: (..., S) of each written vector
    got: dict[str, Tensor] = {}
    flows: list[Flow | None] = []

    def rebuilt(read: Tensor) -> Tensor:
        return sum((read * path).sum(-1)[..., None] * y for path, y in zip(paths, written, strict=True))  # type: ignore[return-value]

    def one_step(join: torch.nn.Module, call: tuple[State, ...], after: State) -> None:
        flow = join.flow(call[0])  # type: ignore[operator]
        flows.append(flow)
        if None in flows:
            return
        assert flow.carry is not None and flow.write is not None
        close(got["x"], rebuilt(flow.read))
        paths[:] = [(flow.carry @ path[..., None])[..., 0] for path in paths] + [flow.write]
        written.append(got["y"])

    for seat in seats(decoder):
        norm = getattr(seat.join, "norm", None)
        if norm is not None:
            norm.register_forward_pre_hook(lambda module, call: got.update(x=call[0]))
        else:
            seat.branch.register_forward_pre_hook(lambda module, call: got.update(x=call[0]))
        seat.branch.out.register_forward_hook(lambda module, call, y: got.update(y=y))  # type: ignore[union-attr, operator]
        seat.join.register_forward_hook(one_step)

    def last(reader: Reader, state: State) -> None:
        if reader is decoder.exit:
            flow = reader.flow(state)
            flows.append(flow)
            if None not in flows:
                assert flow.carry is None and flow.write is None
                close(reader.lens(state), rebuilt(flow.read))

    with tapped(decoder, last):
        decoder(tokens)
    assert len(flows) == TINY.n_sublayer + 1


# ------------------------------------------------------------------------------------------------ interventions


@every
def test_interventions_leave_no_trace(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    before, hooks = decoder(tokens), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.modules()]
    order = decoder.order
    with (
        rerouted(decoder, swapped(without(order, 1), 0, 3)),
        silenced(decoder, 2),
        tapped(decoder, lambda reader, state: None),
    ):
        assert not torch.allclose(decoder(tokens), before)
    with pytest.raises(RuntimeError, match="stop"), rerouted(decoder, ()), silenced(decoder, 0):
        raise RuntimeError("stop")
    assert decoder.order == order and torch.equal(decoder(tokens), before)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.modules()]


@every
def test_silencing_all_is_reading_the_embedding_only(strategy: ResidualStrategy, tokens: Tensor) -> None:
    """What is silenced still takes part in the routing; so the output depends on the token at its place alone."""
    decoder, other = build(strategy, random=True), tokens.clone()
    other[:, :-1] = other[:, :-1].flip(0)
    with silenced(decoder, *decoder.order):
        a, b = decoder(tokens), decoder(other)
    assert a.isfinite().all()
    close(a[:, -1], b[:, -1])


@every
@torch.no_grad()  # as those who walk routes do; with gradients, one order in turn is added up in another way
def test_routes_are_orders_walked_one_by_one(strategy: ResidualStrategy, tokens: Tensor) -> None:
    decoder = build(strategy, random=True)
    order = decoder.order
    routes = [
        order, without(order, 1), without(order, 3), swapped(order, 0, 2), swapped(order, 1, 2),
        (), order[:1], order[:2], (3, 2, 1, 0), (0, 1, 1, 2, 3), order,
        *(without(order, *blocks, rule=rule) for rule in ("silent", *strategy.skip_rules) for blocks in ((0,), (1, 2))),
    ]  # fmt: skip
    met = []
    with tapped(decoder, lambda reader, state: met.append(decoder.path) if reader is decoder.exit else None):
        results = decoder(tokens, routes=routes)
    assert len(met) == len(set(routes)) and set(met) == set(routes) and decoder.path == ()
    for route, logits in zip(routes, results, strict=True):
        with rerouted(decoder, route):
            assert torch.equal(decoder(tokens), logits) and logits.isfinite().all(), route
    with silenced(decoder, 1, 2):
        assert torch.equal(decoder(tokens), results[routes.index(without(order, 1, 2, rule="silent"))])
    losses = decoder(tokens[:, :-1], tokens[:, 1:], routes=routes)
    with rerouted(decoder, routes[1]):
        assert torch.equal(decoder(tokens[:, :-1], tokens[:, 1:]), losses[1])
    assert not torch.allclose(results[0], results[3])


@every
def test_one_block_and_grouped_heads(strategy: ResidualStrategy) -> None:
    for shape in (ShapeSpec(1, 16, n_head=2, vocab_size=13), ShapeSpec(3, 24, n_head=6, n_kv_head=2, vocab_size=13)):
        decoder = build(strategy, shape, random=True)
        tokens = tokens_for(shape, 1, 1)
        assert decoder(tokens).isfinite().all()
        nll(decoder, tokens_for(shape)).backward()
        assert not [n for n, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
