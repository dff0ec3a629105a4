"""What a model costs on the machine at hand: prefill latency, training speed, peak memory; medians after warm-up."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from depthlit.connection import ResidualStrategy
from depthlit.cost import peak_flops, training_flops
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec


def seconds(run: Callable[[], object], device: torch.device, warmup: int = 2, repeats: int = 5) -> float:
    """Median seconds of one run: the device's own events on CUDA, wall time on a CPU."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(
    shape: ShapeSpec, strategy: ResidualStrategy, tokens: int, batch: int = 1, repeats: int = 5
) -> dict[str, Any]:
    """Prefill and training step of a freshly initialised model, on CUDA in bf16 if there is one, else in fp32.

    Prefill computes logits at the last position only, as a server would. On a CPU `peak_bytes` is that of the whole
    process and never falls: measure one model per process to compare.

    Args:
        tokens: sequence length T.
        batch: sequences B.
        repeats: timed runs behind the median, after two warm-up runs.

    Returns:
        prefill_seconds per batch; prefill_tokens_per_second; hours_per_1b_prefill_tokens; training_tokens_per_second
        (forward and backward); peak_bytes of training; mfu of training, None where the peak is not known; device.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = Decoder(shape, strategy, seed=0).to(device, dtype)
    ids = torch.randint(0, shape.vocab_size, (batch, tokens), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    @torch.inference_mode()
    def prefill() -> None:
        decoder(ids, last=True)

    def step() -> None:
        decoder(ids, ids).mean().backward()
        decoder.zero_grad(set_to_none=True)

    prefill_seconds, step_seconds = (seconds(run, device, repeats=repeats) for run in (prefill, step))
    rate = batch * tokens / step_seconds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name)
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "prefill_seconds": prefill_seconds,
        "prefill_tokens_per_second": batch * tokens / prefill_seconds,
        "hours_per_1b_prefill_tokens": 1e9 * prefill_seconds / (batch * tokens) / 3600,
        "training_tokens_per_second": rate,
        "peak_bytes": peak_bytes(device),
        "mfu": rate * training_flops(decoder, tokens) / peak if peak else None,
    }
