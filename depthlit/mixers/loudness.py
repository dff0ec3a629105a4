"""How loud a source is, which is what the norm of its key comes down to. See `depthlit.mixers.depth`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import at_least_fp32
from depthlit.mixers.depth import Parts


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
