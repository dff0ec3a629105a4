"""Attention over depth against two independent packages, where they are installed: pip install depthlit[oracles]."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from depthlit.connection import Site
from depthlit.residuals import FullAttnRes
from depthlit.residuals.held import Group, Sources
from depthlit.residuals.sources import SourcesConnection
from depthlit.shape import ShapeSpec

pytestmark = pytest.mark.slow
D = 24
SHAPE = ShapeSpec(n_layer=20, d_model=D, n_head=2, vocab_size=7)


def reader(sources: int, gain: bool = True) -> SourcesConnection:
    """A connection in fp32 that reads so many sources, everything at random, its norm's eps as in its keys."""
    torch.manual_seed(sources)
    connection = FullAttnRes(key_gain=gain, norm_eps=1e-6).connect(Site(sources - 1, SHAPE))
    assert isinstance(connection, SourcesConnection)
    for p in connection.parameters():
        torch.nn.init.normal_(p, 0.5, 1.0)
    return connection


def state_of(values: list[Tensor]) -> Sources:
    groups = [Group(v, torch.rsqrt(v.square().mean(-1) + 1e-6)) for v in values]
    return Sources(tuple(groups[:-1]), groups[-1])


def values_of(sources: int) -> list[Tensor]:
    """Sources of unequal norms, leaves."""
    return [(torch.randn(2, 5, D) * 2.0 ** (i % 5 - 2)).requires_grad_() for i in range(sources)]


@pytest.mark.parametrize("sources", [2, 3, 17, 40])
def test_mixture_and_norm_equal_flash_linear_attention(sources: int) -> None:
    """The mixture, the norm behind it, the weights, and the gradients of all; fp32, which is all the package has."""
    package = pytest.importorskip("fla.ops.attnres.naive", reason="pip install flash-linear-attention fla-core einops")
    ours, values = reader(sources), values_of(sources)
    theirs, p = package.naive_attnres(ours.query, values, ours.gain, ours.norm.weight, 1e-6, return_weights=True)
    state = state_of(values)
    mine = ours.norm(ours.read(state))
    torch.testing.assert_close(ours.flow(state).read, p.movedim(0, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    wanted, g = [ours.query, ours.gain, ours.norm.weight, *values], torch.randn_like(mine)
    for a, b in zip(torch.autograd.grad(mine, wanted, g), torch.autograd.grad(theirs, wanted, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))


@pytest.mark.parametrize("sources", [2, 9])
def test_mixture_equals_attn_res(sources: int) -> None:
    """Its two-phase form: saved sources first, the running sum merged by an online softmax. No gain, eps 1e-6."""
    package = pytest.importorskip("attn_res.main", reason="pip install attn-res")
    ours, values = reader(sources, gain=False), values_of(sources)
    norm, query = package.RMSNormNoWeight(), ours.query
    saved = package.two_phase_block_attnres_inference(query[None], torch.stack(values[:-1]), norm)
    running = package.two_phase_block_attnres_inference(query[None], torch.stack(values[-1:]), norm)
    theirs = package.online_softmax_merge(*saved, *running)
    torch.testing.assert_close(ours.read(state_of(values)), theirs.view(2, 5, D), rtol=1e-5, atol=1e-5)
