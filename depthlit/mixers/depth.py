"""Mixtures over depth: many sources of one token, weighed by a softmax, with little kept for backward.

    s_j = k_j (q . u_j) + b_j,    p = softmax_j(s),    z = sum_j (c_j + m_j p_j) u_j

q is one query for all tokens, m_j a factor on the value of a source. k_j = 1 / sqrt(mean(u_j^2) + eps / m_j^2) makes of
the dot product that with RMSNorm(m_j u_j), so that a normed key is never made. A source u_j is a short combination
of tensors that are alive anyway: a sum alone, or 2 A - C. Nothing is stacked: backward keeps references to those, one
k_j per token and source, and the dot products; whoever reads z next may make it again (`depthlit.recipe`). With g = dz
and s_j' = p_j (m_j g . u_j - sum_i p_i m_i g . u_i):

    du_j = (c_j + m_j p_j) g + s_j' k_j q,   dq = sum_{t, j} s_j' k_j u_j,   dk_j = s_j' (q . u_j),   db_j = sum_t s_j'

Arithmetic is in fp32 or wider, also under autocast; z has the dtype of the sources. Derivatives are of first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import at_least_fp32
from depthlit.recipe import remember

Parts = tuple[tuple[Tensor, float], ...]
"""sum of factor * tensor (..., D)"""


class Source(NamedTuple):
    parts: Parts
    scale: Tensor  # k: (...) fp32 or wider
    match: Tensor | None = None  # m: (...), one if None
    constant: float = 0.0  # c


class _Plan(NamedTuple):
    """What of a mixture is no tensor: source j is the sum of factor * values[i] over the (i, factor) of rows[j]."""

    rows: tuple[tuple[tuple[int, float], ...], ...]
    n_value: int
    matched: tuple[bool, ...]
    constants: tuple[float, ...]
    null: bool

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Tensor | None]]:
        """Values, scales, matches."""
        J, left = len(self.rows), iter(tensors[self.n_value + len(self.rows) :])
        matches = [next(left) if matched else None for matched in self.matched]
        return tensors[: self.n_value], tensors[self.n_value : self.n_value + J], matches

    def gather(self, x: Sequence[Tensor]) -> list[Tensor]:
        """From one (...) per value to one per source."""
        out = []
        for (first, factor), *others in self.rows:
            y = x[first] if factor == 1 else x[first] * factor
            for i, other in others:
                y = torch.add(y, x[i], alpha=other)
            out.append(y)
        return out

    def scatter(self, y: Sequence[Tensor]) -> list[Tensor]:
        """The transpose: from one (...) per source to one per value."""
        out: list[Tensor | None] = [None] * self.n_value
        for row, a in zip(self.rows, y, strict=True):
            for i, factor in row:
                old = out[i]
                out[i] = torch.add(old, a, alpha=factor) if old is not None else a if factor == 1 else a * factor
        return out  # type: ignore[return-value]  # every value is in some row


def _exactly(x: Tensor) -> torch.autocast:
    """No autocast where x lives."""
    return torch.autocast(x.device.type, enabled=False)


def _dots(values: Sequence[Tensor], other: Tensor) -> list[Tensor]:
    """values[i] . other over the last dimension: one (...) each. The products share one buffer."""
    if torch.compiler.is_compiling():
        return [(v * other).sum(-1) for v in values]
    buffer = torch.empty(values[0].shape, dtype=other.dtype, device=other.device)
    return [torch.mul(v, other, out=buffer).sum(-1) for v in values]


def _weigh(plan: _Plan, dots: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, ...]:
    """q . u, k and p, each (J, ...)."""
    u, k = torch.stack(plan.gather(dots)), torch.stack(tuple(scales))
    score = u * k
    if bias is not None:
        score = score + bias.to(score.dtype).view(-1, *[1] * (score.dim() - 1))
    if plan.null:
        score = torch.cat((score, torch.zeros_like(score[:1])))
    return u, k, score.softmax(0)[: len(plan.rows)]


def _coefficients(plan: _Plan, p: Tensor, matches: Sequence[Tensor | None]) -> list[Tensor]:
    """c + m p for each value: (..., 1)."""
    weights = [a if m is None else a * m for a, m in zip(p, matches, strict=True)]
    weights = [a + c if c else a for a, c in zip(weights, plan.constants, strict=True)]
    return [c.unsqueeze(-1) for c in plan.scatter(weights)]


def _sum(values: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """sum of factor (..., 1) * value (..., D), in the dtype of the factors."""
    total = values[0] * factors[0]
    for v, c in zip(values[1:], factors[1:], strict=True):
        total = torch.addcmul(total, v, c) if torch.compiler.is_compiling() else total.addcmul_(v, c)
    return total


def _value(plan: _Plan, dots: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
    """z from the dot products (N, ...): what backward makes again."""
    values, scales, matches = plan.split(tensors)
    with _exactly(dots):
        p = _weigh(plan, dots.unbind(), scales, bias)[-1]
        return _sum(values, _coefficients(plan, p, matches)).to(values[0].dtype)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, key: Tensor, bias: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with _exactly(key):
            dots = torch.stack(_dots(tensors[: plan.n_value], key))
        ctx.plan = plan
        ctx.save_for_backward(key, bias, dots, *tensors)
        ctx.mark_non_differentiable(dots)
        return _value(plan, dots, bias, *tensors), dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        key, bias, dots, *tensors = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wanted = ctx.needs_input_grad[3:]
        with _exactly(key):
            values, scales, matches = plan.split(tensors)
            g = g.to(key.dtype)
            u, k, p = _weigh(plan, dots.unbind(), scales, bias)
            g_u = plan.gather(_dots(values, g))  # g . u
            g_p = torch.stack([a if m is None else a * m for a, m in zip(g_u, matches, strict=True)])
            g_score = p * (g_p - (p * g_p).sum(0))
            g_dots = [a.unsqueeze(-1) for a in plan.scatter((g_score * k).unbind())]
            g_key = _sum(values, g_dots).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
            g_bias = None if bias is None else g_score.flatten(1).sum(1).to(bias.dtype)
            g_matches = [(a * b).to(m.dtype) for a, b, m in zip(p, g_u, matches, strict=True) if m is not None]
            g_values = [
                (key * a).addcmul_(g, c).to(v.dtype) if want else None
                for v, a, c, want in zip(values, g_dots, _coefficients(plan, p, matches), wanted, strict=False)
            ]
        return None, g_key, g_bias, *g_values, *(g_score * u).unbind(), *g_matches


def _wide(key: Tensor, value: Tensor) -> Tensor:
    return key.to(torch.promote_types(value.dtype, torch.promote_types(key.dtype, torch.float32)))


def _planned(sources: Sequence[Source], null: bool) -> tuple[_Plan, list[Tensor]]:
    """Each tensor once, however many sources have a part in it."""
    place: dict[int, int] = {}
    values: list[Tensor] = []
    for source in sources:
        for tensor, _ in source.parts:
            if id(tensor) not in place:
                place[id(tensor)] = len(values)
                values.append(tensor)
    rows = tuple(tuple((place[id(tensor)], factor) for tensor, factor in source.parts) for source in sources)
    matches = [source.match for source in sources if source.match is not None]
    plan = _Plan(
        rows,
        len(values),
        tuple(source.match is not None for source in sources),
        tuple(source.constant for source in sources),
        null,
    )
    return plan, [*values, *(source.scale for source in sources), *matches]


def mix(sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, null: bool = False) -> Tensor:
    """z, (..., D) in the dtype of the sources.

    Args:
        sources: at least one; each part (..., D).
        key: (D,) the query q, times the gain of the key's norm.
        bias: (J,) b, zero if None.
        null: let one more source take part in the softmax, of score and value zero.
    """
    plan, tensors = _planned(sources, null)
    key = _wide(key, tensors[0])
    if torch.compiler.is_compiling():
        with _exactly(key):
            dots = torch.stack(_dots(tensors[: plan.n_value], key))
        return _value(plan, dots, bias, *tensors)
    z, dots = _Mix.apply(plan, key, bias, *tensors)
    return remember(z, partial(_value, plan), dots, bias, *tensors)


def weights(sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, null: bool = False) -> Tensor:
    """p, (..., J) in fp32 or wider: what each source takes of the softmax. For those who look; not lean."""
    plan, tensors = _planned(sources, null)
    key = _wide(key, tensors[0])
    values, scales, _ = plan.split(tensors)
    with _exactly(key):
        return _weigh(plan, [(v * key).sum(-1) for v in values], scales, bias)[-1].movedim(0, -1)


# ------------------------------------------------------------------------------------------------ loudness of sources


def _combine(factors: tuple[float, ...], tensors: Sequence[Tensor]) -> Tensor:
    """u divided by the first factor, in one pass, in fp32 or wider; the tensor itself where there is nothing to add."""
    total = at_least_fp32(tensors[0])
    for factor, tensor in zip(factors[1:], tensors[1:], strict=True):
        total = torch.add(total, tensor, alpha=factor / factors[0])
    return total


def _mean_square(factors: tuple[float, ...], *tensors: Tensor) -> Tensor:
    with _exactly(tensors[0]):
        u = _combine(factors, tensors)
        return torch.linalg.vector_norm(u, dim=-1).square() * (factors[0] ** 2 / u.shape[-1])


class _MeanSquare(torch.autograd.Function):
    """Keeps references to the parts."""

    @staticmethod
    def forward(ctx: Any, factors: tuple[float, ...], *tensors: Tensor) -> Tensor:
        ctx.factors = factors
        ctx.save_for_backward(*tensors)
        return _mean_square(factors, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tensors, factors = ctx.saved_tensors, ctx.factors
        with _exactly(g):
            u = _combine(factors, tensors)
            first = u * (g * (2 * factors[0] ** 2 / u.shape[-1])).unsqueeze(-1)
            others = [(first * (factor / factors[0])).to(tensors[0].dtype) for factor in factors[1:]]
            return None, first.to(tensors[0].dtype), *others


def mean_square(parts: Parts) -> Tensor:
    """mean(u^2) over the last dimension of u, a sum of factor * part: (...) in fp32 or wider.

    Args:
        parts: of u, each (..., D).
    """
    factors, tensors = tuple(factor for _, factor in parts), [tensor for tensor, _ in parts]
    return (_mean_square if torch.compiler.is_compiling() else _MeanSquare.apply)(factors, *tensors)


@torch.no_grad()
def loudness(target: Tensor, square: Tensor, most: float, eps: float) -> Tensor:
    """m = clip(RMS(C) / (RMS(u) + eps), 1 / most, most), (...): makes u as loud as C. It carries no gradient.

    Args:
        target: (...) mean square of C.
        square: (...) mean square of u.
        most: largest factor.
        eps: added to the RMS of u.
    """
    return (target.sqrt() / (square.sqrt() + eps)).clamp(1 / most, most)
