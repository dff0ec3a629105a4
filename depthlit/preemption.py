"""Leaving in good order when asked to: save behind the current optimizer step, requeue, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback

from depthlit.checkpoints import Checkpoints

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 asks for a requeue as well: have it sent by `#SBATCH --signal=USR1@120`."""


class Preempted(SystemExit):
    """The process was asked to leave, and has saved."""


class Preemption(Callback):
    """On Ctrl-C, SIGTERM or SIGUSR1, finish the optimizer step, save, and stop; on SIGUSR1 under SLURM, requeue.

    All ranks agree behind each step, so that one that got the signal later still leaves at the same step. Where a
    validation is due behind that step it runs first. The same command then goes on as if nothing had happened. A
    second Ctrl-C leaves at once, without saving.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._leaving = False
        self._before: dict[int, Any] = {}
        self._first_rank = True
        self._end_others: Callable[[int], None] | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT == self._signal:
            if self._end_others is not None:
                self._end_others(signal.SIGKILL)
            os._exit(128 + number)
        if number == signal.SIGINT and self._first_rank:
            os.write(2, b"\nfinishing this step, then saving; Ctrl-C once more leaves at once, without\n")
        self._signal = number

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._signal, self._leaving = 0, False
        self._first_rank = trainer.is_global_zero
        self._end_others = getattr(trainer.strategy.launcher, "kill", None)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.step_closed:
            return
        self._agree(trainer)
        if self._leaving and not trainer.validates_at(trainer.global_step):
            pl_module.on_train_batch_end(outputs, batch, batch_idx)  # its turn, to log the step, would come after ours
            self._leave(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._before and not self._leaving:
            self._agree(trainer)
        if self._leaving:
            self._leave(trainer)

    def _agree(self, trainer: Any) -> None:
        number = self._signal
        if trainer.world_size > 1:
            word = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(word, reduce_op="max"))
        if number:
            self._signal, self._leaving = number, True

    def _leave(self, trainer: Any) -> None:
        step, name = trainer.global_step, signal.Signals(self._signal).name
        where = None
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints):
                if callback.saved != step:
                    callback.save(trainer)
                callback.settle(trainer)
                where = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        job = os.environ.get("SLURM_JOB_ID")
        requeue = self._signal == signal.SIGUSR1 and job is not None
        self._put_back()
        if not trainer.is_global_zero:
            raise Preempted(0)  # another code would have a launcher kill the first rank, which has still to speak
        if requeue:
            try:
                subprocess.run(["scontrol", "requeue", str(job)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"job {job} could not be requeued: {error}", file=sys.stderr)
                requeue = False
        who = f"job {job}, requeued," if requeue else "the same command"
        then = f"{who} goes on from {where}, {where.resolve().name}" if where else "nothing saved, checkpointing is off"
        print(f"{name} behind step {step}: stopped; {then}", file=sys.stderr, flush=True)
        raise Preempted(0 if requeue else 128 + self._signal)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._put_back()
