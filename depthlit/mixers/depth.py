"""Mixtures over depth: many sources of one token, weighed by a softmax, with little kept for backward.

    s_j = k_j (q . u_j) + b_j,    p = softmax_j(s),    z = sum_j (c + m_j p_j) u_j

q is one query for all tokens, m_j a factor on the value of a source. k_j = 1 / sqrt(mean(u_j^2) + eps / m_j^2) makes of
the dot product that with RMSNorm(m_j u_j), so that a normed key is never made. A source u_j is a short combination
of tensors that are alive anyway: a sum alone, or 2 A - C. Nothing is stacked: backward keeps references to those, one
k_j per token and source, and the dot products; whoever reads z next may make it again (`depthlit.recipe`). With g = dz
and s_j' = p_j (m_j g . u_j - sum_i p_i m_i g . u_i):

    du_j = (c + m_j p_j) g + s_j' k_j q,   dq = sum_{t, j} s_j' k_j u_j,   dk_j = s_j' (q . u_j),   db_j = sum_t s_j'

Where the queries of many readers are at hand, `scores` takes the dot products of a tensor with all of them in one
matrix product when it is made; a reader who is handed its own saves two passes here and three in backward.

All other arithmetic is elementwise or a sum, in fp32 or wider: autocast has nothing to change. z has the dtype of the
sources. Derivatives are of first order. Time goes into passes over the sources and, in small networks, into the number
of calls: hence one buffer for all products, and operations on all sources together wherever they are one per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import at_least_fp32
from depthlit.recipe import remember

Parts = tuple[tuple[Tensor, float], ...]
"""sum of factor * tensor (..., D)"""
Rows = tuple[tuple[tuple[int, float], ...], ...]


class Source(NamedTuple):
    parts: Parts
    scale: Tensor  # k: (...) fp32 or wider
    match: Tensor | None = None  # m: (...), one if None


class _Plan(NamedTuple):
    """What of a mixture is no tensor."""

    n_value: int
    n_source: int
    rows: Rows | None  # source j is the sum of factor * values[i] over rows[j]; None: it is values[j]
    matched: tuple[bool, ...]
    constant: float
    null: bool
    scored: tuple[bool, ...]  # of each value: whether its dot products with q came from `scores`

    def unscored(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Of one per value those whose dot products are made here."""
        return [x for x, done in zip(each, self.scored, strict=True) if not done]

    def gather(self, x: list[Tensor]) -> Tensor:
        """From one (...) per value to one per source: (J, ...)."""
        if self.rows is None:
            return torch.stack(x)
        found = []
        for (first, factor), *others in self.rows:
            y = x[first] if factor == 1 else x[first] * factor
            for i, other in others:
                y = torch.add(y, x[i], alpha=other)
            found.append(y)
        return torch.stack(found)

    def scatter(self, y: Tensor) -> Sequence[Tensor]:
        """The transpose: from (J, ...) to one (..., 1) per value."""
        each = y.unsqueeze(-1).unbind()
        if self.rows is None:
            return each
        out: dict[int, Tensor] = {}
        for row, a in zip(self.rows, each, strict=True):
            for i, factor in row:
                out[i] = torch.add(out[i], a, alpha=factor) if i in out else a if factor == 1 else a * factor
        return [out[i] for i in range(self.n_value)]

    def factors(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """k and m, each (J, ...), of what comes behind the values."""
        scales, matches = tensors[: self.n_source], iter(tensors[self.n_source :])
        if not any(self.matched):
            return torch.stack(tuple(scales)), None
        one = torch.ones_like(scales[0])
        return torch.stack(tuple(scales)), torch.stack([next(matches) if has else one for has in self.matched])

    def weigh(self, u: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """p of q . u: (J, ...)"""
        score = u * k
        if bias is not None:
            score = score + bias.view(-1, *[1] * (score.dim() - 1))
        if self.null:
            score = torch.cat((score, torch.zeros_like(score[:1])))
        return score.softmax(0)[: self.n_source]

    def coefficients(self, p: Tensor, m: Tensor | None) -> Sequence[Tensor]:
        """c + m p for each value: (..., 1)."""
        weights = p if m is None else p * m
        return self.scatter(weights + self.constant if self.constant else weights)


def _dots(values: Sequence[Tensor], other: Tensor) -> list[Tensor]:
    """values[i] . other over the last dimension: one (...) each. The products share one buffer."""
    if torch.compiler.is_compiling() or not values:
        return [(v * other).sum(-1) for v in values]
    buffer = torch.empty(values[0].shape, dtype=other.dtype, device=other.device)
    return [torch.mul(v, other, out=buffer).sum(-1) for v in values]


def _sum(values: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """sum of factor (..., 1) * value (..., D), in the dtype of the factors."""
    total = values[0] * factors[0]
    add = torch.addcmul if torch.compiler.is_compiling() else Tensor.addcmul_
    for v, c in zip(values[1:], factors[1:], strict=True):
        total = add(total, v, c)
    return total


def _value(plan: _Plan, dots: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
    """z from the dot products q . u (J, ...): what backward makes again."""
    values, (k, m) = tensors[: plan.n_value], plan.factors(tensors[plan.n_value :])
    return _sum(values, plan.coefficients(plan.weigh(dots, k, bias), m)).to(values[0].dtype)


AT_ONCE = 8
"""For how many sources gradients are made before they are added to what other readers have sent."""


def _gradients(
    g: Tensor, key: Tensor, coefficients: Sequence[Tensor], g_dots: Sequence[Tensor], scored: Sequence[bool]
) -> list[Tensor]:
    """(c + m p) g + s' k q for some values, without the second term where `scores` will send it."""
    each = zip(g_dots, coefficients, scored, strict=True)
    return [g * c if done else (key * a).addcmul_(g, c) for a, c, done in each]


class _Part(torch.autograd.Function):
    """Stands between some values and a mixture of many, and makes their gradients when the mixture has told it g, q and
    the two factors per value. So there are never gradients of all values at once that wait to be added up.

    What it returns in forward has the shapes of these four, and nothing in it.
    """

    @staticmethod
    def forward(ctx: Any, scored: tuple[bool, ...], key: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.scored, shape, nothing = values[0].dtype, scored, values[0].shape, key.new_zeros(())
        factors = (len(values), *shape[:-1], 1)
        return nothing.expand(shape), nothing.expand(key.shape), nothing.expand(factors), nothing.expand(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, key: Tensor, coefficients: Tensor, g_dots: Tensor) -> tuple[Tensor | None, ...]:
        found = _gradients(g, key, coefficients.unbind(), g_dots.unbind(), ctx.scored)
        return None, None, *(x.to(ctx.dtype) for x in found)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, parts: int, key: Tensor, bias: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        tensors = tensors[4 * parts :]  # behind what `_Part` gave
        tensors, given = tensors[: len(tensors) - sum(plan.scored)], iter(tensors[len(tensors) - sum(plan.scored) :])
        own = iter(_dots(plan.unscored(tensors[: plan.n_value]), key))
        dots = plan.gather([next(given) if done else next(own) for done in plan.scored])
        ctx.plan, ctx.parts = plan, parts
        ctx.save_for_backward(key, bias, dots, *tensors)
        ctx.mark_non_differentiable(dots)
        return _value(plan, dots, bias, *tensors), dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        key, bias, u, *tensors = ctx.saved_tensors
        plan: _Plan = ctx.plan
        values, (k, m) = tensors[: plan.n_value], plan.factors(tensors[plan.n_value :])
        wanted, g = ctx.needs_input_grad, g.to(key.dtype)
        p = plan.weigh(u, k, bias)
        g_u = plan.gather(_dots(values, g))  # g . u
        g_p = g_u if m is None else g_u * m
        g_score = p * (g_p - (p * g_p).sum(0))
        g_dots, coefficients = plan.scatter(g_score * k), plan.coefficients(p, m)
        own = plan.unscored(values)
        g_key = _sum(own, plan.unscored(g_dots)).flatten(0, -2).sum(0) if wanted[2] and own else None
        g_bias = g_score.flatten(1).sum(1) if wanted[3] else None
        told: list[Tensor] = []
        for i in range(0, ctx.parts * AT_ONCE, AT_ONCE):
            some = slice(i, i + AT_ONCE)
            told += g, key, torch.stack(tuple(coefficients[some])), torch.stack(tuple(g_dots[some]))
        g_values: list[Tensor | None] = [None] * len(values)
        if not ctx.parts and any(wanted[4 : 4 + len(values)]):
            g_values = [x.to(values[0].dtype) for x in _gradients(g, key, coefficients, g_dots, plan.scored)]
        g_m = () if m is None else [x for x, has in zip((p * g_u).unbind(), plan.matched, strict=True) if has]
        g_given = [x.squeeze(-1) for x, done in zip(g_dots, plan.scored, strict=True) if done]
        return None, None, g_key, g_bias, *told, *g_values, *(g_score * u).unbind(), *g_m, *g_given


def _planned(
    sources: Sequence[Source], constant: float, null: bool, scored: Mapping[int, Tensor]
) -> tuple[_Plan, list[Tensor]]:
    """Each tensor once, however many sources have a part in it."""
    place: dict[int, int] = {}
    values: list[Tensor] = []
    rows = []
    for source in sources:
        row = []
        for tensor, factor in source.parts:
            i = place.setdefault(id(tensor), len(values))
            if i == len(values):
                values.append(tensor)
            row.append((i, factor))
        rows.append(tuple(row))
    plain = all(row == ((i, 1.0),) for i, row in enumerate(rows))
    matched = tuple(source.match is not None for source in sources)
    done = tuple(id(value) in scored for value in values)
    plan = _Plan(len(values), len(rows), None if plain else tuple(rows), matched, constant, null, done)
    matches = [source.match for source in sources if source.match is not None]
    return plan, [*values, *(source.scale for source in sources), *matches]


def _wide(key: Tensor, value: Tensor) -> Tensor:
    return key.to(torch.promote_types(value.dtype, torch.promote_types(key.dtype, torch.float32)))


def mix(
    sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, constant: float = 0.0, null: bool = False,
    scored: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:  # fmt: skip
    """z, (..., D) in the dtype of the sources.

    Args:
        sources: at least one; each part (..., D).
        key: (D,) the query q, times the gain of the keys' norm.
        bias: (J,) b in fp32 or wider, zero if None.
        constant: c, what every source counts anyway.
        null: let one more source take part in the softmax, of score and value zero.
        scored: by the id of a part, its dot products (...) with q, where `scores` has them.
    """
    plan, tensors = _planned(sources, constant, null, scored)
    key = _wide(key, tensors[0])
    if torch.compiler.is_compiling():
        return _value(plan, plan.gather(_dots(tensors[: plan.n_value], key)), bias, *tensors)
    values, told = tensors[: plan.n_value], list[Tensor]()
    parts = -(-plan.n_value // AT_ONCE) if plan.n_value > 1.5 * AT_ONCE and torch.is_grad_enabled() else 0
    for i in range(0, parts * AT_ONCE, AT_ONCE):
        some = slice(i, i + AT_ONCE)
        told += _Part.apply(plan.scored[some], key.detach(), *values[some])
    given = [scored[id(value)] for value in values if id(value) in scored]
    z, dots = _Mix.apply(plan, parts, key, bias, *told, *tensors, *given)
    return remember(z, partial(_value, plan), dots, bias, *tensors)


def weights(sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, null: bool = False) -> Tensor:
    """p, (..., J) in fp32 or wider: what each source takes of the softmax. For those who look; not lean."""
    plan, tensors = _planned(sources, 0.0, null, {})
    key, values = _wide(key, tensors[0]), tensors[: plan.n_value]
    k, _ = plan.factors(tensors[plan.n_value :])
    return plan.weigh(plan.gather([(v * key).sum(-1) for v in values]), k, bias).movedim(0, -1)


class _Scores(torch.autograd.Function):
    """Keeps references."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(keys, value)
        with torch.autocast(value.device.type, enabled=False):
            return (keys @ value.to(keys.dtype).flatten(0, -2).t()).view(-1, *value.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        keys, value = ctx.saved_tensors
        with torch.autocast(value.device.type, enabled=False):
            g = g.flatten(1)
            return g @ value.to(keys.dtype).flatten(0, -2), (g.t() @ keys).view(value.shape).to(value.dtype)


def scores(keys: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Dot products of one tensor with the queries of many readers, by one matrix product.

    Args:
        keys: (R, D) queries times gains.
        value: (..., D).

    Returns:
        One (...) per reader, in fp32 or wider.
    """
    return _Scores.apply(_wide(keys, value), value).unbind()


# ------------------------------------------------------------------------------------------------ loudness of sources


class Loudness(NamedTuple):
    scale: Tensor  # k (...)
    square: Tensor  # mean(u^2) (...), without gradient
    match: Tensor | None  # m (...), without gradient


class Match(NamedTuple):
    """m = clip( RMS(C) / (RMS(u) + eps), 1 / most, most ) makes u as loud as C."""

    square: Tensor  # mean(C^2) (...)
    most: float
    eps: float

    def of(self, square: Tensor) -> Tensor:
        """m (...) from mean(u^2), without gradient."""
        loud, soft = self.square.detach().sqrt(), square.detach().sqrt()
        return (loud / (soft + self.eps)).clamp(1 / self.most, self.most)


def _combine(factors: tuple[float, ...], tensors: Sequence[Tensor]) -> Tensor:
    """u divided by the first factor, in one pass, in fp32 or wider; the tensor itself where there is nothing to add."""
    total = at_least_fp32(tensors[0])
    for factor, tensor in zip(factors[1:], tensors[1:], strict=True):
        total = torch.add(total, tensor, alpha=factor / factors[0])
    return total


def _loudness(
    factors: tuple[float, ...], eps: float, match: Match | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    u = _combine(factors, tensors)
    square = torch.linalg.vector_norm(u, dim=-1).square() * (factors[0] ** 2 / u.shape[-1])
    if match is None:
        return torch.rsqrt(square + eps), square, None
    m = match.of(square)
    return torch.rsqrt(square + eps / m.square()), square, m


class _Loudness(torch.autograd.Function):
    """Keeps references to the parts, and k."""

    @staticmethod
    def forward(ctx: Any, factors: tuple[float, ...], eps: float, match: Match | None, *tensors: Tensor) -> Any:
        k, square, m = _loudness(factors, eps, match, *tensors)
        ctx.factors = factors
        ctx.save_for_backward(k, *tensors)
        ctx.mark_non_differentiable(square, *(() if m is None else (m,)))
        return k, square, m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dk/du = -k^3 u / D, whatever m is."""
        (k, *tensors), factors = ctx.saved_tensors, ctx.factors
        u = _combine(factors, tensors)
        first = u * (k.pow(3).mul_(g).mul_(-(factors[0] ** 2) / u.shape[-1])).unsqueeze(-1)
        others = [(first * (factor / factors[0])).to(tensors[0].dtype) for factor in factors[1:]]
        return None, None, None, first.to(tensors[0].dtype), *others


def loudness(parts: Parts, eps: float, match: Match | None = None) -> Loudness:
    """How loud a source u is, and what that makes of its key: k = 1 / sqrt(mean(u^2) + eps / m^2).

    Args:
        parts: of u, each (..., D).
        eps: of the keys' norm.
        match: what m is to do; m is a constant to k, and one if None.

    Returns:
        k in fp32 or wider, mean(u^2), and m. An all-zero u has k = m / sqrt(eps), with gradient zero.
    """
    factors, tensors = tuple(factor for _, factor in parts), [tensor for tensor, _ in parts]
    if not torch.compiler.is_compiling():
        return Loudness(*_Loudness.apply(factors, eps, match, *tensors))
    k, square, m = _loudness(factors, eps, match, *tensors)
    return Loudness(k, square.detach(), m)


def again(total: Loudness, eps: float, match: Match) -> Loudness:
    """The loudness of a source that is another one once more, up to its sign: without a pass over it.

    Args:
        total: of the other, with the same `eps` and no match.
        eps: of the keys' norm.
        match: what m is to do.
    """
    m = match.of(total.square)
    return Loudness(torch.rsqrt(total.scale.pow(-2) + eps * (m.pow(-2) - 1)), total.square, m)
