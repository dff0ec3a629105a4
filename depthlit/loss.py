"""Cross-entropy per token, without ever holding the logits of all tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from depthlit.layers import at_least_fp32

LOGITS_AT_ONCE = 2**24
"""Logits that may exist at a time: 64 MiB in fp32. A batch with fewer is not cut, so small models lose no speed."""


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] in nats, in fp32 or wider; 0 where the target is negative.

    Args:
        logits: (..., V).
        targets: (...) integers.

    Returns:
        (...) losses.
    """
    wide = at_least_fp32(logits).flatten(0, -2)
    loss = F.cross_entropy(wide, targets.flatten().clamp_min(0).long(), reduction="none")
    return loss.view(targets.shape) * (targets >= 0)


def head_nll(head: nn.Linear, x: Tensor, targets: Tensor, at_once: int | None = None) -> Tensor:
    """`token_nll` of head(x), in pieces of tokens whose logits are computed again for backward.

    Costs one more pass of the head; saves B T V logits and their softmax.

    Args:
        head: (..., D) -> (..., V) with a `weight` of shape (V, D).
        x: (B, T, D), normed.
        targets: (B, T) integers; negative ones are not counted.
        at_once: logits per piece; `LOGITS_AT_ONCE` when left out.

    Returns:
        (B, T) losses in nats, in fp32 or wider.
    """
    V, at_once = head.weight.shape[0], LOGITS_AT_ONCE if at_once is None else at_once
    if targets.numel() * V <= at_once:
        return token_nll(head(x), targets)

    def piece(x: Tensor, targets: Tensor) -> Tensor:
        return token_nll(head(x), targets)

    tokens = max(1, at_once // V)
    pieces = zip(x.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
    losses = [checkpoint(piece, a, b, use_reentrant=False) for a, b in pieces]
    return torch.cat(losses).view(targets.shape)
