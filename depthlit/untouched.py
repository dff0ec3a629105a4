"""Running a network on the side, so that training does not notice; and a bar that says how long it takes."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn
from tqdm import tqdm


@contextmanager
def untouched(module: nn.Module, seed: int) -> Iterator[None]:
    """Evaluate a module in here: no gradients, no inference tensors, no compiled code, no dropout, generators seeded.

    Behind it the generators of Python, numpy and torch are where they were, and each module in the mode it was in.

    Args:
        module: what is evaluated.
        seed: of the generators in here.
    """
    modes = [(part, part.training) for part in module.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            for part, _ in modes:
                part.training = False
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for part, training in modes:
            part.training = training


@contextmanager
def progress(trainer: L.Trainer, name: str, total: int) -> Iterator[Callable[[], Any]]:
    """A line with the time left, in the trainer's own bar if it has a rich one; none where the trainer shows none."""
    bar: Any = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero:
        yield lambda: None
        return
    rich: Any = getattr(bar, "progress", None) or getattr(bar, "_bar", None)
    if hasattr(rich, "add_task"):
        start, done, task = time.monotonic(), 0, rich.add_task(name, total=total)

        def advance() -> None:
            nonlocal done
            done += 1
            left = (time.monotonic() - start) / done * max(total - done, 0)
            rich.update(task, advance=1, description=f"{name}, {left:.0f} s left")

        try:
            yield advance
        finally:
            rich.remove_task(task)
    else:
        with tqdm(total=total, desc=name, leave=False, disable=not sys.stderr.isatty()) as line:
            yield line.update
