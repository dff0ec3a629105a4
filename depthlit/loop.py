"""What happens around a training step: the endless stream, the clock, the random numbers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from depthlit import cost

ENDLESS = 2**40
"""Micro-batches that a loader claims to have. Lightning reads one batch ahead in a loader without a length, and the
state saved with a checkpoint would then be one batch late."""


class Endless:
    """A training loader without end, which reads all micro-batches of an optimizer step at once.

    Epochs of the loader follow each other within it, so that none cuts an accumulation short and Lightning sees a
    single epoch. Each batch carries `counted`, the number of targets that count in its whole step on this rank, so
    that every micro-batch can weight its loss exactly, under any engine and before its backward. What is held back is
    a few token ids.

    Args:
        loader: gives dicts with `tokens` and `targets`. If it has state_dict and load_state_dict they are used;
            otherwise a resumed run reads up to its place again, which is right if an epoch's order is reproducible.
        window: micro-batches per optimizer step.

    Attributes:
        waited: seconds spent on reading.
    """

    def __init__(self, loader: Any, window: int = 1) -> None:
        self.loader, self.window = loader, window
        self.epoch, self.served, self.waited = 0, 0, 0.0
        self._left = 0  # micro-batches of the current step still to be handed out
        self._skip = 0

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stream = self._stream()
        while True:
            begin = time.perf_counter()
            batches = [next(stream) for _ in range(self.window)]
            self.waited += time.perf_counter() - begin
            counted = torch.stack([(batch["targets"] >= 0).sum() for batch in batches]).sum()
            for i, batch in enumerate(batches):
                self._left = self.window - 1 - i
                yield {**batch, "counted": counted}

    def _stream(self) -> Iterator[dict[str, Any]]:
        empty = 0
        while True:
            sampler: Any = getattr(self.loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            empty += 1
            for i, batch in enumerate(self.loader):
                empty = 0
                if i < self._skip:
                    continue
                self.served += 1
                yield batch
            if empty == 2:  # once may be the end of an epoch at which a run was resumed
                raise ValueError("the training data loader is empty: no batch in a whole epoch")
            self.epoch, self.served, self._skip = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        if self._left:
            raise RuntimeError("a checkpoint can only be taken between optimizer steps, not within an accumulation")
        inner = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
        return {"epoch": self.epoch, "served": self.served, "loader": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.served = state["epoch"], state["served"]
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state["loader"])
        else:
            self._skip = self.served


def checked(loader: Any, world_size: int) -> Any:
    """The loader itself.

    Raises:
        ValueError: it would give every rank the same data.
    """
    mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if world_size > 1 and mapped and not isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            f"the training data loader would give all {world_size} ranks the same batches; give it a "
            "torch.utils.data.DistributedSampler, or use depthlit.data"
        )
    return loader


def recounted(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Let a checkpoint count its micro-batches as if all had been taken with this accumulation.

    Lightning steps and validates by the number of the micro-batch, which would be out of phase otherwise.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    for counts in loop.get("epoch_loop.batch_progress", {}).values():
        if isinstance(counts, dict):
            counts |= dict.fromkeys(counts, checkpoint["global_step"] * accumulate)


class LastStep(Callback):
    """Has the last step of a run validated, whether or not its number is due."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True


class Clock(Callback):
    """Tokens per second of training alone: reading data counts, validation, diagnostics and saving do not.

    Puts throughput/tokens_per_sec, over all ranks and since the last logged step, into the module's figures; on a GPU
    whose peak is known also throughput/mfu, the share of the peak that a step's FLOPs (`cost.training_flops`) make.

    Attributes:
        seconds: spent on training since the start of this process.
        tokens_per_sec: over the last logged interval, 0 before the first.
    """

    def __init__(self) -> None:
        self.seconds = self.tokens_per_sec = 0.0
        self._mark = self._since = 0.0
        self._paused = self._cold = True
        self._tokens = 0
        self._ceiling: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused, self._since, self._tokens = True, self.seconds, pl_module.tokens_seen
        self._cold = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._paused:
            self._paused, self._mark = False, time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._cold and pl_module.compiled != "no":  # compiling is no training
            if trainer.is_global_zero:
                print(f"compiled in {now - self._mark:.0f} s, with the first micro-batch", flush=True)
            self._mark, self._tokens = now, self._tokens + batch["tokens"].numel() * trainer.world_size
        self._cold = False
        self.seconds, self._mark = self.seconds + now - self._mark, now
        if not pl_module.step_closed or trainer.global_step % trainer.log_every_n_steps:
            return
        self.tokens_per_sec = (pl_module.tokens_seen - self._tokens) / max(self.seconds - self._since, 1e-9)
        self._since, self._tokens = self.seconds, pl_module.tokens_seen
        pl_module.figures["throughput/tokens_per_sec"] = self.tokens_per_sec
        if self._ceiling is None:
            self._ceiling = ceiling(pl_module, batch["tokens"].shape[-1]) * trainer.world_size
        if self._ceiling:
            pl_module.figures["throughput/mfu"] = self.tokens_per_sec / self._ceiling

    def pause(self) -> None:
        """Stop until the next micro-batch begins."""
        self._paused = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.pause()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.pause()


def ceiling(model: Any, tokens: int) -> float:
    """Tokens per second of one device at its peak, at sequence length `tokens`; 0 where the peak is not known."""
    if model.device.type != "cuda":
        return 0.0
    peak = cost.peak_flops(torch.cuda.get_device_name(model.device))
    return (peak or 0.0) / cost.training_flops(cost.on_meta(model.shape, model.residual), tokens)


class Randomness(Callback):
    """Random numbers of training are those drawn inside its steps, whatever else draws some in between.

    The state of torch's, Python's and NumPy's generators is kept at the end of a micro-batch and put back at the
    beginning of the next, so that validation, diagnostics and loaders change nothing; it travels with a checkpoint as
    plain lists. On several ranks a resumed run takes the first rank's.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, ...] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._kept is not None:
            put_back(self._kept)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._kept = taken()

    def state_dict(self) -> dict[str, Any]:
        cpu, cuda, (version, numbers, gauss), (kind, keys, *rest) = taken() if self._kept is None else self._kept
        return {
            "torch": cpu.tolist(),
            "cuda": None if cuda is None else cuda.tolist(),
            "python": [version, list(numbers), gauss],
            "numpy": [str(kind), keys.tolist(), *map(float, rest)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (version, numbers, gauss), (kind, keys, place, has_gauss, cached) = state["python"], state["numpy"]
        self._kept = (
            torch.tensor(state["torch"], dtype=torch.uint8),
            None if state["cuda"] is None else torch.tensor(state["cuda"], dtype=torch.uint8),
            (version, tuple(numbers), gauss),
            (kind, np.array(keys, dtype=np.uint32), int(place), int(has_gauss), cached),
        )


def taken() -> tuple[Any, ...]:
    """State of the generators of torch (CPU, and this process's GPU or None), Python and NumPy."""
    cuda: Tensor | None = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def put_back(state: tuple[Any, ...]) -> None:
    """Undo what was drawn since the state was `taken`."""
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    random.setstate(python)
    np.random.set_state(numpy)
