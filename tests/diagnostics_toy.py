"""The training toy with diagnostics, as a script of its own.

python tests/diagnostics_toy.py ROOT '{"kill": 8}'
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import training_toy
from engines import ENGINES

import callbacks
from depthlit import residuals
from depthlit.diagnostic import Batch, Diagnostic, Subject
from depthlit.shape import ShapeSpec
from depthlit.trainer import Trainer

SHAPE = ShapeSpec(3, 16, n_head=2, vocab_size=training_toy.SHAPE.vocab_size)

SMALL: dict[str, Any] = {"windows": 5, "length": 6, "batch_size": 2}


class Interrupted(callbacks.CausalScore):  # type: ignore[name-defined, misc]
    """Kills its process in the middle of a question."""

    kill_at, now = -1, 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.now = trainer.global_step

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        answer = super().measure(subject, batch)
        if self.now == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class Fails(Diagnostic):
    """Raises on one rank: inside the forward, where the others wait for it, or outside."""

    def __init__(self, inside: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.inside = inside

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        def see(place: int, *rest: Any) -> None:
            if self.inside and torch.distributed.get_rank() == 1 and place == 0:
                Path(sys.argv[1], "failed").write_text(str(time.time()))
                raise ZeroDivisionError("planted")

        subject.watch(batch, see)
        if not self.inside and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("planted")
        return {"fine": 1.0}


class Windowed(training_toy.Toy):
    """Gives windows of its validation rows, the same on every rank."""

    def windows(self, count: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
        return {"tokens": self.val.tokens[:count, :length], "targets": self.val.targets[:count, :length]}


if __name__ == "__main__":
    torch.set_num_threads(1)

    @atexit.register
    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    training_toy.Toy = Windowed  # type: ignore[misc]
    options = json.loads(sys.argv[2])
    Interrupted.kill_at = options.pop("kill", -1)
    Interrupted.__name__ = "CausalScore"
    asked: list[Any] = [
        Interrupted(**SMALL) if name == "CausalScore" else getattr(callbacks, name)(**SMALL)
        for name in options.pop("names", ["AngularDistance", "CausalScore"])
    ]
    asked += [getattr(callbacks, name)(**given) for name, given in options.pop("evaluations", {}).items()]
    fails = options.pop("fails", None)
    if fails is not None:
        asked.append(Fails(fails == "inside", **SMALL))
    if "strategy" in options:
        options["strategy"] = ENGINES[options["strategy"]]()
    shape = replace(SHAPE, **options.pop("shape", {}))
    settings = {"shape": shape, "residual": getattr(residuals, options.pop("residual", "PreLN"))()}
    if checkpoint := options.pop("validate", None):
        trainer = Trainer(default_root_dir=sys.argv[1], callbacks=asked, accelerator="cpu", **options)
        trainer.validate(training_toy.model(**settings), datamodule=Windowed(), ckpt_path=checkpoint)
    else:
        training_toy.fit(sys.argv[1], callbacks=asked, settings=settings, **options)
