"""What do the routing weights do right now, and how big are the layers' updates and gradients?

    update_norm(l) = mean over tokens of |z_(l+1) - z_l|,   state_norm(l) = mean of |z_l|
    gradient_norm(l) = |d loss / d weights of block l|,     relative_update(l) = mean of |z_(l+1) - z_l| / |z_l|

Besides these, whatever the strategy's connections tell about themselves, by sublayer (the last entry is the exit):
source entropies, shares of the embedding, gates, spread of the streams, Sinkhorn residuals, ... NaN where a sublayer
says nothing. The gradient is that of the mean loss over all windows, over all ranks; it is not taken under DeepSpeed,
which owns the gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from depthlit import plots
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, Share, Subject, token_mean
from depthlit.gradients import block_gradient_norms
from depthlit.layers import at_least_fp32

BY_LAYER = ("update_norm", "relative_update", "state_norm", "gradient_norm")


class RoutingTelemetry(Diagnostic):
    """Routing figures of every connection, norms of updates and gradients of every layer; cheap.

    Args:
        gradients: take the gradient of the loss too, by one backward pass per batch.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    def __init__(self, gradients: bool = True, windows: int = 4, length: int = 256, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.gradients = gradients

    def steps(self, order: Any) -> int:
        return len(order) * (2 if self.gradients else 1)

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        counted, places = subject.counted(batch), 2 * len(subject.layers) + 1
        figures: dict[str, Tensor] = {}
        last: Tensor | None = None
        norms: dict[str, list[Mean]] = {key: [] for key in BY_LAYER[:3]}

        def see(place: int, reader: Any, state: Any) -> None:
            nonlocal last
            for key, value in reader.telemetry(state).items():
                row = figures.setdefault(
                    key, torch.full((places,), torch.nan, dtype=torch.float64, device=counted.device)
                )
                row[place] = value.double()
            if place % 2 == 0:
                z = at_least_fp32(reader.probe(state))
                norms["state_norm"].append(token_mean(z.norm(dim=-1), counted))
                if last is not None:
                    u = (z - last).norm(dim=-1)
                    tiny = torch.finfo(u.dtype).tiny
                    norms["update_norm"].append(token_mean(u, counted))
                    norms["relative_update"].append(token_mean(u / last.norm(dim=-1).clamp_min(tiny), counted))
                last = z

        subject.watch(batch, see, sublayers=True)
        tokens = batch["tokens"].numel()
        found = {key: Mean(row * tokens, torch.tensor(tokens)) for key, row in figures.items()}
        return found | {
            key: Mean(torch.stack([m.total for m in row]), row[0].number) for key, row in norms.items() if row
        }

    def together(self, subject: Subject, share: Share) -> dict[str, Any]:
        norms = block_gradient_norms(subject, share) if self.gradients else None
        return {} if norms is None else {"gradient_norm": norms}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        return {f"mean_{key}": np.nanmean(value) for key, value in values.items()}

    def draw(self, answer: Answer) -> Figure:
        v = answer.values
        own = [key for key in v if key not in BY_LAYER]
        columns = 3
        rows = -(-(3 + len(own)) // columns)
        figure, panels = plots.blank(f"Telemetry: {answer.title}", rows, columns, height=3.6, width=4.8)
        free = list(panels.flat)
        plots.lines(free[0], {"|z| before layer": v["state_norm"], "|update|": v["update_norm"]}, "mean over tokens",
                    "layer", "norm", log=bool((v["update_norm"] > 0).all()))  # fmt: skip
        plots.lines(free[1], {"": v["relative_update"]}, "|update| / |z|, mean over tokens", "layer", "ratio",
                    log=bool((v["relative_update"] > 0).all()))  # fmt: skip
        if "gradient_norm" in v:
            plots.lines(free[2], {"": v["gradient_norm"]}, "gradient of the loss", "layer", "norm over weights",
                        log=bool((v["gradient_norm"] > 0).all()))  # fmt: skip
        else:
            free[2].set_axis_off()
        for axes, key in zip(free[3:], own, strict=False):
            at = np.flatnonzero(np.isfinite(v[key]))
            plots.lines(axes, {"": v[key][at]}, key.replace("_", " "), "sublayer", "mean over tokens", at=at)
        for axes in free[3 + len(own) :]:
            axes.set_axis_off()
        return figure
