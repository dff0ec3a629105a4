"""Lightning's Trainer with the defaults of pre-training: optimizer steps, run folders, endless data."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

from depthlit import engines, runs
from depthlit.checkpoints import NAME, Checkpoints
from depthlit.diagnostic import distinct
from depthlit.loggers import EventFiles, MetricsFile, Place
from depthlit.loop import Clock, Endless, LastStep, Randomness, checked
from depthlit.preemption import Preemption
from depthlit.progress import Announce

# Said at the start of every run, of no use to who reads it
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=r".*LeafSpec\)` is deprecated")

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
DEVICES = re.compile(r"auto|-1|[1-9]\d*|\[\d+(, ?\d+)*\]|(\d+, ?)+\d*")
MICRO = ("val_check_interval", "limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs")


class Trainer(pl.Trainer):
    """Lightning's Trainer, counting in optimizer steps.

    What differs: validation, checkpoints and everything logged are counted in optimizer steps, whatever the
    accumulation; the data have no epochs that could cut a step short; the figures go to TensorBoard and metrics.csv in
    the run folder, `default_root_dir`; a run continued from its checkpoint is, on a CPU, the unbroken one bit by bit.

    Args:
        max_steps: optimizer steps to train for; left at -1, the model's budget says.
        validate_every: optimizer steps between validations, also of the diagnostics that run then. The last step is
            validated too. 0: never. This one key takes the place of Lightning's `val_check_interval` and
            `check_val_every_n_epoch`, which count micro-batches.
        save_every: optimizer steps between checkpoints; left out, one at each validation, behind it. The last step
            always has one.
        keep_checkpoints: how many of the newest checkpoints to keep; none given (null) keeps all.
        keep_best: keep the checkpoint with the lowest val/loss as well, linked as best.ckpt.
        save_in_background: copy a checkpoint to host memory and write it while training goes on. One at a time: the
            next waits for it, and tells if it could not be written. With ddp, fsdp2 and single devices.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: largest L2 norm of the gradient, under every engine; null for none. optim/grad_norm is the
            norm before clipping.
        precision: 32-true (the default) keeps weights, gradients and Adam's moments in fp32; bf16-mixed the same, with
            matrix products in bf16. bf16-pure keeps all of them in bf16 without a master copy, as the authors of
            DepthBench trained (arXiv:2609.32534), to reproduce their numbers. Know what it does: bf16 values lie 2^-8
            apart just below 1 and 2^-7 above, so that a step smaller than 2^-9 = 0.00195 rounds away. Norm gains and
            routing weights that start at 1 do not move at learning rates up to 1e-3 (at 1.6B, 5e-4, for the whole
            run), and the factor 1 - lr * weight_decay rounds to 1, so that weight decay does nothing at all. fp32 with
            weight decay 0.1 is therefore another recipe than the published one; fp32 with 0 is the nearest.
        log_every_n_steps: optimizer steps between points of train/loss and its companions.
        logger: true: TensorBoard and metrics.csv in the run folder; false: nothing; or Lightning loggers.
        callbacks: diagnostics and other callbacks.
        default_root_dir: the run folder; the working directory when left out.
        enable_progress_bar: print the summary at the start and progress.
        enable_checkpointing: write checkpoints.
        num_sanity_val_steps: validation batches to try before training; they change nothing.
        max_epochs: leave it at -1: the data have no epochs here, `max_steps` ends a run.
        enable_model_summary: Lightning's table of modules, beside the summary that is printed anyway.
        fast_dev_run: this many micro-batches of everything, one if true, without logs and checkpoints.

    Raises:
        ValueError: a setting of Lightning's is given that would count micro-batches or repeat epochs.
    """

    fast_dev_run: int | bool
    log_every_n_steps: int

    def __init__(
        self,
        *,
        max_steps: int = -1,
        validate_every: int = 250,
        save_every: int | None = None,
        keep_checkpoints: int | None = 3,
        keep_best: bool = True,
        save_in_background: bool = False,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = 1.0,
        precision: str | int = "32-true",
        log_every_n_steps: int = 1,
        logger: Logger | Iterable[Logger] | bool = True,
        callbacks: list[Callback] | Callback | None = None,
        default_root_dir: str | Path | None = None,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        num_sanity_val_steps: int = 0,
        max_epochs: int | None = -1,
        enable_model_summary: bool = False,
        fast_dev_run: int | bool = False,
        **kwargs: Any,
    ) -> None:
        for key in MICRO:
            if kwargs.get(key):
                remedy = "trainer.validate_every" if key == "val_check_interval" else "trainer.max_steps"
                raise ValueError(f"trainer.{key} counts micro-batches or epochs, of which there are none; use {remedy}")
        if kwargs.get("check_val_every_n_epoch") not in (None, 1):
            raise ValueError(
                "trainer.check_val_every_n_epoch counts epochs, of which there are none; use validate_every"
            )
        if validate_every < 0:
            raise ValueError(f"trainer.validate_every is {validate_every}, it must not be negative (0: never)")
        for key, number in (
            ("accumulate_grad_batches", accumulate_grad_batches),
            ("log_every_n_steps", log_every_n_steps),
        ):
            if number < 1:
                raise ValueError(f"trainer.{key} is {number}, it must be at least 1")
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ValueError(f"trainer.gradient_clip_val is {gradient_clip_val}, it must be positive, or null for none")
        if not DEVICES.fullmatch(devices := str(kwargs.get("devices", "auto"))):
            raise ValueError(f"trainer.devices is {devices}: give a number, a list of indices, or auto")
        engines.check_devices(kwargs.get("accelerator", "auto"))
        if max_steps < 1 and max_steps != -1:
            raise ValueError(f"trainer.max_steps is {max_steps}, it must be positive; left out, the budget says")
        self.validate_every = validate_every
        if validate_every:
            kwargs |= {"val_check_interval": validate_every * accumulate_grad_batches, "check_val_every_n_epoch": None}
        else:
            kwargs |= {"limit_val_batches": 0}
        place = Place(Path(default_root_dir or os.getcwd()), self)
        if logger is True:
            logger = [EventFiles(place), MetricsFile(place)]
        if kwargs.get("profiler") in PROFILERS:  # by their names alone, Lightning's write where nobody reads it
            kwargs["profiler"] = PROFILERS[kwargs["profiler"]](dirpath=place.root, filename="profile")
        clock = Clock()
        built_in: list[Callback] = [Randomness(), clock, LastStep()]
        if enable_progress_bar:
            built_in.append(Announce(clock))
        theirs = distinct([callbacks] if isinstance(callbacks, Callback) else list(callbacks or []))
        if enable_checkpointing:
            theirs.append(Checkpoints(save_every, keep_checkpoints, keep_best, save_in_background, self.validates_at))
        theirs.append(Preemption())  # last, so that what is done at a step is done before leaving
        super().__init__(
            max_steps=max_steps,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            precision="bf16-true" if precision == "bf16-pure" else precision,  # type: ignore[arg-type]
            log_every_n_steps=log_every_n_steps,
            logger=logger,
            callbacks=[*built_in, *theirs],
            default_root_dir=default_root_dir,
            enable_progress_bar=enable_progress_bar,
            enable_checkpointing=enable_checkpointing,
            num_sanity_val_steps=num_sanity_val_steps,
            max_epochs=max_epochs,
            enable_model_summary=enable_model_summary,
            fast_dev_run=fast_dev_run,
            **kwargs,
        )
        self.clock = clock
        engines.check_ranks(self, kwargs.get("accelerator", "auto"))
        engines.keep_fp32(self.strategy, str(precision))

    def validates_at(self, step: int) -> bool:
        """Whether a validation follows this optimizer step."""
        last = step >= self.max_steps
        return self.enable_validation and bool(self.validate_every) and (step % self.validate_every == 0 or last)

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train, from the beginning or on from a checkpoint.

        Args:
            model: the language model.
            train_dataloaders: instead of a data module: gives dicts with `tokens` and `targets`.
            val_dataloaders: likewise for validation.
            datamodule: the data.
            ckpt_path: the checkpoint to go on from.
            weights_only: load the checkpoint as plain data, which every checkpoint of ours is; the default.

        Raises:
            ValueError: the run folder holds another run's checkpoint, and none is given to go on from; or the engine
                cannot go on from the one that is given.
        """
        if isinstance(train_dataloaders, LightningDataModule):
            datamodule, train_dataloaders = train_dataloaders, None
        source = datamodule if datamodule is not None else model
        own = self.is_global_zero and not self.fast_dev_run
        with (
            runs.claimed(Path(self.default_root_dir)) if own else nullcontext(),
            endless(source, self) if train_dataloaders is None else nullcontext(),
        ):
            engines.check_writes(self.strategy)
            if ckpt_path is not None:
                engines.check_readable(self.strategy, Path(ckpt_path), self.world_size)
                if own:
                    runs.check_whole(Path(ckpt_path))
            if not self.fast_dev_run:
                step = self._step_of(ckpt_path)
                for logger in self.loggers:
                    if isinstance(logger, EventFiles | MetricsFile):
                        logger.go_on_from(step)
            if train_dataloaders is not None:
                train_dataloaders = Endless(checked(train_dataloaders, self.world_size), self._window)
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    @property
    def _window(self) -> int:
        return 1 if self.fast_dev_run else self.accumulate_grad_batches

    def _step_of(self, ckpt_path: str | Path | None) -> int:
        """Optimizer steps that a checkpoint has behind it; 0 for none."""
        if ckpt_path is None:
            own = runs.last_checkpoint(Path(self.default_root_dir))
            if own is not None and self.global_step == 0 and self.checkpoint_callback is not None:
                raise ValueError(
                    f"{self.default_root_dir} holds a run already; go on with ckpt_path={str(own)!r}, or name another "
                    "default_root_dir"
                )
            return self.global_step
        if match := NAME.fullmatch(Path(ckpt_path).resolve().name):
            return int(match[1])
        return int(runs.read_checkpoint(Path(ckpt_path)).get("global_step", 0))


@contextmanager
def endless(source: Any, trainer: Trainer) -> Iterator[None]:
    """Have the training loader of a data module or model wrapped, for a while."""
    own = source.train_dataloader
    source.train_dataloader = lambda: Endless(checked(own(), trainer.world_size), trainer._window)
    try:
        yield
    finally:
        del source.train_dataloader
