"""Reading ahead: what many readers will ask of tensors that are there, asked once for all of them.

Their dot products with all queries are one matrix product. And for the next G readers the sources that are there are
mixed at once (two-phase attention over depth; arXiv:2603.15031 describes it for inference): with s_jr the score of
source j for reader r,

    w_r = log sum_j exp(s_jr),    z_r = sum_j m_j exp(s_jr - w_r) u_j

which for one token are G mixtures of the same tensors, a (G, S) times an (S, D) matrix. Reader r then mixes z_r, at the
score w_r, with what came since. With g_r = dz_r and h_r = dw_r:

    du_j = sum_r m_j p_jr g_r,    ds_jr = p_jr (m_j g_r . u_j - sum_i p_ir m_i g_r . u_i + h_r)

What is stacked, of a few tokens at a time, is not kept: backward has references, and makes z again, for all readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import exactly
from depthlit.mixers.depth import Plan, Source, planned, wide
from depthlit.recipe import remember_all

BLOCK = {"cpu": 2**20, "elsewhere": 2**28}
"""Bytes that are stacked at a time: few on a CPU, whose caches they should not leave."""
AT_ONCE = 16
"""For how many tensors gradients are made before they are added to what other readers have sent."""


class _Scores(torch.autograd.Function):
    """Keeps references."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(keys, value)
        with exactly(value):
            return (keys @ value.to(keys.dtype).flatten(0, -2).t()).view(len(keys), *value.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        keys, value = ctx.saved_tensors
        with exactly(value):
            g = g.flatten(1)
            return g @ value.to(keys.dtype).flatten(0, -2), (g.t() @ keys).view(value.shape).to(value.dtype)


def scores(keys: Tensor, value: Tensor) -> Tensor:
    """Dot products of one tensor with the queries of many readers: (R, ...) in fp32 or wider.

    Args:
        keys: (R, D) queries times gains.
        value: (..., D).
    """
    return _Scores.apply(wide(keys, value), value)


def _stacked(dtype: torch.dtype, *each: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Some tokens at a time, of each list of S tensors (N, D): (n, S, D), good until the next ones are asked for."""
    (N, D), like = each[0][0].shape, each[0][0]
    rows = sum(map(len, each)) * D * dtype.itemsize
    n = min(-(-BLOCK["cpu" if like.device.type == "cpu" else "elsewhere"] // rows), max(N, 1))
    room = [like.new_empty(len(tensors), n, D, dtype=dtype) for tensors in each]  # new ones would come page by page
    split = [list(zip(*(x.split(n) for x in tensors), strict=True)) for tensors in each]
    start = 0
    for rows in zip(*split, strict=True):
        stop = start + len(rows[0][0])
        stacks = [torch.stack(xs, out=own[:, : stop - start]) for xs, own in zip(rows, room, strict=True)]
        yield slice(start, stop), [stack.transpose(0, 1) for stack in stacks]
        start = stop


def _products(left: Tensor, right: Sequence[Tensor]) -> list[Tensor]:
    """(N, K, S) times S tensors (N, D): K tensors (N, D), in the dtype of the first."""
    out = [right[0].new_empty(right[0].shape, dtype=left.dtype) for _ in range(left.shape[1])]
    with exactly(left):
        for some, (stack,) in _stacked(left.dtype, right):
            for x, y in zip(out, torch.bmm(left[some], stack).unbind(1), strict=True):
                x[some] = y
    return out


def _weigh(bias: Tensor | None, u: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """p (J, G, ...) and w (G, ...)."""
    score = u * k.unsqueeze(1)
    if bias is not None:
        score = score + bias.view(*bias.shape, *[1] * (score.dim() - 2))
    w = score.logsumexp(0)
    return (score - w).exp(), w


def _coefficients(plan: Plan, p: Tensor, m: Tensor | None) -> Tensor:
    """m p for each value: (N, G, V)."""
    each = plan.scatter(p if m is None else p * m.unsqueeze(1))
    return torch.stack([x.flatten(1) for x in each]).permute(2, 1, 0).contiguous()


def _split(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor | None, Tensor]:
    """The values, k, m and u = q . u_j (J, G, ...)."""
    values, given = tensors[: plan.n_value], list(tensors[-plan.n_value :])
    k, m = plan.factors(tensors[plan.n_value : -plan.n_value])
    return values, k, m, plan.gather(given)


def _mixtures(plan: Plan, bias: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """z (..., D) of each reader: what backward makes again."""
    values, k, m, u = _split(plan, tensors)
    c = _coefficients(plan, _weigh(bias, u, k)[0], m)
    return [z.view_as(values[0]) for z in _products(c, [v.flatten(0, -2) for v in values])]


class _Part(torch.autograd.Function):
    """As in `depthlit.mixers.depth`: makes the gradients of some values when the mixtures have told it g and m p."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype, shape, G, nothing = values[0].dtype, values[0].shape, len(like), like.new_zeros(())
        return nothing.expand(shape[:-1].numel(), G, len(values)), *(nothing.expand(shape) for _ in range(G))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor, *g: Tensor) -> tuple[Tensor | None, ...]:
        found = _products(c.transpose(1, 2), [x.flatten(0, -2) for x in g])
        return None, *(x.view_as(g[0]).to(ctx.dtype) for x in found)


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, parts: int, bias: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = tensors[len(tensors) - 2 * plan.n_value - plan.n_source - sum(plan.matched) :]  # behind `_Part`'s
        ctx.plan, ctx.parts = plan, parts
        ctx.save_for_backward(bias, *tensors)
        _, k, _, u = _split(plan, tensors)
        return *_mixtures(plan, bias, *tensors), *_weigh(bias, u, k)[1].unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, (bias, *tensors) = ctx.plan, ctx.saved_tensors
        values, k, m, u = _split(plan, tensors)
        p, _ = _weigh(bias, u, k)
        G = len(grads) // 2
        g, h = grads[:G], torch.stack(grads[G:])
        dots = _dots(g, values).permute(2, 1, 0).contiguous().view(len(values), *h.shape)
        g_u = plan.gather(list(dots))  # g . u
        g_p = g_u if m is None else g_u * m.unsqueeze(1)
        g_score = p * (g_p - (p * g_p).sum(0) + h)
        c = _coefficients(plan, p, m)
        told: list[Tensor] = []
        for i in range(0, ctx.parts * AT_ONCE, AT_ONCE):
            told += c[..., i : i + AT_ONCE], *g
        g_bias = g_score.flatten(2).sum(2) if bias is not None else None
        g_k = (g_score * u).sum(1).unbind()
        g_m = () if m is None else [x for x, has in zip((p * g_u).sum(1).unbind(), plan.matched, strict=True) if has]
        g_given = [x.squeeze(-1) for x in plan.scatter(g_score * k.unsqueeze(1))]
        return None, None, g_bias, *told, *(None for _ in values), *g_k, *g_m, *g_given


def _dots(g: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """(N, G, V)"""
    left, right = [x.flatten(0, -2) for x in g], [x.flatten(0, -2) for x in values]
    with exactly(g[0]):
        return torch.cat([torch.bmm(a, b.transpose(1, 2)) for _, (a, b) in _stacked(g[0].dtype, left, right)])


def mix_ahead(
    sources: Sequence[Source], scored: dict[int, Tensor], bias: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For each of G readers z (..., D) and w (...), in fp32 or wider.

    Args:
        sources: at least one; each part (..., D).
        scored: by the id of a part, its dot products (G, ...), of `scores`.
        bias: (J, G) in fp32 or wider, zero if None.
    """
    plan, tensors = planned(sources, 0.0, False, scored)
    values = tensors[: plan.n_value]
    given = [scored[id(value)] for value in values]
    told: list[Tensor] = []
    parts = range(0, len(values), AT_ONCE)
    for i in parts:
        told += _Part.apply(given[0].detach(), *values[i : i + AT_ONCE])
    found = _Ahead.apply(plan, len(parts), bias, *told, *tensors, *given)
    z, w = found[: len(found) // 2], found[len(found) // 2 :]
    remember_all(z, partial(_mixtures, plan), bias, *tensors, *given)
    return list(zip(z, w, strict=True))
