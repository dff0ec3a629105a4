"""The arithmetic of streams and the recipes: gradients, what is kept for backward, checkpointing, compiling."""

import pytest
import torch
from models import TINY, build, tokens_for
from stream_steps import B, D, M, T, connection, rand
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from depthlit.cost import saved_bytes
from depthlit.decoder import Decoder
from depthlit.layers import RMSNorm
from depthlit.mixers import streams
from depthlit.recipe import recipe_of
from depthlit.residuals import HC, MHC, PreLN
from depthlit.shape import ShapeSpec

both = pytest.mark.parametrize("strategy", [HC(), MHC()], ids=str)


def step(H: Tensor, read: Tensor, carry: Tensor, write: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, carried = streams.mix(H, read, carry)
    return x, streams.write(carried, write, y, H.dtype)


def test_gradients_of_the_arithmetic() -> None:
    H, W, V, y = rand(B, T, M, D), rand(3, D), rand(3, M * D), rand(B, T, D)
    assert gradcheck(lambda H, W: streams.project(H, W, together=False), (H, W))
    assert gradcheck(lambda H, V: streams.project(H, V, together=True), (H, V))
    assert gradcheck(streams.mix, (H, rand(B, T, M), rand(B, T, M, M)))
    assert gradcheck(step, (H, rand(B, T, M), rand(B, T, M, M), rand(B, T, M, seed=1), y))
    assert gradcheck(step, (H, rand(M), rand(M, M), rand(M, seed=1), y))


def test_gradients_through_remade_streams() -> None:
    """Three steps, read and norm: every other state and every x is made again in backward."""
    norm = RMSNorm(D, 1e-6).double()

    def run(H: Tensor, *c: Tensor) -> Tensor:
        total = H.new_zeros(())
        for i in range(0, 12, 4):
            H, z, square = streams.project(H, c[12], together=False)
            x, H = step(H, *c[i : i + 4])
            total = total + norm(x).square().sum() + z.sin().sum() + square.sin().sum()
        return total + norm(streams.mix(H, c[0], c[1])[0]).sin().sum()

    c = [rand(*s, seed=i) for i in range(3) for s in ((2, M), (2, M, M), (2, M), (2, D))]
    assert gradcheck(run, (rand(2, M, D), *c, rand(3, D)))


def test_a_gradient_that_is_looked_at_is_not_changed() -> None:
    """Backward adds to gradients of its own in place, never to one that somebody may hold."""
    joins, H = [connection(HC(), k) for k in range(3)], rand(B, T, M, D)
    states = [H]
    for join in joins:
        states.append(join(states[-1], torch.tanh))
    out, seen = states[-1].square().sum(), []
    together = torch.autograd.grad(out, states[:-1], retain_graph=True)
    for state, g in zip(states[1:-1], together[1:], strict=True):
        state.register_hook(lambda g: seen.append((g, g.clone())))
        assert torch.equal(torch.autograd.grad(out, state, retain_graph=True)[0], g)
    seen.clear()
    assert torch.equal(torch.autograd.grad(out + 0 * states[1].sum(), H)[0], together[0])
    assert len(seen) == 2 and all(torch.equal(g, copied) for g, copied in seen)


def test_partial_gradients() -> None:
    """Each gradient alone equals its part of all together; what needs none gets none."""
    join, H = connection(MHC()), rand(B, T, M, D)
    weights = list(join.parameters())
    out = join(H, torch.tanh).square().sum()
    together = torch.autograd.grad(out, [H, *weights], retain_graph=True)
    for x, g in zip([H, *weights], together, strict=True):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], g)
    for p in weights:
        p.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(join(H, torch.tanh).square().sum(), H)[0], together[0])


@both
def test_little_is_kept(strategy: HC | MHC) -> None:
    """Per block of two sublayers four streams, two branch outputs and about 100 coefficients a token; the two norm
    inputs that Pre-LN keeps are remade."""
    shape = ShapeSpec(n_layer=6, d_model=256, n_head=4, vocab_size=64)
    tokens = tokens_for(shape, 1, 256)
    lean, plain = (saved_bytes(Decoder(shape, s, seed=0), tokens) for s in (strategy, PreLN()))
    assert lean < 1.25 * plain
    unit = 256 * 256 * 4
    assert lean - plain < 6 * (4 + 2 - 2 + 110 / 256) * unit + unit * 4


def test_recipes_are_dropped_and_can_be_used_again() -> None:
    joins = [connection(HC(), k) for k in range(2)]
    H = rand(B, T, M, D)
    between = joins[0](H, torch.tanh)
    out = joins[1](between, torch.tanh).square().sum()
    recipe = recipe_of(between)
    assert recipe is not None and recipe.plan.users == 3  # project, mix, and the recipe of x
    first = torch.autograd.grad(out, H, retain_graph=True)
    assert recipe.plan.made is None, "remade streams are let go in backward"
    assert torch.equal(first[0], torch.autograd.grad(out, H)[0])
    with torch.no_grad():
        assert recipe_of(joins[0](H, torch.tanh)) is None


def test_a_state_changed_in_place_is_not_remade() -> None:
    joins = [connection(HC(), k) for k in range(2)]
    H = rand(B, T, M, D)
    grads = []
    for change in (lambda s: s.mul_(2.0), lambda s: s * 2.0):
        out = joins[1](change(joins[0](H, torch.tanh)), torch.tanh)
        grads.append(torch.autograd.grad(out.square().sum(), H)[0])
    torch.testing.assert_close(grads[0], grads[1])


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(strategy: HC | MHC, reentrant: bool) -> None:
    """Recomputing blocks changes no bit of the gradients in fp32, and keeps one state per block."""
    decoder, tokens = build(strategy).float(), tokens_for(TINY)

    def gradients() -> list[Tensor]:
        decoder.zero_grad()
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        return [p.grad.clone() for p in decoder.parameters() if p.grad is not None]

    plain, kept = gradients(), saved_bytes(decoder, tokens)
    for block in decoder.blocks:
        run = block.forward
        block.forward = lambda *a, run=run: checkpoint(run, *a, use_reentrant=reentrant)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))
    if not reentrant:
        assert saved_bytes(decoder, tokens) < kept / 2


@both
def test_compiles_to_one_graph(strategy: HC | MHC) -> None:
    torch.compiler.reset()
    join, H = connection(strategy), rand(B, T, M, D)
    compiled = torch.compile(join, backend="aot_eager", fullgraph=True)
    a, b = compiled(H, torch.tanh), join(H, torch.tanh)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    inputs = [H, *join.parameters()]
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (a, b)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
