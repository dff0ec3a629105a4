"""Mixtures over depth: many sources of one token, weighed by a softmax, with little kept for backward.

    s_j = k_j (q . u_j) + b_j,    p = softmax_j(s),    z = sum_j (c + m_j p_j) u_j

q is one query for all tokens, m_j a factor on the value of a source. k_j = 1 / sqrt(mean(u_j^2) + eps / m_j^2) makes of
the dot product that with RMSNorm(m_j u_j), so that a normed key is never made. A source u_j is a short combination
of tensors that are alive anyway: a sum alone, or 2 A - C. Nothing is stacked: backward keeps references to those, one
k_j per token and source, and the dot products; whoever reads z next may make it again (`depthlit.recipe`). With g = dz
and s_j' = p_j (m_j g . u_j - sum_i p_i m_i g . u_i):

    du_j = (c + m_j p_j) g + s_j' k_j q,   dq = sum_{t, j} s_j' k_j u_j,   dk_j = s_j' (q . u_j),   db_j = sum_t s_j'

Where the queries of many readers are at hand, `depthlit.mixers.ahead` takes the dot products of a tensor with all of
them in one matrix product, and mixes for several readers at once what they all will read. What was mixed ahead is one
more source here, whose score is the logarithm of the sum of exp(s_j) over what is in it.

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

from depthlit.recipe import keep, kept, remember

Parts = tuple[tuple[Tensor, float], ...]
"""sum of factor * tensor (..., D)"""
Rows = tuple[tuple[tuple[int, float], ...], ...]


class Source(NamedTuple):
    parts: Parts
    scale: Tensor  # k: (...) fp32 or wider
    match: Tensor | None = None  # m: (...), one if None


class Ahead(NamedTuple):
    """What was mixed ahead for one reader."""

    mixture: Tensor  # (..., D) in fp32 or wider: sum of m_j p_j u_j, with a softmax among these alone
    weight: Tensor  # (...): the logarithm of the sum of exp(s_j)
    match: Tensor | None = None  # (...): what was left out of m_j, being the same for all; one if None
    base: Tensor | None = None  # (..., D) in fp32 or wider: c times their sum


class Plan(NamedTuple):
    """What of a mixture is no tensor."""

    n_value: int
    n_source: int
    rows: Rows | None  # source j is the sum of factor * values[i] over rows[j]; None: it is values[j]
    matched: tuple[bool, ...]
    constant: float
    null: bool
    scored: tuple[bool, ...]  # of each value: whether its dot products with q came from `depthlit.mixers.ahead`
    ahead: bool = False  # the last source was mixed ahead: it has no constant

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
        if self.constant and self.ahead:
            weights = torch.cat((weights[:-1] + self.constant, weights[-1:]))
        elif self.constant:
            weights = weights + self.constant
        return self.scatter(weights)


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


def _value(plan: Plan, dots: Tensor, bias: Tensor | None, base: Tensor | None, *tensors: Tensor) -> Tensor:
    """z from the dot products q . u (J, ...): what backward makes again."""
    values, (k, m) = tensors[: plan.n_value], plan.factors(tensors[plan.n_value :])
    z = _sum(values, plan.coefficients(plan.weigh(dots, k, bias), m))
    return (z if base is None else z + base).to(values[0].dtype)


AT_ONCE = 8
"""For how many sources gradients are made before they are added to what other readers have sent."""


def _gradients(
    g: Tensor, key: Tensor, coefficients: Sequence[Tensor], g_dots: Sequence[Tensor], scored: Sequence[bool]
) -> list[Tensor]:
    """(c + m p) g + s' k q for some values, without the second term where another will send it."""
    each = zip(g_dots, coefficients, scored, strict=True)
    return [g * c if done else (key * a).addcmul_(g, c) for a, c, done in each]


class _Part(torch.autograd.Function):
    """Stands between some values and a mixture of many, and makes their gradients when the mixture has told it g, q and
    the two factors per value. So there are never gradients of all values at once that wait to be added up.

    What it returns in forward has the shapes of these four, and nothing in it.
    """

    @staticmethod
    def forward(ctx: Any, scored: tuple[bool, ...], key: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes, ctx.scored = [value.dtype for value in values], scored
        shape, nothing = values[0].shape, key.new_zeros(())
        factors = (len(values), *shape[:-1], 1)
        return nothing.expand(shape), nothing.expand(key.shape), nothing.expand(factors), nothing.expand(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, key: Tensor, coefficients: Tensor, g_dots: Tensor) -> tuple[Tensor | None, ...]:
        found = _gradients(g, key, coefficients.unbind(), g_dots.unbind(), ctx.scored)
        return None, None, *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, parts: int, key: Tensor, bias: Tensor | None, base: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        tensors = tensors[4 * parts :]  # behind what `_Part` gave
        tensors, given = tensors[: len(tensors) - sum(plan.scored)], iter(tensors[len(tensors) - sum(plan.scored) :])
        own = iter(_dots(plan.unscored(tensors[: plan.n_value]), key))
        dots = plan.gather([next(given) if done else next(own) for done in plan.scored])
        ctx.plan, ctx.parts = plan, parts
        keep(ctx, key, bias, dots, *tensors)
        ctx.mark_non_differentiable(dots)
        return _value(plan, dots, bias, base, *tensors), dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        key, bias, u, *tensors = kept(ctx)
        plan: Plan = ctx.plan
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
        if not ctx.parts and any(wanted[5 : 5 + len(values)]):
            found = _gradients(g, key, coefficients, g_dots, plan.scored)
            g_values = [x.to(value.dtype) for x, value in zip(found, values, strict=True)]
        g_m = () if m is None else [x for x, has in zip((p * g_u).unbind(), plan.matched, strict=True) if has]
        g_given = [x.squeeze(-1) for x, done in zip(g_dots, plan.scored, strict=True) if done]
        g_base = g if wanted[4] else None
        return None, None, g_key, g_bias, g_base, *told, *g_values, *(g_score * u).unbind(), *g_m, *g_given


def planned(
    sources: Sequence[Source], constant: float, null: bool, scored: Mapping[int, Tensor], ahead: bool = False
) -> tuple[Plan, list[Tensor]]:
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
    plan = Plan(len(values), len(rows), None if plain else tuple(rows), matched, constant, null, done, ahead)
    matches = [source.match for source in sources if source.match is not None]
    return plan, [*values, *(source.scale for source in sources), *matches]


def wide(key: Tensor, value: Tensor) -> Tensor:
    return key.to(torch.promote_types(value.dtype, torch.promote_types(key.dtype, torch.float32)))


def mix(
    sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, constant: float = 0.0, null: bool = False,
    scored: Mapping[int, Tensor] = MappingProxyType({}), ahead: Ahead | None = None,
) -> Tensor:  # fmt: skip
    """z, (..., D) in the dtype of the sources.

    Args:
        sources: at least one; each part (..., D).
        key: (D,) the query q, times the gain of the keys' norm.
        bias: (J,) b in fp32 or wider, zero if None.
        constant: c, what every source counts anyway.
        null: let one more source take part in the softmax, of score and value zero.
        scored: by the id of a part, its dot products (...) with q, where they were taken ahead.
        ahead: sources that are not among these.
    """
    if ahead is not None:
        sources = [*sources, Source(((ahead.mixture, 1.0),), torch.ones_like(ahead.weight), ahead.match)]
        scored = {**scored, id(ahead.mixture): ahead.weight}
        bias = None if bias is None else torch.cat((bias, bias.new_zeros(1)))
    base = None if ahead is None else ahead.base
    plan, tensors = planned(sources, constant, null, scored, ahead is not None)
    key = wide(key, tensors[0])
    if torch.compiler.is_compiling():
        return _value(plan, plan.gather(_dots(tensors[: plan.n_value], key)), bias, base, *tensors)
    values, told = tensors[: plan.n_value], list[Tensor]()
    parts = -(-plan.n_value // AT_ONCE) if plan.n_value > 1.5 * AT_ONCE and torch.is_grad_enabled() else 0
    for i in range(0, parts * AT_ONCE, AT_ONCE):
        some = slice(i, i + AT_ONCE)
        told += _Part.apply(plan.scored[some], key.detach(), *values[some])
    given = [scored[id(value)] for value in values if id(value) in scored]
    z, dots = _Mix.apply(plan, parts, key, bias, base, *told, *tensors, *given)
    return remember(z, partial(_value, plan), dots, bias, base, *tensors)


def weights(sources: Sequence[Source], key: Tensor, bias: Tensor | None = None, null: bool = False) -> Tensor:
    """p, (..., J) in fp32 or wider: what each source takes of the softmax. For those who look; not lean."""
    plan, tensors = planned(sources, 0.0, null, {})
    key, values = wide(key, tensors[0]), tensors[: plan.n_value]
    k, _ = plan.factors(tensors[plan.n_value :])
    return plan.weigh(plan.gather([(v * key).sum(-1) for v in values]), k, bias).movedim(0, -1)
