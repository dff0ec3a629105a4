"""With which weight does what a sublayer wrote reach every later reader along the residual paths alone?

    w(i -> k) = read_k . carry_(k-1) ... carry_(i+1) . write_i

The embedding counts as the first source. 1 everywhere for a plain sum; softmax weights for a depth mixture; products of
the read, mixing and write coefficients for streams. Weights are signed; they describe the linear passage that this
forward took, not the network's Jacobian, since the coefficients themselves depend on the state.

DepthBench, Sec. 4.2 and Fig. 7, arXiv:2609.32534. `weight[k, i]`: mean over tokens, `spread[k, i]`: standard deviation;
rows are the readers (sublayers 0 to 2 L - 1, then the exit), columns the sources (embedding, then sublayers 0 to
2 L - 1); NaN where i is not before k. A strategy with a norm or a gain per channel on the stream has no scalar paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from depthlit import plots
from depthlit.connection import Flow
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, NotApplicable, Subject


class PathWeights(Diagnostic):
    """Weight of every sublayer's output, and of the embedding, in what every later sublayer reads.

    Args:
        windows: how many windows of validation text to ask about.
        length: tokens per window.
        batch_size: windows that go through the network at once.
    """

    draws = "weight"

    def __init__(self, windows: int = 8, length: int = 256, batch_size: int = 1, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, batch_size=batch_size, **schedule)

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        counted, readers = subject.counted(batch), 2 * len(subject.layers) + 1
        total, square = (torch.full((readers, readers), torch.nan, dtype=torch.float64, device=counted.device)
                         for _ in range(2))  # fmt: skip
        paths: Tensor | None = None  # (..., S, I): column i says how much of source i is in each slot by now
        broken: int | None = None  # the first reader behind which there are no scalar paths

        def see(place: int, reader: Any, state: Any) -> None:
            nonlocal paths, broken
            if paths is None:
                paths = subject.decoder.entry.write(reader.lens(state)).double()[..., None]
            flow = None if broken is not None else only(reader.flow(state), counted)
            if flow is None:
                broken = place if broken is None else broken
                return
            weights = (flow.read.unsqueeze(-2) @ paths).squeeze(-2)  # (N or nothing, I)
            number = counted.sum() if weights.dim() == 1 else 1
            total[place, : weights.shape[-1]] = (weights if weights.dim() == 1 else weights.sum(0)) * number
            square[place, : weights.shape[-1]] = (weights**2 if weights.dim() == 1 else (weights**2).sum(0)) * number
            if flow.carry is not None and flow.write is not None:
                carried, written = flow.carry @ paths, flow.write[..., None]
                lead = torch.broadcast_shapes(carried.shape[:-2], written.shape[:-2])
                paths = torch.cat((carried.expand(*lead, -1, -1), written.expand(*lead, -1, -1)), -1)

        subject.watch(batch, see, sublayers=True)
        if broken == 0:
            raise NotApplicable("no scalar paths: this strategy has a norm or a gain per channel on the stream")
        number = counted.sum()
        return {"weight": Mean(total, number), "square": Mean(square, number)}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        weight = values["weight"]
        found: dict[str, Any] = {"spread": np.sqrt(np.maximum(values.pop("square") - weight**2, 0))}
        known = np.isfinite(weight).any(1)
        if not known.all():
            found["note"] = (
                f"scalar paths end before sublayer {int(known.argmin())}: a norm or a gain per channel follows"
            )
        else:
            last = np.abs(weight[-1])
            found["exit_embedding_share"] = last[0] / last.sum()
            found["smallest"], found["largest"] = np.nanmin(weight), np.nanmax(weight)
        return found

    def draw(self, answer: Answer) -> Figure:
        figure, (left, right) = plots.blank(f"Path weights: {answer.title}", 1, 2)
        weight, L = answer.values["weight"], answer.model["shape"]["n_layer"]
        source, reader = "source sublayer (-1: embedding)", f"reading sublayer ({2 * L}: exit)"
        plots.heat(
            left, weight, "mean over tokens", source, reader, "path weight", self.scale,
            signed=bool(np.nanmin(weight) < 0), first=(0, -1), top=0.99,
        )  # fmt: skip
        plots.heat(
            right, answer.values["spread"], "spread over tokens", source, reader, "standard deviation",
            first=(0, -1), top=0.99,
        )  # fmt: skip
        return figure


def only(flow: Flow | None, counted: Tensor) -> Flow | None:
    """The coefficients at the counted tokens, (N, ...), or without leading dimension if they are the same for all."""
    if flow is None:
        return None

    def chosen(x: Tensor | None, dims: int) -> Tensor | None:
        if x is None:
            return None
        return (x if x.dim() == dims else x.expand(*counted.shape, *x.shape[-dims:])[counted]).double()

    read = chosen(flow.read, 1)
    assert read is not None
    return Flow(read, chosen(flow.carry, 2), chosen(flow.write, 1))
