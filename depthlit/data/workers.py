"""Processes that share the work of a preparation, and the line that says how far they are."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any


def _start_worker(threads: int, parent: int) -> None:
    """The tokenizers library takes every core for itself unless told otherwise; and no worker outlives its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


class Pool:
    """Runs a function over jobs in some processes, or in this one.

    Args:
        workers: processes; 0 for none.
        jobs: how many there will be; with fewer jobs than workers, each gets several threads.
    """

    def __init__(self, workers: int, jobs: int) -> None:
        self.workers, self.threads = min(workers, jobs), max(1, workers // max(jobs, 1))
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        if self.workers:
            import litdata.streaming.writer  # noqa: F401 (once here, instead of once in every worker)

            context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
            self._executor = ProcessPoolExecutor(self.workers, context, _start_worker, (self.threads, os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def each(self, function: Any, jobs: list[Any]) -> Iterator[tuple[Any, Any]]:
        """(job, result), as they are done."""
        if self._executor is None:
            for job in jobs:
                yield job, function(job)
            return
        waiting: dict[Future[Any], Any] = {self._executor.submit(function, job): job for job in jobs}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for want of memory; use fewer --num_workers and run again"
            ) from None


class Progress:
    """Documents/s, tokens/s and time left on one line of a terminal; a line every half minute elsewhere."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.done, self.documents, self.tokens = max(total, 1), 0, 0, 0
        self.begun = self.shown = time.monotonic()
        self.quiet, self.terminal = quiet, sys.stderr.isatty()

    def add(self, size: int, documents: int, tokens: int) -> None:
        self.done, self.documents, self.tokens = self.done + size, self.documents + documents, self.tokens + tokens
        now = time.monotonic()
        if not self.quiet and now - self.shown >= (0.2 if self.terminal else 30):
            self.shown = now
            self._show(now - self.begun)

    def _show(self, seconds: float) -> None:
        share = min(self.done / self.total, 1.0)
        left = seconds / share - seconds if share else 0.0
        line = (
            f"{share:6.1%}  {self.documents:,} documents ({self.documents / seconds:,.0f}/s)  "
            f"{self.tokens:,} tokens ({self.tokens / seconds:,.0f}/s)  {int(left) // 60}:{int(left) % 60:02d} left"
        )
        print(
            f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def close(self) -> None:
        if not self.quiet and self.terminal and self.shown > self.begun:
            self._show(time.monotonic() - self.begun)
            print(file=sys.stderr)
