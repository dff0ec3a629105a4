"""What does each single layer contribute to the loss?

    change(s) = loss without layer s - loss

The loss is the sum over all counted tokens over their number; intervals are 95 % by bootstrap, of documents where their
borders are known, else of windows. What leaving a layer out means is named by `skip`, as for the causal score.

DepthBench, Sec. 4.2 and Fig. 8, arXiv:2609.32534 (there on ARC-Easy accuracy). `change`, `low` and `high`: (L,), in
nats per token. Each distinct beginning of the pruned orders is computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from depthlit import plots
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Answer, Batch, Diagnostic, Subject, per_unit
from depthlit.interventions import check_rule, prefixes, without
from depthlit.statistics import bootstrap


def prunings(order: Order, rule: str = "pass") -> list[Order]:
    """The intact order first, then one without each layer."""
    return [order, *(without(order, step, rule=rule) for step in order if isinstance(step, int))]


class LayerPruning(Diagnostic):
    """How much the validation loss grows without each single layer.

    Args:
        skip: what leaving a layer out means: pass, silent, or a rule of the strategy.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "change"

    def __init__(self, skip: str = "pass", windows: int = 16, length: int = 256, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.skip = skip

    def check(self, decoder: Decoder) -> None:
        check_rule(decoder, "skip", self.skip)

    def steps(self, order: Order) -> int:
        return prefixes(*prunings(order, self.skip))

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        losses = subject.nll_along(batch, prunings(subject.order, self.skip))
        totals, numbers = per_unit(torch.stack(losses, -1), batch)
        return {"unit_totals": totals, "unit_tokens": numbers}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        totals, numbers = values["unit_totals"], values["unit_tokens"]
        changes = totals[:, 1:] - totals[:, :1]
        low, high = bootstrap(changes, numbers, self.seed)
        change = changes.sum(0) / numbers.sum()
        return {
            "loss": totals[:, 0].sum() / numbers.sum(),
            "change": change,
            "low": low,
            "high": high,
            "mean_change": change.mean(),
            "largest_change": change.max(),
        }

    def draw(self, answer: Answer) -> Figure:
        figure, axes = plots.blank(f"Single-layer pruning: {answer.title}", width=8.0)
        v = answer.values
        plots.bars(axes, v["change"], f"loss without layer s ({self.skip}); 95 % over {answer.windows['unit']}s",
                   "left-out layer s", "change of the loss (nats)", (v["low"], v["high"]), self.scale)  # fmt: skip
        return figure
