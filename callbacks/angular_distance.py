"""Which way does the state turn between two depths, and do late layers still turn it?

    d(z_l, z_(l+n)) = angle(z_l, z_(l+n)) / pi,   the mean over tokens of the angles of each token

The angle is 2 atan2(|u - v|, |u + v|) of the unit vectors u and v, which is exact for equal and opposite vectors, where
arccos loses half the digits or is not finite. z_l is the probe of the state before block l: the stream, all streams
end to end, or what the next reader mixes; z_L is that of the exit. Two zero vectors have angle 0, a zero and a non-zero
vector a right angle.

DepthBench, Eq. (2), arXiv:2609.32534; Gromov et al., The Unreasonable Ineffectiveness of the Deeper Layers,
arXiv:2403.17887. `distance[l, m]` is d(z_l, z_m) for l <= m.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from depthlit import plots
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, Subject
from depthlit.layers import at_least_fp32


def angle(u: Tensor, v: Tensor) -> Tensor:
    """Angle between vectors of length 1 or 0 along the last dimension, over pi: in [0, 1]."""
    return 2 / math.pi * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))


class AngularDistance(Diagnostic):
    """Angle between the states at any two depths, in units of pi: a heat map over start layer and distance.

    Args:
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "distance"

    def __init__(self, windows: int = 32, length: int = 512, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        counted, units = subject.counted(batch), []

        def see(place: int, reader: Any, state: Any) -> None:
            z = at_least_fp32(reader.probe(state))[counted]  # (N, any)
            units.append(z / z.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny))

        subject.watch(batch, see)
        total = torch.full((len(units), len(units)), torch.nan, dtype=torch.float64)
        for i, u in enumerate(units):
            total[i, i] = 0.0
            for j in range(i + 1, len(units)):
                total[i, j] = angle(u, units[j]).sum(dtype=torch.float64)
        return {"distance": Mean(total, counted.sum())}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        distance = values["distance"]
        steps = np.diagonal(distance, 1)
        late = steps[-(-len(steps) // 4) :]
        return {"mean_step": steps.mean(), "mean_late_step": late.mean() if late.size else np.nan, "step": steps}

    def draw(self, answer: Answer) -> Figure:
        distance = answer.values["distance"]
        n = len(distance)
        by_distance = np.full((n - 1, n - 1), np.nan)  # [distance - 1, start]
        for start in range(n - 1):
            by_distance[: n - 1 - start, start] = distance[start, start + 1 :]
        figure, (left, right) = plots.blank(f"Angular distance: {answer.title}", 1, 2)
        plots.heat(
            left, by_distance, "between layer l and layer l + n", "start layer l", "distance n", "angle / pi",
            self.scale, upward=True, colours="cividis_r", first=(1, 0),
        )  # fmt: skip
        plots.lines(
            right, {"n = 1": answer.values["step"]}, "of one layer (n = 1)", "start layer l", "angle / pi",
            scale=self.scale,
        )  # fmt: skip
        return figure
