"""Do the streams stay distinct on their way down, or does mixing make them all alike?

    P = A_(2L-1) ... A_1 A_0,   p_j = sigma_j / sum sigma,   erank = exp(-sum_j p_j log p_j)

A_k is the residual map of sublayer k, (out, in); the product is taken per token, in fp64. Besides the effective rank:
the mean |cos| between the columns of P, which is how alike the streams have become, and the spectrum sigma / sigma_max.
Each also for the product down to every block. Intervals are 95 % by bootstrap, of documents where their borders are
known, else of windows.

DepthBench, Sec. 4.3 and Fig. 10, arXiv:2609.32534; Roy and Vetterli, The effective rank (2007), with sigma, not its
square. `erank[l]`, `overlap[l]` after l + 1 blocks, `spectrum[j]` after all, each with `_low` and `_high`. Only where
several streams are mixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from depthlit import plots
from depthlit.diagnostic import Answer, Batch, Diagnostic, NotApplicable, Subject, per_unit
from depthlit.statistics import bootstrap


def effective_rank(sigma: Tensor) -> Tensor:
    """exp of the entropy of sigma / sum sigma along the last dimension; 0 if all are 0."""
    total = sigma.sum(-1, keepdim=True)
    p = sigma / total.clamp_min(torch.finfo(sigma.dtype).tiny)
    return torch.special.entr(p).sum(-1).exp() * (total.squeeze(-1) > 0)


def overlap(product: Tensor) -> Tensor:
    """Mean |cos| between two columns of (..., M, M)."""
    M = product.shape[-1]
    unit = product / product.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(product.dtype).tiny)
    cosines = (unit.mT @ unit).abs()
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (M * (M - 1))


class Propagation(Diagnostic):
    """Effective rank, overlap and spectrum of the product of all residual maps of a multi-stream strategy.

    Args:
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "erank"

    def __init__(self, windows: int = 16, length: int = 256, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        product: Tensor | None = None
        reason = ""
        shape = batch["tokens"].shape
        ranks: list[Tensor] = []
        overlaps: list[Tensor] = []
        spectrum: list[Tensor] = []

        def see(place: int, reader: Any, state: Any) -> None:
            nonlocal product, reason
            if reason:
                return
            if product is not None and place % 2 == 0:
                sigma = torch.linalg.svdvals(product)
                ranks.append(effective_rank(sigma).expand(shape))
                overlaps.append(overlap(product).expand(shape))
                spectrum[:] = [(sigma / sigma[..., :1].clamp_min(torch.finfo(sigma.dtype).tiny)).expand(*shape, -1)]
            if place == 2 * len(subject.layers):
                return
            flow = reader.flow(state)
            carry = None if flow is None else flow.carry
            if carry is None:
                reason = "no scalar paths: this strategy has a norm or a gain per channel on the stream"
            elif carry.shape[-1] == 1 or carry.shape[-1] != carry.shape[-2]:
                reason = "this strategy does not mix several streams: there is no product to take"
            else:
                product = carry.double() if product is None else carry.double() @ product

        subject.watch(batch, see, sublayers=True)
        if reason:
            raise NotApplicable(reason)
        answer: dict[str, Any] = {}
        for key, per_token in (("erank", torch.stack(ranks, -1)), ("overlap", torch.stack(overlaps, -1)),
                               ("spectrum", spectrum[0])):  # fmt: skip
            answer[f"{key}_totals"], answer["unit_tokens"] = per_unit(per_token, batch)
        return answer

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in ("erank", "overlap", "spectrum"):
            totals, numbers = values[f"{key}_totals"], values["unit_tokens"]
            found[key] = totals.sum(0) / numbers.sum()
            found[f"{key}_low"], found[f"{key}_high"] = bootstrap(totals, numbers, self.seed)
        for key in ("erank", "overlap"):
            for end in ("", "_low", "_high"):
                found[f"final_{key}{end}"] = found[f"{key}{end}"][-1]
        return found

    def draw(self, answer: Answer) -> Figure:
        v, unit = answer.values, answer.windows["unit"]
        figure, panels = plots.blank(f"Propagation: {answer.title}; 95 % over {unit}s", 1, 3)
        M = len(v["spectrum"])
        for axes, key, title, x, y, scale in (
            (panels[0], "erank", "effective rank of the product", "block", f"effective rank (1 to {M})",
             self.scale or (0.95, M + 0.05)),
            (panels[1], "overlap", "alikeness of the streams", "block", "mean |cos| between columns", (-0.02, 1.02)),
            (panels[2], "spectrum", "spectrum after all blocks", "singular value", "sigma / sigma_max", (-0.02, 1.02)),
        ):  # fmt: skip
            log = key == "spectrum" and bool(v[key].min() > 0)
            plots.lines(
                axes, {key: v[key]}, title, x, y, bands={key: (v[f"{key}_low"], v[f"{key}_high"])},
                scale=None if log else scale, log=log,
            )  # fmt: skip
        return figure
