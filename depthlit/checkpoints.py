"""Checkpoints: taken after the validation of their step, whole or not there at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

NAME = re.compile(r"step_(\d+)\.ckpt")


class Checkpoints(Checkpoint):
    """checkpoints/step_0000008.ckpt in the run folder, and last.ckpt, a link to the newest.

    A checkpoint is written under another name, then renamed, then linked, so that a kill at any moment leaves a
    last.ckpt that loads. It is taken behind everything else that a validation sets off: a run killed before has that
    step's validation and diagnostics once more when it is continued, one killed after has not.

    Args:
        every: optimizer steps between checkpoints; None: one at each validation. The last step always has one.
        keep: how many of the newest to keep; None: all.
        validates_at: tells whether a validation follows this step.
    """

    def __init__(self, every: int | None = None, keep: int | None = 3, validates_at: Any = None) -> None:
        for name, value in (("save_every", every), ("keep_checkpoints", keep)):
            if value is not None and value < 1:
                raise ValueError(f"trainer.{name} is {value}, it must be at least 1, or left out")
        self.every, self.keep = every, keep
        self.validates_at = validates_at
        self._saved = -1

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs to this step."""
        return step != self._saved and (self.every is None or step % self.every == 0)

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint of this run."""
        return self._saved

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._saved = trainer.global_step  # that of the checkpoint it came from, or 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.due(trainer.global_step):
            self.save(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self.every and pl_module.step_closed and self.due(step) and not self.validates_at(step):
            self.save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != self._saved:
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Save now. All ranks call this together, between optimizer steps."""
        if trainer.fast_dev_run:
            return
        step = trainer.global_step
        path = Path(trainer.default_root_dir) / "checkpoints" / f"step_{step:07d}.ckpt"
        partial = path.with_name(f".{path.name}.partial")
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            for stale in path.parent.glob(".step_*.partial"):
                remove(stale)
        for logger in trainer.loggers:  # what is logged so far will not be logged again
            getattr(logger, "flush", logger.save)()
        trainer.strategy.barrier("before a checkpoint")
        trainer.save_checkpoint(partial, weights_only=False)
        if trainer.is_global_zero:
            commit(partial, path)
            link(path.with_name("last.ckpt"), path.name)
            self._prune(path.parent, step)
        trainer.strategy.barrier("after a checkpoint")
        self._saved = step

    def _prune(self, folder: Path, step: int) -> None:
        """Remove older ones. Those of later steps, of a stretch that was abandoned, are not touched."""
        steps = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
        own = sorted(s for s in steps if s <= step)
        for s in own[: -self.keep] if self.keep else []:
            remove(steps[s])


def commit(partial: Path, path: Path) -> None:
    """Let a file or folder take the name of another at once, on disk."""
    for file in [partial] if partial.is_file() else [file for file in partial.rglob("*") if file.is_file()]:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():  # a folder cannot be renamed onto another
        aside = path.with_name(f".{path.name}.partial.old")
        path.rename(aside)
        partial.rename(path)
        remove(aside)
    else:
        partial.replace(path)


def link(path: Path, target: str) -> None:
    """Point a symbolic link elsewhere, at once."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(path)


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
