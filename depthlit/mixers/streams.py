"""The arithmetic of several streams, H (..., M, D), with little kept for backward and few passes over it.

    z = H W^T,  s = mean(H^2)                        `project`: one matrix product; whoever wants a norm divides z by it
    x = sum_m a[m] H[m],  C[o] = sum_i A[o, i] H[i]  `mix`, in front of the branch; A is indexed (out, in)
    H'[o] = C[o] + b[o] y                            `write`, behind it, in place of C

Mixing before the branch runs, both ways, keeps all that needs H together in time; backward of `write` does without H.
Of every two states in a row only one is kept, the other is made again from the first (`depthlit.recipe`), and so is x.
Coefficients are fp32 or wider, so is all arithmetic, also under autocast; H and x have the dtype of the stream. All
derivatives are of first order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlit.layers import at_least_fp32, exactly
from depthlit.recipe import keep, kept, recipe_of, remember, same


def _project(H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor]:
    with exactly(H):
        rows = at_least_fp32(H.flatten(-2) if together else H)
        square = torch.linalg.vector_norm(rows, dim=-1).square() / rows.shape[-1]
        z = weight.to(rows.dtype) @ rows.flatten(0, -2).t()
        return z.view(-1, *square.shape), square


def _read(H: Tensor, weights: Tensor) -> Tensor:
    with exactly(H):
        return torch.matmul(weights.unsqueeze(-2), at_least_fp32(H)).squeeze(-2).to(H.dtype)


def _carry(H: Tensor, carry: Tensor) -> Tensor:
    """In fp32 or wider."""
    with exactly(H):
        return torch.matmul(carry, at_least_fp32(H))


def _add(carried: Tensor, weights: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """In place of `carried`."""
    return carried.addcmul_(weights.unsqueeze(-1), at_least_fp32(y).unsqueeze(-2)).to(dtype)


def _state(H: Tensor, carry: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    return _add(_carry(H, carry), weights, y, H.dtype)


def _fresh(g: Tensor) -> Tensor:
    """Mark a gradient as made just now, so that whoever is handed it next may add to it in place."""
    g._fresh = True  # type: ignore[attr-defined]
    return g


def _to_change(g: Tensor) -> Tensor:
    """A gradient, fp32 or wider and contiguous, that may be changed: itself if it is fresh, else a copy."""
    wide = at_least_fp32(g).contiguous()
    return wide.clone() if wide is g and not getattr(g, "_fresh", False) else wide


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor, Tensor]:
        keep(ctx, H, weight)
        return H, *_project(H, weight, together)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_H: Tensor, g_z: Tensor, g_square: Tensor) -> tuple[Tensor, Tensor | None, None]:
        H, weight = kept(ctx)
        with exactly(H):
            rows = at_least_fp32(H).reshape(-1, weight.shape[1])
            total, g_z = _to_change(g_H), g_z.flatten(1)
            flat = total.view(rows.shape).addmm_(g_z.t(), weight.to(rows.dtype))
            flat.addcmul_(rows, g_square.view(-1, 1) * (2 / rows.shape[1]))
            g_weight = (g_z @ rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
            return total.to(H.dtype), g_weight, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, weights: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        keep(ctx, H, weights, carry)
        return _read(H, weights), _carry(H, carry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_x: Tensor, g_carried: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, weights, carry = kept(ctx)
        with exactly(H):
            wide, g_x = at_least_fp32(H), g_x.to(weights.dtype).unsqueeze(-2)
            g_H = torch.matmul(carry.mT, g_carried).addcmul_(weights.unsqueeze(-1), g_x)
            g_weights, g_carry = torch.matmul(g_x, wide.mT).squeeze(-2), torch.matmul(g_carried, wide.mT)
            return _fresh(g_H.to(H.dtype)), g_weights, g_carry


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: Tensor, weights: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weights, y)
        after = _add(carried, weights, y, dtype)
        if after is carried:
            ctx.mark_dirty(carried)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        weights, y = ctx.saved_tensors
        with exactly(g):
            g, column = g.to(weights.dtype), at_least_fp32(y).unsqueeze(-2)
            g_y = torch.matmul(weights.unsqueeze(-2), g).squeeze(-2).to(y.dtype)
            return g, torch.matmul(column, g.mT).squeeze(-2), g_y, None


def project(H: Tensor, weight: Tensor, together: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix product and mean square of each stream, or of all streams of a token together.

    Args:
        H: (..., M, D).
        weight: (K, D), or (K, M D) if `together`.
        together: take the M D values of a token as one vector, stream after stream.

    Returns:
        H, z (K, ..., M) and s (..., M); if `together`, z (K, ...) and s (...). z and s are fp32 or wider. Whoever goes
        on with the H that is returned, instead of the argument, lets backward sum the gradient of H in one place.
    """
    if torch.compiler.is_compiling():
        return H, *_project(H, weight, together)
    onward, z, square = _Project.apply(H, weight, together)
    return same(onward, H), z, square


def mix(H: Tensor, weights: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """x = sum_m weights[m] H[m], (..., D) in the dtype of H, and C[o] = sum_i carry[o, i] H[i], (..., M, D).

    Args:
        H: (..., M, D).
        weights: (..., M), or (M,) for all tokens; fp32 or wider.
        carry: (..., M out, M in), or (M out, M in) for all tokens; fp32 or wider.
    """
    weights, carry = weights.expand(H.shape[:-1]), carry.expand(*H.shape[:-1], -1)
    if torch.compiler.is_compiling():
        return _read(H, weights), _carry(H, carry)
    x, carried = _Mix.apply(H, weights, carry)
    if recipe_of(H) is None:  # every other state is kept
        remember(carried, _carry, H, carry)
    return remember(x, _read, H, weights), carried


def write(carried: Tensor, weights: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """H'[o] = C[o] + weights[o] y, (..., M, D); C is used up.

    Args:
        carried: C (..., M, D), as `mix` returned it.
        weights: (..., M), or (M,) for all tokens; fp32 or wider.
        y: (..., D), what the branch returned.
        dtype: of H and H'.
    """
    weights = weights.expand(carried.shape[:-1])
    if torch.compiler.is_compiling():
        return _add(carried, weights, y, dtype)
    recipe = recipe_of(carried)
    after = _Write.apply(carried, weights, y, dtype)
    return remember(after, _state, *recipe.ingredients, weights, y) if recipe else after
