"""Does a layer's own update depend on an earlier layer, or would it have been the same without it?

    C(s, l) = |u_l - u_l without layer s| / |u_l|,   u_l = z_(l+1) - z_l,   l > s

z_l is the probe of the state before block l, norms are over the width. `average: ratios` takes the ratio of each
token, then the mean (what the authors' newest code does); `average: norms` divides the mean norms. R_causal is the
share of the late pairs, s >= ceil(L / 4), with C above the threshold; `sweep` gives it for every threshold.

What skipping means is named by `skip`: "pass" hands the state on unchanged; "silent" lets the layer take part in the
routing with its branches at zero; other rules are named by the strategy, such as the authors' own for depth mixtures.

DepthBench, Eqs. (3) and (5) to (7), arXiv:2609.32534. `score[s, l]`; NaN elsewhere. All layers but the last are
skipped; each distinct beginning of these orders is computed once.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from depthlit import plots
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, Subject
from depthlit.interventions import check_rule, prefixes, without
from depthlit.layers import at_least_fp32
from depthlit.statistics import first_late, fraction_above, late_pairs, sweep

TINY = 1e-8  # least norm of an update to divide by, the authors' value


class CausalScore(Diagnostic):
    """How much every later layer's update changes when one layer is skipped; R_causal: the share of strong late pairs.

    Args:
        threshold: a pair counts as dependent above this.
        skip: what skipping a layer means: pass, silent, or a rule of the strategy.
        average: the mean over tokens of ratios, or the ratio of mean norms.
        late_only: skip only the layers that R_causal needs, the last three quarters.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "score"

    def __init__(
        self,
        threshold: float = 0.45,
        skip: str = "pass",
        average: Literal["ratios", "norms"] = "ratios",
        late_only: bool = False,
        windows: int = 16,
        length: int = 256,
        **schedule: Any,
    ) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.threshold, self.skip, self.average, self.late_only = threshold, skip, average, late_only

    def check(self, decoder: Decoder) -> None:
        check_rule(decoder, "skip", self.skip)

    def routes(self, order: Order) -> list[Order]:
        """The intact order first, then one without each layer but the last."""
        L = len(order)
        return [
            order,
            *(without(order, s, rule=self.skip) for s in range(first_late(L) if self.late_only else 0, L - 1)),
        ]

    def steps(self, order: Order) -> int:
        return prefixes(*self.routes(order))

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        L, counted = len(subject.layers), subject.counted(batch)
        intact: dict[int, Tensor] = {}  # z_l, (N, any)
        seen: dict[int, tuple[int, Tensor]] = {}  # by skipped layer: place and state seen last
        early: dict[int, list[tuple[int, Tensor]]] = {}  # by place: skipped layer and update ahead of the intact one
        size = torch.zeros(L, dtype=torch.float64, device=counted.device)
        change, ratio = (torch.full((L, L), torch.nan, dtype=torch.float64, device=counted.device) for _ in range(2))

        def compare(s: int, place: int, update: Tensor) -> None:
            u = intact[place] - intact[place - 1]
            moved = (update - u).norm(dim=-1)
            change[s, place - 1] = moved.sum(dtype=torch.float64)
            ratio[s, place - 1] = (moved / u.norm(dim=-1).clamp_min(TINY)).sum(dtype=torch.float64)

        def see(place: int, reader: Any, state: Any) -> None:
            z = at_least_fp32(reader.probe(state))[counted]
            path = subject.decoder.path
            s = next((i for i in range(place) if i not in path), None)
            if s is None:
                intact[place] = z
                if place:
                    size[place - 1] = (z - intact[place - 1]).norm(dim=-1).sum(dtype=torch.float64)
                for skipped, update in early.pop(place, []):
                    compare(skipped, place, update)
                return
            last, seen[s] = seen.get(s), (place, z)
            if last is not None and last[0] == place - 1:
                if place in intact:
                    compare(s, place, z - last[1])
                else:
                    early.setdefault(place, []).append((s, z - last[1]))
            if place == L:
                del seen[s]

        subject.watch(batch, see, self.routes(subject.order))
        number = counted.sum()
        return {"ratios": Mean(ratio, number), "change": Mean(change, number), "update": Mean(size, number)}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        norms = values["change"] / np.maximum(values["update"], TINY)
        score = values["ratios"] if self.average == "ratios" else norms
        late, thresholds = late_pairs(score), np.linspace(0, 2, 81)
        return {
            "norms": norms,
            "score": score,
            "R_causal": fraction_above(late, self.threshold),
            "mean_late": late.mean() if late.size else np.nan,
            "sweep_threshold": thresholds,
            "sweep": sweep(late, thresholds),
        }

    def draw(self, answer: Answer) -> Figure:
        figure, (left, right) = plots.blank(f"Causal score: {answer.title}", 1, 2)
        plots.heat(
            left, answer.values["score"], f"layer s skipped ({self.skip}), mean of {self.average}",
            "affected layer l", "skipped layer s", "C(s, l)", self.scale, top=0.99, least=self.threshold,
        )  # fmt: skip
        plots.lines(
            right, {"late pairs": answer.values["sweep"]},
            f"R_causal = {answer.numbers['R_causal']:.3f} at {self.threshold:g}",
            "threshold", "share of late pairs above", at=answer.values["sweep_threshold"], scale=(-0.02, 1.02),
            mark=self.threshold,
        )  # fmt: skip
        return figure
