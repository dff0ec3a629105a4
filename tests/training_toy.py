"""A tiny model on tiny random data with uneven masks: for tests, in this process or as a script of its own.

python tests/training_toy.py ROOT '{"max_steps": 12, "kill": ["train", 7]}' [ROOT OPTIONS ...]    one after another
"""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from depthlit.module import LanguageModel
from depthlit.optim import OptimizerSettings, Schedule
from depthlit.residuals import PreLN
from depthlit.shape import ShapeSpec
from depthlit.trainer import Trainer

SHAPE = ShapeSpec(2, 16, n_head=2, vocab_size=16)
T = 8


class Rows(Dataset):
    """Random tokens; each row has another share of its targets masked."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(SHAPE.vocab_size, (n, T + 1), generator=g)
        self.tokens, self.targets = x[:, :-1].contiguous(), x[:, 1:].clone()
        self.targets[torch.rand(n, T, generator=g) < 0.95 * torch.rand(n, 1, generator=g)] = -1

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[i], "targets": self.targets[i]}


class Toy(LightningDataModule):
    vocab_size = SHAPE.vocab_size

    def __init__(self, batch_size: int = 2, rows: int = 20, blank: bool = False) -> None:
        super().__init__()
        self.batch_size, self.block_size = batch_size, T
        self.train, self.val = Rows(rows, 0), Rows(8, 1)
        if blank:
            self.train.targets.fill_(-1)

    def _loader(self, rows: Rows) -> DataLoader:
        world = self.trainer.world_size if self.trainer else 1
        share = DistributedSampler(rows, world, self.trainer.global_rank, shuffle=False) if world > 1 else None
        return DataLoader(rows, self.batch_size, sampler=share)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val)


class ToyModel(LanguageModel):
    """A language model that can draw random numbers, or meet a NaN, while it trains."""

    noisy = False
    poisoned: tuple[int, int] = (-1, 0)  # micro-batch and rank whose loss is NaN

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.noisy:
            loss = loss * (torch.rand(()) + random.random() + np.random.rand())
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().forward(*args, **kwargs)
        here = (self.trainer.fit_loop.total_batch_idx, self.trainer.global_rank)
        return loss * float("nan") if self.training and here == tuple(self.poisoned) else loss


class Kill(Callback):
    """kill -9 of this process, in the training or the validation of a step."""

    def __init__(self, where: str, step: int) -> None:
        self.where, self.step = where, step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if self.where == "train" and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "validation" and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Fault(Callback):
    """Something that befalls one rank in the middle of a step, noted in the file `fault` of the run folder.

    Args:
        what: `raises`, `full` (files of more than 20 KB can no longer be written), or the name of a signal.
        step: the optimizer step in the making.
        rank: whom it befalls.
    """

    def __init__(self, what: str, step: int, rank: int) -> None:
        self.what, self.step, self.rank = what, step, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step + 1, trainer.global_rank) != (self.step, self.rank):
            return
        (Path(trainer.default_root_dir) / "fault").touch()
        if self.what == "raises":
            raise ZeroDivisionError("planted")
        if self.what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        else:
            os.kill(os.getpid(), signal.Signals[self.what])


class Stream(Callback):
    """Writes the dtypes of what passes from block to block into the file `stream.RANK` of the run folder."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.dtypes: set[str] = set()
        for block in pl_module.decoder.blocks:
            block.register_forward_hook(lambda block, given, state: self.dtypes.add(str(state.dtype)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        file = Path(trainer.default_root_dir) / f"stream.{trainer.global_rank}"
        file.write_text(" ".join(sorted(self.dtypes)))


def model(**settings: Any) -> ToyModel:
    noisy, poisoned = settings.pop("noisy", False), settings.pop("poisoned", (-1, 0))
    made = ToyModel(settings.pop("shape", SHAPE), settings.pop("residual", PreLN()), **settings)
    made.noisy, made.poisoned = noisy, poisoned
    return made


def fit(
    root: Path | str,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    callbacks: list[Callback] | None = None,
    **trainer_settings: Any,
) -> tuple[Trainer, ToyModel]:
    """Train the toy; settings are the model's, the rest the trainer's."""
    settings = {"optimizer": OptimizerSettings(lr=1e-2), "schedule": Schedule(total_steps=24), **(settings or {})}
    defaults = {"max_steps": 12, "validate_every": 4, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False}
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    trainer = Trainer(default_root_dir=str(root), callbacks=callbacks, **{**defaults, **trainer_settings})
    made = model(**settings)
    trainer.fit(made, datamodule=Toy(**(data or {})), ckpt_path=ckpt_path)
    return trainer, made


def column(root: Path | str, name: str, file: str = "metrics.csv") -> dict[int, float]:
    """Step -> value of one figure in a run's metrics file; fails if a step comes twice or steps go back."""
    with open(Path(root) / file, newline="") as opened:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(opened) if row.get(name)]
    steps = [step for step, _ in rows]
    assert steps == sorted(set(steps)), f"{name}: steps {steps}"
    return dict(rows)


class Done(NamedTuple):
    code: int  # negative for a signal
    said: str


def script(root: Path, timeout: float = 120, **options: Any) -> Done:
    """`fit` in a process of its own, which starts further ranks by itself; done when all of them have ended."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, str(root), json.dumps(options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{said}") from None
    return Done(process.returncode, said)


def in_processes(n: int, *runs: tuple[Path, dict[str, Any]], timeout: float = 400) -> str:
    """`fit` one (folder, options) after the other on n ranks in processes of their own; what they said.

    As if started by torchrun, so that the same processes can train more than once.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = [word for root, options in runs for word in (str(root), json.dumps({"devices": n, **options}))]
    with tempfile.TemporaryFile("w+") as said:
        ranks = []
        for rank in map(str, range(n)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
                     "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "TORCHELASTIC_RUN_ID": "toy"}  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **place}
            command = [sys.executable, "-W", "ignore", __file__, *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        until = time.monotonic() + timeout
        try:
            codes = [process.wait(max(0.1, until - time.monotonic())) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        said.seek(0)
        text = said.read()
    assert codes == [0] * n, text[-5000:]
    return text


EXACT_TAGS = ("train/loss", "optim/lr", "optim/grad_norm", "progress/tokens", "val/loss", "val/ppl")
TAGS = (*EXACT_TAGS, "throughput/tokens_per_sec")


def events(root: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of a run's event files; fails if a step comes twice or steps go back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(root), size_guidance={"scalars": 0})
    board.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in board.Tags()["scalars"]:
        steps = [event.step for event in board.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag}: steps {steps}"
        found[tag] = {event.step: event.value for event in board.Scalars(tag)}
    return found


def last(root: Path) -> str:
    return str(root / "checkpoints" / "last.ckpt")


def weights(m: LanguageModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in m.decoder.parameters()])


def same_run(a: Path, b: Path) -> None:
    """All figures but the speed, bit by bit and at the same steps, in both kinds of files."""
    import pytest

    boards = events(a), events(b)
    assert set(boards[0]) == set(boards[1]) == set(TAGS)
    for tag in EXACT_TAGS:
        assert column(a, tag) == column(b, tag), tag
        assert boards[0][tag] == boards[1][tag], tag
        assert boards[0][tag] == pytest.approx(column(a, tag), rel=1e-6), tag
    assert list(column(a, TAGS[-1])) == list(column(b, TAGS[-1]))


class Log(Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []
        self.tokens: list[int] = []
        self.gradients_left = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.step_closed:
            self.tokens.append(pl_module.tokens_seen)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(trainer.global_step)


if __name__ == "__main__":
    import atexit

    torch.set_num_threads(1)

    @atexit.register
    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    for root, given in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        options = json.loads(given)
        if kill := options.pop("kill", None):
            options["callbacks"] = [Kill(*kill)]
        if fault := options.pop("fault", None):
            options["callbacks"] = [Fault(*fault)]
        if options.pop("stream", False):
            options["callbacks"] = [Stream()]
        if "strategy" in options:
            from engines import ENGINES

            options["strategy"] = ENGINES[options["strategy"]]()
        fit(root, **options)
