"""Files and folders that take their names at once, and checkpoints written into them: at once or in the background."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map_only

from depthlit import ranks
from depthlit.files import remove

FAILURES = (OSError, RuntimeError, CheckpointException)
"""What a checkpoint that cannot be written raises; torch's own writers turn a full disk into a RuntimeError."""


def own_failure(error: BaseException) -> BaseException | None:
    """What went wrong on this rank, in one line; None if it only hears of what went wrong on others.

    torch raises one CheckpointException on all ranks, whose text is the tracebacks of those that failed.
    """
    if isinstance(error, CheckpointException):
        failure = error.failures.get(ranks.world()[0])
        return None if failure is None else own_failure(failure[0])
    if "inline_container" in str(error):  # torch's own writer says "unexpected pos 7104 vs 6996"
        return OSError(f"torch could not write all of it, is the disk full? {error}")
    return error


class OneFile(TorchCheckpointIO):
    """Writes straight to its place. Lightning's own way passes through memory and /tmp, whole each time."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write(checkpoint, Path(path))


class Background(TorchCheckpointIO):
    """Writes in a thread, from a copy in host memory, while training goes on; one checkpoint at a time.

    Lightning's AsyncCheckpointIO copies within the device's memory, and tells of an error late.

    Args:
        finish: called in the thread with the path once all is on disk.
        group: ranks that write a checkpoint's shards together: a group on CPUs, in which nothing else goes on.
    """

    def __init__(self, finish: Callable[[Path], None], group: dist.ProcessGroup | None = None) -> None:
        self._finish, self._group = finish, group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.settle()
        copy = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), checkpoint)

        def work() -> None:
            write(copy, Path(path))
            self._finish(Path(path))

        self._pending = self._thread.submit(work)

    def save_shards(self, shards: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Likewise for a distributed checkpoint; all ranks call this together.

        Args:
            shards: what torch.distributed.checkpoint takes apart.
            rest: plain data, which the first rank writes beside them.
        """
        from torch.distributed.checkpoint import async_save

        self.settle()
        path.mkdir(parents=True, exist_ok=True)
        written: Any = async_save(shards, checkpoint_id=path, process_group=self._group)

        def work() -> None:
            written.result()  # on the first rank this is behind the writing of all others
            if dist.get_rank() == 0:
                write(rest, path / "meta.pt")
                self._finish(path)

        self._pending = self._thread.submit(work)

    def settle(self) -> None:
        """Wait for what is being written; raises what went wrong there."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def teardown(self) -> None:
        """Wait without raising: what is told here would hide how training ended."""
        self._thread.shutdown(wait=True)


def write(content: dict[str, Any], path: Path) -> None:
    """`torch.save` in which a full disk is an OSError that says so."""
    with open(path, "wb") as file:
        torch.save(content, file)


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
