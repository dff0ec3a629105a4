"""How early does the network know what it will say?

    KL(p_final || p_l),   p_l = softmax(W N(lens(z_l)))

The lens of a state is the strategy's own: the stream, the sum of the streams, or what the next reader mixes; N is the
norm in front of the head, with the statistics of that state itself; p_final is the network's own output. Also by depth:
the loss of p_l (`ce`) and the share of its k likeliest tokens that are among those of p_final (`agreement`). At l = L
the KL is exactly 0.

nostalgebraist, interpreting GPT: the logit lens (2020); DepthBench, Eq. (9), arXiv:2609.32534. KL and loss are in nats
per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from depthlit import plots
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, Subject
from depthlit.layers import at_least_fp32


class LogitLens(Diagnostic):
    """What the head would predict at every depth, against the final prediction: KL, loss and top-k agreement.

    Args:
        top: k of the top-k agreement.
        chunk: tokens whose logits exist at once.
        windows: how many windows of validation text to ask about.
        length: tokens per window.
    """

    draws = "kl"

    def __init__(self, top: int = 5, chunk: int = 256, windows: int = 16, length: int = 512, **schedule: Any) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.top, self.chunk = top, chunk

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        d, counted = subject.decoder, subject.counted(batch)
        targets = batch["targets"][counted]
        top, last = min(self.top, subject.shape.vocab_size), len(subject.layers)
        read: list[Tensor] = []  # (N, D) each, as the head is handed it
        # as many calls of the head on every rank, however many tokens count: ZeRO-3 gathers its weights for each
        starts = range(0, max(self.batch_size, len(counted)) * counted.shape[1], self.chunk)
        sums = torch.zeros(3, last + 1, dtype=torch.float64, device=targets.device)

        def see(place: int, reader: Any, state: Any) -> None:
            read.append(reader.normed(state, d.norm)[counted])
            if place < last:
                return
            for start in starts:  # in here the head's weights are whole
                part = slice(start, start + self.chunk)
                final = at_least_fp32(d.head(read[-1][part])).log_softmax(-1)
                best = final.topk(top, dim=-1).indices
                for l, x in enumerate(read):
                    guess = at_least_fp32(d.head(x[part])).log_softmax(-1)
                    kl = F.kl_div(guess, final, reduction="sum", log_target=True)
                    ce = F.nll_loss(guess, targets[part].long(), reduction="sum")
                    common = (guess.topk(top, dim=-1).indices[:, :, None] == best[:, None, :]).sum().double() / top
                    sums[:, l] += torch.stack([kl.double(), ce.double(), common])

        subject.watch(batch, see, autocast=True)
        number = counted.sum()
        return {key: Mean(sums[i], number) for i, key in enumerate(("kl", "ce", "agreement"))}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        kl = values["kl"]
        return {"final_ce": values["ce"][-1], "mean_kl": kl[:-1].mean(), "kl_at_half": kl[len(kl) // 2]}

    def draw(self, answer: Answer) -> Figure:
        figure, (left, middle, right) = plots.blank(f"Logit lens: {answer.title}", 1, 3)
        v = answer.values
        plots.lines(left, {"": v["kl"]}, "distance to the final prediction", "layers done", "KL (nats)",
                    scale=self.scale)  # fmt: skip
        plots.lines(middle, {"at this depth": v["ce"], "final": np.full_like(v["ce"], v["ce"][-1])},
                    "loss if it stopped here", "layers done", "cross-entropy (nats)")  # fmt: skip
        plots.lines(right, {"": v["agreement"]}, f"agreement of the top {self.top}", "layers done", "share in common",
                    scale=(-0.02, 1.02))  # fmt: skip
        return figure
