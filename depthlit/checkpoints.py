"""Checkpoints: taken after the validation of their step, whole or not there at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from depthlit import ranks
from depthlit.checkpoint_files import FAILURES, Background, OneFile, commit, link, own_failure
from depthlit.engines import background_group
from depthlit.files import remove

NAME = re.compile(r"step_(\d+)\.ckpt")


class Checkpoints(Checkpoint):
    """checkpoints/step_0000008.ckpt in the run folder; last.ckpt and best.ckpt, links to the newest and the best.

    A checkpoint is written under another name, then renamed, then linked, so that a kill at any moment leaves a
    last.ckpt that loads. It is taken behind everything else that a validation sets off: a run killed before has that
    step's validation and diagnostics once more when it is continued, one killed after has not.

    Args:
        every: optimizer steps between checkpoints; None: one at each validation. The last step always has one.
        keep: how many of the newest to keep; None: all.
        keep_best: keep the one with the lowest val/loss as well, of those that were saved behind a validation.
        background: write while training goes on.
        validates_at: tells whether a validation follows this step.
    """

    def __init__(
        self,
        every: int | None = None,
        keep: int | None = 3,
        keep_best: bool = True,
        background: bool = False,
        validates_at: Callable[[int], bool] = lambda step: False,
    ) -> None:
        for name, value in (("save_every", every), ("keep_checkpoints", keep)):
            if value is not None and value < 1:
                raise ValueError(f"trainer.{name} is {value}, it must be at least 1, or left out")
        self.every, self.keep, self.keep_best, self.background = every, keep, keep_best, background
        self.validates_at = validates_at
        self._saved = -1
        self._best_step, self._best_loss = -1, math.inf

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs to this step."""
        return step != self._saved and (self.every is None or step % self.every == 0)

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint of this run."""
        return self._saved

    def state_dict(self) -> dict[str, Any]:
        return {"best_step": self._best_step, "best_loss": self._best_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best_step, self._best_loss = state["best_step"], state["best_loss"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy
        if self.background:
            engine.checkpoint_io = Background(self._finish, background_group(engine))
        elif type(engine.checkpoint_io) is TorchCheckpointIO:
            engine.checkpoint_io = OneFile()

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
        self.settle(trainer)

    def save(self, trainer: Any) -> None:
        """Save now. All ranks call this together, between optimizer steps and behind the validation of the step.

        Raises:
            ValueError: it could not be written, on whichever rank; what was there before is whole.
        """
        if trainer.fast_dev_run:
            return
        self.settle(trainer)
        step = trainer.global_step
        loss = float(trainer.callback_metrics.get("val/loss", math.nan)) if self.validates_at(step) else math.nan
        if loss < self._best_loss:
            self._best_step, self._best_loss = step, loss
        for logger in trainer.loggers:  # what is logged so far will not be logged again
            getattr(logger, "flush", logger.save)()
        self._all_ranks(trainer, lambda: self._write(trainer, step))
        self._saved = step

    def settle(self, trainer: Any) -> None:
        """Wait until what is being written in the background is there. All ranks call this together.

        Raises:
            ValueError: it could not be written, on whichever rank.
        """
        files = trainer.strategy.checkpoint_io
        if isinstance(files, Background):
            self._all_ranks(trainer, files.settle)

    def _write(self, trainer: Any, step: int) -> None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        partial = folder / f".step_{step:07d}.ckpt.partial"
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".step_*.partial"):
                remove(stale)
        trainer.strategy.barrier("before a checkpoint")
        trainer.save_checkpoint(partial, weights_only=False)
        if trainer.is_global_zero and not self.background:
            self._finish(partial)

    def _finish(self, partial: Path) -> None:
        """Let what is written take its name and be found, and remove what is no longer kept."""
        path = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        commit(partial, path)
        link(path.with_name("last.ckpt"), path.name)
        best = path.with_name(f"step_{self._best_step:07d}.ckpt")
        if self.keep_best and best.exists():
            link(path.with_name("best.ckpt"), best.name)
        steps = {file: int(match[1]) for file in path.parent.iterdir() if (match := NAME.fullmatch(file.name))}
        # those of later steps, of a stretch that was abandoned, are not touched
        own = sorted((file for file in steps if steps[file] <= steps[path]), key=lambda file: steps[file])
        for file in own[: -self.keep] if self.keep else []:
            if not (self.keep_best and file == best):
                remove(file)
        if not (best := path.with_name("best.ckpt")).exists():  # what it named was not kept
            best.unlink(missing_ok=True)

    def _all_ranks(self, trainer: Any, work: Callable[[], None]) -> None:
        """Do something that may fail on one rank only, and stop them all if it does."""
        error: BaseException | None = None
        try:
            work()
        except FAILURES as failed:
            error = own_failure(failed)
        try:
            lines = ranks.agree(error)
        except RuntimeError as failed:  # another rank waits for this one within the engine
            lines = [str(failed)]
        if lines:
            folder = Path(trainer.default_root_dir) / "checkpoints"
            if trainer.is_global_zero:
                for partial in folder.glob(".step_*.partial"):
                    remove(partial)
            last = folder / "last.ckpt"
            before = f"; {last}, {last.resolve().name}, is whole and can be gone on with" if last.exists() else ""
            raise ValueError(
                f"step {trainer.global_step}: no checkpoint could be written ({lines[0]}){before}"
            ) from error
