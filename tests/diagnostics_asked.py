"""All diagnostics, asked little, beside training in this process or by a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import callbacks
from depthlit.diagnostic import Batch, Diagnostic, Subject

HERE = Path(__file__).parent
DIAGNOSTICS = [
    cls
    for cls in map(vars(callbacks).get, callbacks.__all__)
    if issubclass(cls, Diagnostic) and cls.metric is Diagnostic.metric
]
"""All that ask about windows of validation text, by discovery."""
SMALL: dict[str, Any] = {"windows": 4, "length": 6, "batch_size": 3}


def all_of_them(**options: Any) -> list[Any]:
    return [cls(**{**SMALL, **options}) for cls in DIAGNOSTICS]


class Asked(Diagnostic):
    """At which steps the question came."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**SMALL, **options})
        self.steps_asked: list[int] = []
        self.trainer_of: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.trainer_of = trainer

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        step = self.trainer_of.global_step
        if not self.steps_asked or self.steps_asked[-1] != step:
            self.steps_asked.append(step)
        return {"one": 1.0}


def run_script(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, str(HERE / "diagnostics_toy.py"), str(root), *words],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
