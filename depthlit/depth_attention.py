"""Attention over the sequence and over depth slots of the same token, in one softmax.

    y_t = sum_{j <= t} p_j v_j + sum_i p_i nu_{t,i},   p = softmax({q_t k_j / sqrt(C)} and {r_t kappa_{t,i} / sqrt(C)})

A kernel does the causal part alone and gives its log-sum-exp; the slots are added by an online softmax. In backward the
same kernel is told the joint output and the joint log-sum-exp instead of its own: dS = P (dy v - dy y) with
P = exp(S - lse) is then the exact gradient of the joint softmax. Nothing of size T x T is ever kept, slots are never
stacked or repeated over heads, and backward keeps only references to what is alive anyway, y and one number per query.
Where no such kernel is at hand, `plain_attention` computes the same from explicit scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from depthlit.layers import at_least_fp32

aten = torch.ops.aten


def depth_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """Joint attention of every query to its past and to the slots of its own token: (B, H, T, C).

    Args:
        q: (B, H, T, C) queries for the sequence, rotated.
        k, v: (B, H_kv, T, C); query head h shares key head h // (H / H_kv).
        r: (B, H, T, C) queries for the slots.
        keys, values: one (B, H_kv, T, C) per slot, at least one slot.
        mask: (B, 1, T, T) bool, True where a query may look; None is causal.
    """
    kernel = kernel_for(q, mask)
    if kernel is None:
        return plain_attention(q, k, v, r, keys, values, mask)
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return _DepthAttention.apply(kernel, bias, q, k, v, r, *keys, *values)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """The same from explicit scores (B, H_kv, G, T, T + S), in fp32 or wider."""
    T, C = q.shape[-2:]
    past_only = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    mask = past_only if mask is None else mask.unsqueeze(1)  # (T, T), or (B, 1, 1, T, T)
    with torch.autocast(q.device.type, enabled=False):
        wide_q, wide_r = (by_key_head(at_least_fp32(x), k) for x in (q, r))
        past = (wide_q @ at_least_fp32(k).unsqueeze(2).mT).masked_fill(~mask, -torch.inf)
        own = [(wide_r * key.unsqueeze(2)).sum(-1, keepdim=True) for key in keys]
        p, *p_own = (torch.cat((past, *own), -1) * C**-0.5).softmax(-1).split([T, *(1 for _ in own)], -1)
        y = p @ at_least_fp32(v).unsqueeze(2)
        for weight, value in zip(p_own, values, strict=True):
            y = y + weight * value.unsqueeze(2)
    return y.flatten(1, 2).to(q.dtype)


def by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, ...) -> (B, H_kv, G, T, ...): query heads grouped by the key head they share."""
    return x.unflatten(1, (k.shape[1], -1))


class Kernel(NamedTuple):
    """A fused causal attention that gives its log-sum-exp and can be told another one in backward."""

    forward: Callable[..., tuple[Tensor, Tensor, Any]]  # q, k, v, bias -> y, lse (B, H, T), rest
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # dy, q, k, v, y, lse, bias, rest -> dq, dk, dv


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, bias is None, attn_mask=bias)
    return y, lse, ()


def _cpu_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, bias: Tensor | None, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, y, lse, 0.0, bias is None, attn_mask=bias
    )


def _padded(x: Tensor) -> Tensor:
    """The CUDA kernel wants a multiple of 8 channels; zeros change no product."""
    return F.pad(x, (0, -x.shape[-1] % 8))


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, bias: None) -> tuple[Tensor, Tensor, Any]:
    C = q.shape[-1]
    y, lse, *rest, _ = aten._scaled_dot_product_flash_attention(
        _padded(q), _padded(k), _padded(v), 0.0, True, False, scale=C**-0.5
    )
    return y[..., :C], lse, rest


def _cuda_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, bias: None, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    C, (*lengths, seed, offset) = q.shape[-1], rest
    grads = aten._scaled_dot_product_flash_attention_backward(
        *(_padded(x) for x in (dy, q, k, v, y)), lse, *lengths, 0.0, True, seed, offset, scale=C**-0.5
    )
    dq, dk, dv = (grad[..., :C] for grad in grads)
    return dq, dk, dv


CPU, CUDA = Kernel(_cpu_forward, _cpu_backward), Kernel(_cuda_forward, _cuda_backward)


def kernel_for(q: Tensor, mask: Tensor | None) -> Kernel | None:
    if q.device.type == "cpu":
        return CPU
    if q.device.type == "cuda" and mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return CUDA if torch.cuda.get_device_capability(q.device) >= (8, 0) else None
    return None


class _DepthAttention(torch.autograd.Function):
    """Slots are walked one by one through one reused buffer: fresh memory would cost more than the arithmetic."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, r: Tensor, *slots: Tensor
    ) -> Tensor:
        S = len(slots) // 2
        past, lse, ctx.rest = kernel.forward(q, k, v, bias)
        wide_r = by_key_head(at_least_fp32(r), k)
        scale, buffer = q.shape[-1] ** -0.5, torch.empty_like(wide_r)
        own = torch.stack([_dot(wide_r, key.unsqueeze(2), buffer) for key in slots[:S]]).mul_(scale)
        wide_lse = by_key_head(lse.to(own.dtype), k)
        joint = torch.logaddexp(wide_lse, own.logsumexp(0))
        y = by_key_head(past, k) * (wide_lse - joint).exp_().unsqueeze(-1)
        p = own.sub_(joint).exp_().unsqueeze(-1)
        for weight, value in zip(p, slots[S:], strict=True):
            y.addcmul_(weight, value.unsqueeze(2).to(y.dtype))
        y = y.flatten(1, 2).to(q.dtype)
        joint = joint.flatten(1, 2).to(lse.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(bias, q, k, v, r, y, joint, *slots)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bias, q, k, v, r, y, joint, *slots = ctx.saved_tensors
        S = len(slots) // 2
        dq, dk, dv = ctx.kernel.backward(dy, q, k, v, y, joint, bias, ctx.rest)
        wide_r, wide_dy = (by_key_head(at_least_fp32(x), k) for x in (r, dy))
        scale, buffer = q.shape[-1] ** -0.5, torch.empty_like(wide_r)
        wide_joint = by_key_head(joint.to(buffer.dtype), k)
        along = _dot(wide_dy, by_key_head(y, k), buffer)
        dr = torch.zeros_like(wide_r)
        dkeys: list[Tensor] = []
        dvalues: list[Tensor] = []
        for key, value in zip(slots[:S], slots[S:], strict=True):
            p = _dot(wide_r, key.unsqueeze(2), buffer).mul_(scale).sub_(wide_joint).exp_()
            ds = _dot(wide_dy, value.unsqueeze(2), buffer).sub_(along).mul_(p).mul_(scale).unsqueeze(-1)
            dr.addcmul_(ds, key.unsqueeze(2).to(dr.dtype))
            dkeys.append(_over_group(ds, wide_r, buffer).to(key.dtype))
            dvalues.append(_over_group(p.unsqueeze(-1), wide_dy, buffer).to(value.dtype))
        return None, None, dq, dk, dv, dr.flatten(1, 2).to(r.dtype), *dkeys, *dvalues


def _dot(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """sum_c a b, over the last dimension, through a buffer of the shape of a."""
    return torch.mul(a, b, out=buffer).sum(-1)


def _over_group(weight: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """(B, H_kv, G, T, 1), (B, H_kv, G, T, C) -> (B, H_kv, T, C): weighed and summed over the heads of a group."""
    if x.shape[2] == 1:
        return (weight * x).squeeze(2)
    return torch.mul(weight, x, out=buffer).sum(2)
