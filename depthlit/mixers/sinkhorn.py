"""Doubly stochastic matrices from logits, by Sinkhorn and Knopp's alternate normalisation.

Matrices stand first and tokens last, (M out, M in, ...): a sum over a leading dimension runs along contiguous memory.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Order = Literal["paper", "liger"]


def sinkhorn(logits: Tensor, iterations: int, order: Order = "paper", eps: float = 1e-6) -> Tensor:
    """Normalise columns and rows of exp(logits) in turn, so many times.

    After few iterations, or at logits far apart, only the sums that were normalised last are 1; see `rounded`.

    Args:
        logits: (M out, M in, ...), fp32 or wider. A row is one output, its sum runs over the inputs.
        iterations: of both normalisations.
        order: "paper" (mHC, arXiv:2512.24880): exp, then columns and rows each time, in the log domain, safe for
            logits of any size; ends with the rows. DeepSeek's release does the same to the transposed matrix, with an
            eps. "liger" (Liger-Kernel, DepthBench): softmax over rows plus eps, columns, then rows and columns each
            further time, sums enlarged by eps; ends with the columns.
        eps: of the order "liger".
    """
    if order == "paper":
        for _ in range(iterations):
            logits = logits.log_softmax(0).log_softmax(1)
        return logits.exp()
    matrix = logits.softmax(1) + eps
    matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    return matrix


def rounded(matrix: Tensor) -> Tensor:
    """The doubly stochastic matrix beside an almost doubly stochastic one: all sums are 1 up to rounding errors.

    Rows, then columns that sum to more than 1 are scaled down; what is then missing is added as one outer product
    (Altschuler, Weed and Rigollet, arXiv:1705.09634, Algorithm 2).

    Args:
        matrix: (M out, M in, ...), not negative.
    """
    matrix = matrix / matrix.sum(1, keepdim=True).clamp_min(1)
    matrix = matrix / matrix.sum(0, keepdim=True).clamp_min(1)
    rows, columns = ((1 - matrix.sum(dim, keepdim=True)).clamp_min(0) for dim in (1, 0))
    return matrix + rows * columns / rows.sum(0, keepdim=True).clamp_min(1e-30)
