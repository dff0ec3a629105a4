"""How much slower and larger than the baseline is a training step? Ratios within one process, interleaved.

    python tools/bench.py --shape 24x512 --tokens 512 --residual all --json

Machines differ and a shared one changes from minute to minute, so nothing here is a time by itself: every round runs
each candidate once, in an order shuffled by the round, and a ratio is the median over rounds of time / time of the
baseline in the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthlit import cost
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec

Step = Callable[[], object]


class Timing(NamedTuple):
    """Of one candidate: its median seconds, and its ratio to the baseline with the quartiles of that ratio."""

    seconds: float
    ratio: float
    low: float
    high: float


def interleaved(steps: Mapping[str, Step], rounds: int, warmup: int = 1, seed: int = 0) -> dict[str, Timing]:
    """Run all candidates in turn, round by round; the first of them is the baseline."""
    names, pick = list(steps), random.Random(seed)
    for _ in range(warmup):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in pick.sample(names, len(names)):
            began = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - began)
    found = {}
    for name in names:
        ratios = sorted(t / base for t, base in zip(times[name], times[names[0]], strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        found[name] = Timing(statistics.median(times[name]), statistics.median(ratios), quartiles[0], quartiles[2])
    return found


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        changes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
        owned = {x.untyped_storage()._cdata for x in read}
        if changes or not all(x.untyped_storage()._cdata in owned for x in written):
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written))
        return out


def traffic(step: Step) -> int:
    """Bytes that one step reads and writes."""
    with Traffic() as counted:
        step()
    return counted.bytes


def bandwidth(elements: int, rounds: int = 50) -> float:
    """Bytes per second of adding two fp32 tensors of this size: what elementwise work on a state can reach here."""
    a, b, out = (torch.ones(elements) for _ in range(3))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        torch.add(a, b, out=out)
        times.append(time.perf_counter() - began)
    return 3 * 4 * elements / statistics.median(times)


def training_step(decoder: torch.nn.Module, ids: Tensor) -> Step:
    """Forward and backward, without an optimizer."""

    def step() -> None:
        loss = decoder(ids, ids)
        loss.mean().backward()
        for p in decoder.parameters():
            p.grad = None

    return step


def share_weights(decoder: Decoder, other: Decoder) -> None:
    """Let a decoder use another's weights where it has such a weight too, so that many of them fit into memory."""
    theirs = dict(other.named_parameters())
    for place, module in decoder.named_modules():
        for name, own in list(module.named_parameters(place, recurse=False)):
            if name in theirs and theirs[name].shape == own.shape:
                setattr(module, name.rpartition(".")[2], theirs[name])


def against_baseline(
    shape: ShapeSpec,
    candidates: Mapping[str, ResidualStrategy],
    tokens: int,
    batch: int = 1,
    rounds: int = 9,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Step time, saved bytes and traffic of strategies, each over that of the first.

    Args:
        candidates: by name; the first is the baseline.
        tokens: sequence length T.
        batch: sequences B.
        rounds: timed rounds.
        compiled: also time `torch.compile`d decoders, and say how long compiling took.
        dtype: of the weights.

    Returns:
        One row per candidate. `floor` is what the ratio would be if the routing's extra bytes, counted operation by
        operation, moved at the bandwidth of an elementwise addition of one state, and nothing else cost time.
    """
    ids = torch.randint(0, shape.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    decoders: dict[str, Decoder] = {}
    for name, strategy in candidates.items():
        decoders[name] = Decoder(shape, strategy, seed=0).to(dtype)
        share_weights(decoders[name], next(iter(decoders.values())))
    steps = {name: training_step(decoder, ids) for name, decoder in decoders.items()}
    timings = interleaved(steps, rounds)
    rows: list[dict[str, Any]] = []
    speed, first = bandwidth(batch * tokens * shape.d_model), next(iter(candidates))
    saved = {name: cost.saved_bytes(decoder, ids) for name, decoder in decoders.items()}
    moved = {name: traffic(step) for name, step in steps.items()}
    for name, timing in timings.items():
        extra = (moved[name] - moved[first]) / speed
        rows.append(
            {
                "name": name,
                "seconds": timing.seconds,
                "step": timing.ratio,
                "low": timing.low,
                "high": timing.high,
                "saved": saved[name] / saved[first],
                "moved": moved[name] / moved[first],
                "floor": 1 + extra / timings[first].seconds,
            }
        )
    if compiled:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * shape.n_layer)
        fast, began = {}, {}
        for name, decoder in decoders.items():
            start = time.perf_counter()
            fast[name] = training_step(torch.compile(decoder), ids)  # type: ignore[arg-type]
            fast[name]()
            began[name] = time.perf_counter() - start
        for row, (name, timing) in zip(rows, interleaved(fast, rounds).items(), strict=True):
            row |= {"compiled": timing.ratio, "compiled_to_eager": timing.seconds / timings[name].seconds}
            row["compile_seconds"] = began[name]
    return rows
