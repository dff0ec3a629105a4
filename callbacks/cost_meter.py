"""What does the network cost, in theory and on this machine?

Told: parameters by part, FLOPs of a prefill, bytes of the key-value cache (DepthBench, App. D, arXiv:2609.32534; see
depthlit.cost). Measured at the step it is asked: seconds of a prefill, its tokens per second and hours per 1B tokens
(median after warm-up, logits at the last position only; the device's own events on CUDA, wall time on a CPU), and the
highest memory since the last time; and the training speed so far, with its share of the device's peak (MFU) where
that peak is known. Rates are per rank.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from depthlit import cost
from depthlit.decoder import Order
from depthlit.diagnostic import Batch, Diagnostic, Share, Subject
from depthlit.measure import peak_bytes, seconds


class CostMeter(Diagnostic):
    """Parameters, FLOPs, cache, prefill latency, throughput, peak memory and MFU.

    Args:
        tokens: length of the prefill; the model's longest context if left out.
        sequences: sequences in it.
        repeats: timed runs behind the median, after two for warming up.
        windows: of validation text: they are not asked about.
        length: of those.
    """

    def __init__(
        self,
        tokens: int | None = None,
        sequences: int = 1,
        repeats: int = 5,
        windows: int = 1,
        length: int = 1,
        **schedule: Any,
    ) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.tokens, self.sequences, self.repeats = tokens, sequences, repeats
        self._clock: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._clock = getattr(trainer, "clock", None)

    def metric(self, key: str) -> str:
        return f"cost/{key}"

    def steps(self, order: Order) -> int:
        return (2 + self.repeats) * len(order)

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        return {}  # any tokens will do: see `together`

    def together(self, subject: Subject, share: Share) -> dict[str, Any]:
        device, shape = share.batches[0]["tokens"].device, subject.shape
        peak_so_far = peak_bytes(device)  # before the prefill adds its own
        T = self.tokens or shape.max_seq_len
        ids = torch.zeros(self.sequences, T, dtype=torch.long, device=device)
        latency = seconds(lambda: subject.model(ids, last=True), device, repeats=self.repeats)
        told = cost.on_meta(shape, subject.strategy)
        flops = cost.routing_flops(told) * T
        found: dict[str, Any] = {
            **{f"parameters_{part}": n for part, n in cost.parameters(told).items()},
            "prefill_flops": self.sequences * (shape.forward_flops(T, "last") + flops),
            "routing_flops": self.sequences * flops,
            "kv_bytes": self.sequences * cost.kv_bytes(shape, T),
            "prefill_seconds": latency,
            "prefill_tokens_per_sec": self.sequences * T / latency,
            "hours_per_1b_prefill_tokens": 1e9 * latency / (self.sequences * T) / 3600,
            "peak_bytes": peak_so_far,
        }
        rate = getattr(self._clock, "tokens_per_sec", 0.0) / share.ranks
        if rate:
            found["training_tokens_per_sec"] = rate
            peak = cost.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
            if peak:
                found["mfu"] = rate * cost.training_flops(told, T) / peak
        return found
