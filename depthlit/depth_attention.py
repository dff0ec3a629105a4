"""Attention over the sequence and over depth slots of the same token, in one softmax.

    y_t = sum_{j <= t} p_j v_j + sum_i p_i nu_{t,i},   p = softmax({q_t k_j / sqrt(C)} and {q_t kappa_{t,i} / sqrt(C)})

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
    q: Tensor, k: Tensor, v: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Joint attention of every query to its past and to the slots of its own token.

    Args:
        q: (B, H, T, C), rotated.
        k, v: (B, H_kv, T, C); query head h shares key head h // (H / H_kv).
        keys, values: one (B, H_kv, T, C) per slot, at least one slot.
        mask: (B, 1, T, T) bool, True where a query may look; None is causal.

    Returns:
        y (B, H, T, C), and the same keys and values to hand to the next reader in place of the given ones: backward
        then adds to the next reader's gradient instead of making one of its own, which costs O(L) new tensors, not
        O(L^2). So a gradient of returned keys and values is changed in place; hooks must not keep it.
    """
    kernel = kernel_for(q, mask)
    if kernel is None:
        return plain_attention(q, k, v, keys, values, mask), tuple(keys), tuple(values)
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    y, *slots = _DepthAttention.apply(kernel, bias, q, k, v, *keys, *values)
    return y, tuple(slots[: len(keys)]), tuple(slots[len(keys) :])


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """The same from explicit scores (B, H_kv, G, T, T + S), in fp32 or wider."""
    T, C = q.shape[-2:]
    past_only = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    mask = past_only if mask is None else mask.unsqueeze(1)  # (T, T), or (B, 1, 1, T, T)
    with torch.autocast(q.device.type, enabled=False):
        wide_q = by_key_head(at_least_fp32(q), k)
        past = (wide_q @ at_least_fp32(k).unsqueeze(2).mT).masked_fill(~mask, -torch.inf)
        own = [(wide_q * key.unsqueeze(2)).sum(-1, keepdim=True) for key in keys]
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
        ctx: Any, kernel: Kernel, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        S, scale = len(slots) // 2, q.shape[-1] ** -0.5
        past, lse, rest = kernel.forward(q, k, v, bias)
        wide_q, wide_lse = (by_key_head(at_least_fp32(x), k) for x in (q, lse))
        own = _dots(wide_q, slots[:S], torch.empty_like(wide_q)).mul_(scale)
        joint = torch.logaddexp(wide_lse, own.logsumexp(0))
        y = torch.empty_like(wide_q.movedim(3, 1), memory_format=torch.contiguous_format).movedim(1, 3)  # as in `merge`
        y.copy_(by_key_head(past, k)).mul_((wide_lse - joint).exp_().unsqueeze(-1))
        for p, value in zip(own.sub_(joint).exp_().unsqueeze(-1), slots[S:], strict=True):
            y.addcmul_(p, value.unsqueeze(2))
        y, joint = y.flatten(1, 2).to(q.dtype), joint.flatten(1, 2)
        ctx.kernel, ctx.rest = kernel, rest
        ctx.save_for_backward(bias, q, k, v, y, joint, *slots)
        ctx.set_materialize_grads(False)
        return y, *slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dslots: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None, *dslots
        bias, q, k, v, y, joint, *slots = ctx.saved_tensors
        S, scale = len(slots) // 2, q.shape[-1] ** -0.5
        dq, dk, dv = ctx.kernel.backward(dy, q, k, v, y, joint, bias, ctx.rest)
        wide_q, wide_dy, joint = (by_key_head(at_least_fp32(x), k) for x in (q, dy, joint))
        buffer_q, buffer_y, dq_own = torch.empty_like(wide_q), torch.empty_like(wide_dy), torch.zeros_like(wide_q)
        p = _dots(wide_q, slots[:S], buffer_q).mul_(scale).sub_(joint).exp_()
        along = _product(wide_dy, by_key_head(y, k), buffer_y).sum(-1)
        ds = _dots(wide_dy, slots[S:], buffer_y).sub_(along).mul_(p).mul_(scale)
        dkeys: list[Tensor] = []
        dvalues: list[Tensor] = []
        for i, (ds_i, p_i) in enumerate(zip(ds.unsqueeze(-1), p.unsqueeze(-1), strict=True)):
            dq_own.addcmul_(ds_i, slots[i].unsqueeze(2))
            dkeys.append(_plus_over_group(dslots[i], ds_i, wide_q, buffer_q, slots[i].dtype))
            dvalues.append(_plus_over_group(dslots[S + i], p_i, wide_dy, buffer_y, slots[S + i].dtype))
        dq = dq_own.flatten(1, 2).add_(dq).to(q.dtype)
        return None, None, dq, dk, dv, *dkeys, *dvalues


def _product(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """a * b in the buffer; a compiler fuses the product into what follows and wants none."""
    return a * b if torch.compiler.is_compiling() else torch.mul(a, b, out=buffer)


def _dots(x: Tensor, slots: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """(S, B, H_kv, G, T): x . slot over the channels, through a buffer of the shape of x."""
    dots = x.new_empty(len(slots), *x.shape[:-1])
    for slot, dot in zip(slots, dots, strict=True):
        torch.sum(_product(x, slot.unsqueeze(2), buffer), -1, out=dot)
    return dots


def _plus_over_group(total: Tensor | None, weight: Tensor, x: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """total + (B, H_kv, G, T, 1) * (B, H_kv, G, T, C), summed over the heads of a group: (B, H_kv, T, C), in place."""
    compiling = torch.compiler.is_compiling()
    if total is not None and x.shape[2] == 1 and not compiling:
        return total.addcmul_(weight.squeeze(2), x.squeeze(2))
    part = _product(weight, x, buffer).sum(2).to(dtype)
    if total is None:
        return part
    return total + part if compiling else total.add_(part)
