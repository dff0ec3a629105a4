"""Leaving a machine in good order when it is taken away: save behind the current optimizer step, requeue, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback

from depthlit.checkpoints import Checkpoints

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 asks for a requeue as well: have it sent by `#SBATCH --signal=USR1@120`."""


class Preempted(SystemExit):
    """The process was asked to leave, and has saved."""


class Preemption(Callback):
    """On SIGTERM or SIGUSR1, finish the optimizer step, save, and stop; on SIGUSR1 under SLURM, requeue the job.

    All ranks agree behind each step, so that one that got the signal later still leaves at the same step. Where a
    validation is due behind that step it runs first. The same command then goes on as if nothing had happened.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._leaving = False
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._signal, self._leaving = 0, False
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.step_closed:
            return
        number = self._signal
        if trainer.world_size > 1:
            number = int(trainer.strategy.reduce(torch.tensor(number, device=pl_module.device), reduce_op="max"))
        self._signal, self._leaving = number, bool(number)
        if self._leaving and not trainer.validates_at(trainer.global_step):
            pl_module.on_train_batch_end(outputs, batch, batch_idx)  # its turn, to log the step, would come after ours
            self._leave(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._leaving:
            self._leave(trainer)

    def _leave(self, trainer: Any) -> None:
        step = trainer.global_step
        saved = "nothing saved, checkpointing is off"
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints):
                if callback.saved != step:
                    callback.save(trainer)
                saved = "saved"
        job = os.environ.get("SLURM_JOB_ID")
        requeue = self._signal == signal.SIGUSR1 and job is not None
        self._put_back()
        if trainer.is_global_zero:
            after = f"; job {job} requeued" if requeue else "; the same command goes on from there"
            print(
                f"{signal.Signals(self._signal).name} behind step {step}: {saved}{after}", file=sys.stderr, flush=True
            )
            if requeue:
                subprocess.run(["scontrol", "requeue", str(job)], check=False)
        raise Preempted(0 if requeue else 128 + self._signal)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._put_back()
