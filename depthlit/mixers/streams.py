"""The arithmetic of several streams, H (..., M, D), with little kept for backward.

    z = H W^T,  s = mean(H^2)          `project`: one matrix product; who needs a norm divides z by it afterwards
    x = sum_m a[m] H[m]                `read`
    H'[o] = sum_i A[o, i] H[i] + b[o] y        `write`; A is indexed (out, in)

`project` and `read` return H as well. Whoever goes on with that H, and not with the argument, lets backward add up the
gradient of H in passing. Backward of all three needs H: of every two writes in a row only one H is kept, the other is
made again from the first (`depthlit.recipe`), and so is x. Coefficients are fp32 or wider, so is all arithmetic, also
under autocast; H and x have the dtype of the stream. All derivatives are of first order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import at_least_fp32
from depthlit.recipe import keep, kept, recipe_of, remember, same


def _exactly(x: Tensor) -> torch.autocast:
    """No autocast where x lives."""
    return torch.autocast(x.device.type, enabled=False)


def _project(H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor]:
    with _exactly(H):
        rows = at_least_fp32(H.flatten(-2) if together else H)
        square = torch.linalg.vector_norm(rows, dim=-1).square() / rows.shape[-1]
        z = weight.to(rows.dtype) @ rows.flatten(0, -2).t()
        return z.view(-1, *square.shape), square


def _read(H: Tensor, weights: Tensor) -> Tensor:
    with _exactly(H):
        return torch.matmul(weights.unsqueeze(-2), at_least_fp32(H)).squeeze(-2).to(H.dtype)


def _write(H: Tensor, carry: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    with _exactly(H):
        mixed = torch.matmul(carry, at_least_fp32(H))
        return mixed.addcmul_(weights.unsqueeze(-1), at_least_fp32(y).unsqueeze(-2)).to(H.dtype)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor, Tensor]:
        keep(ctx, H, weight)
        return H, *_project(H, weight, together)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_H: Tensor, g_z: Tensor, g_square: Tensor) -> tuple[Tensor, Tensor | None, None]:
        H, weight = kept(ctx)
        with _exactly(H):
            rows = at_least_fp32(H).reshape(-1, weight.shape[1])
            g, g_z = at_least_fp32(g_H).reshape(rows.shape), g_z.flatten(1)
            g = torch.addmm(g, g_z.t(), weight.to(g.dtype)).addcmul_(rows, g_square.view(-1, 1) * (2 / rows.shape[1]))
            g_weight = (g_z @ rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
            return g.view(H.shape).to(H.dtype), g_weight, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        keep(ctx, H, weights)
        return H, _read(H, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_H: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        H, weights = kept(ctx)
        with _exactly(H):
            g = g.to(weights.dtype).unsqueeze(-2)
            total = torch.addcmul(at_least_fp32(g_H), weights.unsqueeze(-1), g)
            return total.to(H.dtype), torch.matmul(g, at_least_fp32(H).mT).squeeze(-2)


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, carry: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        keep(ctx, H, carry, weights, y)
        return _write(H, carry, weights, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        H, carry, weights, y = kept(ctx)
        with _exactly(H):
            wide, wide_y, g = at_least_fp32(H), at_least_fp32(y).unsqueeze(-2), g.to(carry.dtype)
            g_H = torch.matmul(carry.mT, g).to(H.dtype)
            g_y = torch.matmul(weights.unsqueeze(-2), g).squeeze(-2).to(y.dtype)
            return g_H, torch.matmul(g, wide.mT), torch.matmul(wide_y, g.mT).squeeze(-2), g_y


def project(H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix product and mean square of each stream, or of all streams of a token together.

    Args:
        H: (..., M, D).
        weight: (K, D), or (K, M D) if `together`.
        together: take the M D values of a token as one vector, stream after stream.

    Returns:
        H, z (K, ..., M) and s (..., M); if `together`, z (K, ...) and s (...). z and s are fp32 or wider.
    """
    if torch.compiler.is_compiling():
        return H, *_project(H, weight, together)
    onward, z, square = _Project.apply(H, weight, together)
    return same(onward, H), z, square


def read(H: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """H and x = sum_m weights[m] H[m], (..., D) in the dtype of H.

    Args:
        H: (..., M, D).
        weights: (..., M), or (M,) for all tokens; fp32 or wider.
    """
    weights = weights.expand(H.shape[:-1])
    if torch.compiler.is_compiling():
        return H, _read(H, weights)
    onward, x = _Read.apply(H, weights)
    return same(onward, H), remember(x, _read, H, weights)


def write(H: Tensor, carry: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """H'[o] = sum_i carry[o, i] H[i] + weights[o] y, (..., M, D) in the dtype of H.

    Args:
        H: (..., M, D).
        carry: (..., M out, M in), or (M out, M in) for all tokens; fp32 or wider.
        weights: (..., M), or (M,) for all tokens; fp32 or wider.
        y: (..., D), what the branch returned.
    """
    carry, weights = carry.expand(*H.shape[:-1], -1), weights.expand(H.shape[:-1])
    if torch.compiler.is_compiling():
        return _write(H, carry, weights, y)
    after = _Write.apply(H, carry, weights, y)
    return after if recipe_of(H) else remember(after, _write, H, carry, weights, y)
