"""Does the order of the layers matter, or could two of them trade places?

    P(a, b) = |loss with a and b swapped - loss| / loss

The loss is the sum over all counted tokens of all windows over their number. `signed[a, b]` keeps the direction:
below zero the swap improved the loss, which the absolute value hides. R_perm is the share of the late pairs,
a >= ceil(L / 4), with P above the threshold; `sweep` gives it for every threshold.

What moves is named by `swap`. "whole" moves all that is a layer's own, under every strategy: branches, norms, routing
weights and queries, and constants such as a layer's scale or its place at the border of a group. Other rules are named
by the strategy, such as the authors' own for depth mixtures.

DepthBench, Eqs. (4), (5) and (8), arXiv:2609.32534. `score[a, b]` for a < b; NaN elsewhere. Each distinct beginning of
the swapped orders is computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from depthlit import plots
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, Subject
from depthlit.interventions import check_rule, prefixes, swapped, swapping
from depthlit.statistics import first_late, fraction_above, late_pairs, sweep


class PermutationScore(Diagnostic):
    """How much the loss changes when two layers trade places; R_perm is the share of late pairs that mind.

    Args:
        threshold: a pair counts as sensitive above this.
        swap: what moves with a layer: whole, or a rule of the strategy.
        late_only: swap only the pairs that R_perm needs, those within the last three quarters.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "score"

    def __init__(
        self,
        threshold: float = 0.15,
        swap: str = "whole",
        late_only: bool = False,
        windows: int = 12,
        length: int = 256,
        **schedule: Any,
    ) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.threshold, self.swap, self.late_only = threshold, swap, late_only

    def check(self, decoder: Decoder) -> None:
        check_rule(decoder, "swap", self.swap)

    def pairs(self, L: int) -> list[tuple[int, int]]:
        """The layers to swap."""
        return [(a, b) for a in range(first_late(L) if self.late_only else 0, L) for b in range(a + 1, L)]

    def routes(self, order: Order) -> list[Order]:
        """The intact order first, then one per pair."""
        return [order, *(swapped(order, a, b) for a, b in self.pairs(len(order)))]

    def steps(self, order: Order) -> int:
        return prefixes(*self.routes(order))

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        L = len(subject.layers)
        if self.swap != "whole":
            subject.abreast = 1  # what is exchanged depends on the path of each state
        with swapping(subject.decoder, self.swap):
            losses = subject.nll_along(batch, self.routes(subject.order))
        totals = torch.stack([nll.sum(dtype=torch.float64) for nll in losses])
        loss = torch.full((L, L), torch.nan, dtype=torch.float64, device=totals.device)
        for (a, b), total in zip(self.pairs(L), totals[1:], strict=True):
            loss[a, b] = total
        number = subject.counted(batch).sum()
        return {"loss": Mean(totals[0], number), "swapped_loss": Mean(loss, number)}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        signed = (values["swapped_loss"] - values["loss"]) / values["loss"]
        score = np.abs(signed)
        late, thresholds = late_pairs(score), np.linspace(0, 1, 81)
        return {
            "signed": signed,
            "score": score,
            "R_perm": fraction_above(late, self.threshold),
            "mean_late": late.mean() if late.size else np.nan,
            "improved": float((late_pairs(signed) < 0).mean()) if late.size else np.nan,
            "sweep_threshold": thresholds,
            "sweep": sweep(late, thresholds),
        }

    def draw(self, answer: Answer) -> Figure:
        figure, (left, middle, right) = plots.blank(f"Permutation score: {answer.title}", 1, 3)
        plots.heat(
            left, answer.values["score"], f"layers a and b swapped ({self.swap})", "layer b", "layer a", "P(a, b)",
            self.scale, top=0.99, least=self.threshold,
        )  # fmt: skip
        plots.heat(
            middle, answer.values["signed"], "with its sign", "layer b", "layer a", "change of the loss / loss",
            self.scale and (-self.scale[1], self.scale[1]), signed=True,
        )  # fmt: skip
        plots.lines(
            right, {"late pairs": answer.values["sweep"]},
            f"R_perm = {answer.numbers['R_perm']:.3f} at {self.threshold:g}",
            "threshold", "share of late pairs above", at=answer.values["sweep_threshold"], scale=(-0.02, 1.02),
            mark=self.threshold,
        )  # fmt: skip
        return figure
