"""Twenty training steps of every strategy, in fp64 from fixed seeds: the losses that tests/test_golden.py holds fast.

    python tests/golden.py            rewrite tests/golden/ from the code as it is (then read the diff)
    python tests/golden.py HC MHC     only these

The curves hold on any CPU: all in fp64, and initial weights drawn from integers, because torch's normal numbers
differ in the last bit between CPUs with and without vector units, which 20 AdamW steps blow up to 1e-4 nats.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import build, known, label
from torch import Tensor

from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec

FOLDER = Path(__file__).parent / "golden"
SHAPE = ShapeSpec(n_layer=3, d_model=16, n_head=2, n_kv_head=1, d_ff=32, vocab_size=11)
STEPS, BATCH, LENGTH, RATE = 20, 8, 12, 3e-2


def recorded() -> list[ResidualStrategy]:
    """Defaults and presets; and what these leave untouched at this shape: groups of several sublayers, other forms."""
    more: dict[str, list[dict[str, Any]]] = {
        "BlockAttnRes": [{"block_size": 4}], "WAV": [{"block_size": 4}], "HAARES": [{"block_size": 4}],
        "DeltaAttnRes": [{"deltas": "block", "block_size": 4, "gate": "sigmoid"}], "MoDA": [{"norm": "post"}],
        "HC": [{"dynamic": False}], "MHC": [{"init": "uniform"}], "SandwichLN": [{"embedding_norm": True}],
    }  # fmt: skip
    return known() + [getattr(residuals, name)(**settings) for name in more for settings in more[name]]


def sentences() -> Tensor:
    """(20, B, T + 1): seven times in eight, a token follows from the one two places before it."""
    draw = torch.Generator().manual_seed(2)
    noise = torch.randint(SHAPE.vocab_size, (STEPS, BATCH, LENGTH + 1), generator=draw)
    slip = torch.randint(8, noise.shape, generator=draw) == 0
    for t in range(2, LENGTH + 1):
        rule = (5 * noise[..., t - 2] + 1) % SHAPE.vocab_size
        noise[..., t] = torch.where(slip[..., t], noise[..., t], rule)
    return noise


def even(weight: Tensor, mean: float = 0.0, std: float = 1.0, a: float = 0.0, b: float = 0.0,
         generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
    """In place of a truncated normal: uniform of the same std, from integers, equal to the bit everywhere."""
    integers = torch.randint(-1024, 1025, weight.shape, generator=generator)
    return weight.copy_(integers.to(weight.dtype) * (std * 3**0.5 / 1024))


def fresh(strategy: ResidualStrategy) -> Decoder:
    with patch("torch.nn.init.trunc_normal_", even):
        return build(strategy, SHAPE, seed=1)


def curve(
    strategy: ResidualStrategy, change: Callable[[Decoder], object] = lambda decoder: None, steps: int = STEPS
) -> list[float]:
    """Loss in nats per token before each of some AdamW steps; `change` tampers with the fresh decoder."""
    decoder = fresh(strategy)
    change(decoder)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in sentences()[:steps]:
        loss = decoder(batch[:, :-1], batch[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stored() -> dict[str, list[float]]:
    """All stored curves by label."""
    return {name: losses for file in FOLDER.glob("*.json") for name, losses in json.loads(file.read_text()).items()}


def rewrite(only: list[str]) -> None:
    files: dict[str, dict[str, list[float]]] = {}
    for strategy in recorded():
        if not only or type(strategy).__name__ in only:
            files.setdefault(type(strategy).__name__, {})[label(strategy)] = curve(strategy)
    FOLDER.mkdir(exist_ok=True)
    for name, curves in files.items():
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(losses)}" for key, losses in curves.items())
        draft = FOLDER / f"{name}.json.new"
        draft.write_text("{\n" + rows + "\n}\n")
        os.replace(draft, FOLDER / f"{name}.json")
        print(f"{name}: {', '.join(f'{key} ends at {losses[-1]:.4f}' for key, losses in curves.items())}")


if __name__ == "__main__":
    rewrite(sys.argv[1:])
