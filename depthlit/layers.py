"""The parts every strategy shares: RMSNorm, rotary attention, SwiGLU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthlit.recipe import keep, kept
from depthlit.shape import ShapeSpec


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32 if it is narrower, else as it is: routing, softmax and norms are never computed in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def exactly(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast where x lives, for matrix products that are never computed in half precision."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one inverse RMS per token for backward; autograd's own formula keeps a second x and reads it twice as
    often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        keep(ctx, x, weight, inverse)
        y = wide * inverse
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = kept(ctx)
        wide, g = x.to(inverse.dtype), grad.to(inverse.dtype)
        product, g_weight = g * wide, None
        if weight is None:
            along, g_x = product.sum(-1, keepdim=True), g * inverse
        else:
            gain = weight.to(inverse.dtype)
            along, g_x = (product @ gain).unsqueeze(-1), (g * gain).mul_(inverse)
            g_weight = (inverse.flatten() @ product.flatten(0, -2)).to(weight.dtype)
        g_x.addcmul_(wide, inverse.pow(3).mul_(along), value=-1 / x.shape[-1])
        return g_x.to(x.dtype), g_weight, None


class RMSNorm(nn.Module):
    """g * x / sqrt(mean(x^2) + eps), computed in fp32 or wider, returned in the dtype of x.

    Args:
        d_model: width D of the last dimension.
        eps: added to the mean square.
        gain: learn one factor per channel, 1 at first.
    """

    def __init__(self, d_model: int, eps: float = 1e-6, gain: bool = True) -> None:
        super().__init__()
        self.d_model, self.eps = d_model, eps
        self.weight = nn.Parameter(torch.empty(d_model)) if gain else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.d_model}, eps={self.eps:g}, gain={self.weight is not None}"


class Context(NamedTuple):
    """What attention needs to know about places, computed once per forward: rotary phases and the document mask."""

    cos: Tensor  # (T, C/2), or (B, 1, T, C/2) with documents
    sin: Tensor
    mask: Tensor | None = None  # (B, 1, T, T) bool, True where attention may look; None: causal

    @staticmethod
    def of(shape: ShapeSpec, tokens: Tensor, dtype: torch.dtype, documents: Tensor | None = None) -> Context:
        """Phases are computed in fp64 and cast once, to fp32 or wider (bf16 cannot tell position 256 from 257).

        Args:
            tokens: (B, T), only the length and the device matter.
            dtype: of the model's weights.
            documents: (B, T) integers, equal within a document. Attention then stays within a document, and positions
                start at 0 in each, so that its logits do not depend on its neighbours in the block.
        """
        T, C, device = tokens.shape[-1], shape.head_dim, tokens.device
        place = torch.arange(T, device=device)
        mask = None
        if documents is not None:
            same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # (B, T, T)
            mask = (same & (place.unsqueeze(-1) >= place)).unsqueeze(1)
            first = torch.ones_like(documents, dtype=torch.bool)
            first[:, 1:] = documents[:, 1:] != documents[:, :-1]
            place = (place - torch.where(first, place, 0).cummax(-1).values).unsqueeze(1)  # (B, 1, T)
        speed = shape.rope_theta ** (-torch.arange(0, C, 2, device=device, dtype=torch.float64) / C)
        angle = place.unsqueeze(-1).double() * speed
        wide = torch.promote_types(dtype, torch.float32)
        return Context(angle.cos().to(wide), angle.sin().to(wide), mask)


def rotate(x: Tensor, context: Context) -> Tensor:
    """Turn the channel pairs (j, j + C/2) of x (B, H, T, C) by the angles of their position."""
    a, b = at_least_fp32(x).chunk(2, -1)
    return torch.cat((a * context.cos - b * context.sin, b * context.cos + a * context.sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, in open steps: project, attend, merge.

    A connection gets it bound to a context (`at`), so that it is a function of x alone, and may put its own step
    between the open ones.
    """

    def __init__(self, shape: ShapeSpec) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.k = nn.Linear(shape.d_model, shape.d_kv, bias=False)
        self.v = nn.Linear(shape.d_model, shape.d_kv, bias=False)
        self.out = nn.Linear(shape.d_model, shape.d_model, bias=False)

    def at(self, context: Context) -> BoundAttention:
        return BoundAttention(self, context)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H C) -> (B, H, T, C)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> q (B, H, T, C), k and v (B, H_kv, T, C), not yet rotated."""
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Rotate q and k, then causal softmax attention at scale 1 / sqrt(C): (B, H, T, C)."""
        return F.scaled_dot_product_attention(
            rotate(q, context), rotate(k, context), v, context.mask,
            is_causal=context.mask is None, enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip

    def merge(self, y: Tensor) -> Tensor:
        """(B, H, T, C) -> (B, T, D), through the out-projection."""
        return self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.merge(self.attend(*self.project(x), context)).to(x.dtype)


class BoundAttention:
    """One attention at the places of one context: the branch that a connection is handed."""

    def __init__(self, attn: Attention, context: Context) -> None:
        self.module, self.context = attn, context
        self.project, self.merge = attn.project, attn.merge

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.module.attend(q, k, v, self.context)

    def rotate(self, x: Tensor) -> Tensor:
        return rotate(x, self.context)

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x, self.context)


class SwiGLU(nn.Module):
    """out( silu(gate x) * up x ), without biases."""

    def __init__(self, shape: ShapeSpec) -> None:
        super().__init__()
        d_ff = cast(int, shape.d_ff)  # filled in by the shape
        self.gate = nn.Linear(shape.d_model, d_ff, bias=False)
        self.up = nn.Linear(shape.d_model, d_ff, bias=False)
        self.out = nn.Linear(d_ff, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x)).to(x.dtype)
