"""Is what was just computed read at once, or do the first layers read the saved past only?

    share(k) = weight that sublayer k puts on the running sum;   the rest goes to the embedding and the saved blocks

Where outputs are summed in groups and each finished sum is saved, a reader mixes the saved sums with the running one.
`running[k]` is the mean over tokens of its weight for sublayers 0 to 2 L - 1 and the exit, NaN where nothing runs yet;
`saved[k]` that of all others; `border[k]` is 1 where sublayer k saves what ran and begins a new sum. `by_layer[l]` is
the mean over a layer's two readers; the early low-use segment is the number of leading layers with less than
`threshold`.

DepthBench, Sec. 4.3 and Fig. 9, arXiv:2609.32534.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from depthlit import plots
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, NotApplicable, Subject


class BlockReads(Diagnostic):
    """Weight of the running sum in every read of a strategy that saves sums of groups, and the early low-use segment.

    Args:
        threshold: a layer counts as little used below this mean weight.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    def __init__(self, threshold: float = 0.05, windows: int = 16, length: int = 256, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.threshold = threshold

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        counted, places = subject.counted(batch), 2 * len(subject.layers) + 1
        running, saved = (
            torch.full((places,), torch.nan, dtype=torch.float64, device=counted.device) for _ in range(2)
        )
        border = torch.zeros(places, dtype=torch.float64)

        def see(place: int, reader: Any, state: Any) -> None:
            flow, slot = reader.flow(state), reader.running_slot(state)
            if flow is None:
                return
            read = flow.read.expand(*counted.shape, -1)[counted].sum(0, dtype=torch.float64)  # (S,)
            border[place] = flow.carry is not None and flow.carry.shape[-2] > flow.carry.shape[-1]
            if slot is not None:
                running[place] = read[slot]
            saved[place] = read.sum() - (0 if slot is None else read[slot])

        subject.watch(batch, see, sublayers=True)
        if running.isnan().all():
            raise NotApplicable("this strategy keeps no running sum beside saved ones")
        number = counted.sum()
        return {"running": Mean(running, number), "saved": Mean(saved, number), "border": border}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        running, L = values["running"], len(subject.layers)
        pairs = running[: 2 * L].reshape(L, 2)
        known = np.isfinite(pairs)
        by_layer = np.where(known, pairs, 0).sum(1) / np.maximum(known.sum(1), 1)
        low = by_layer < self.threshold
        return {
            "by_layer": by_layer,
            "low_use_segment": L if low.all() else int(low.argmin()),
            "mean_running": np.nanmean(running),
            "exit_running": running[-1],
        }

    def draw(self, answer: Answer) -> Figure:
        figure, axes = plots.blank(f"Block reads: {answer.title}", width=9.0, height=4.2)
        v = answer.values
        segment = int(answer.numbers["low_use_segment"])
        plots.stack(
            axes, {"running sum": np.nan_to_num(v["running"]), "embedding and saved sums": v["saved"]},
            f"low-use segment: {segment} leading layers below {self.threshold:g}; dashed: a new sum begins there",
            f"reading sublayer ({len(v['running']) - 1}: exit)", "share of the read weight",
        )  # fmt: skip
        for place in np.flatnonzero(v["border"]):
            axes.axvline(place - 0.5, color="black", linestyle="--", linewidth=0.8)
        return figure
