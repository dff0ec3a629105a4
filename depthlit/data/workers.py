"""Processes that share the work of a preparation, and the line that says how far they are."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

News = tuple[int, int, int, int]
"""Job, and the bytes, documents and tokens that it has got on by."""


class Listener(Protocol):
    """Takes the news: the progress line itself, or a queue to it."""

    def put(self, news: News) -> None: ...


_listener: Listener | None = None


def tell(news: News) -> None:
    """Say how far a job has got, from whatever process it runs in."""
    if _listener is not None:
        _listener.put(news)


def _start_worker(threads: int, parent: int, listener: Any) -> None:
    """The tokenizers library takes every core for itself unless told otherwise; and no worker outlives its parent."""
    global _listener

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _listener = listener
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


class Progress:
    """Documents/s, tokens/s and time left on one line of a terminal; a line every half minute elsewhere.

    Args:
        total: bytes of all jobs.
        quiet: show nothing.
    """

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.finished, self.documents, self.tokens = max(total, 1), 0, 0, 0
        self.under_way: dict[int, int] = {}  # bytes by job
        self.begun = self.shown = time.monotonic()
        self.quiet, self.terminal = quiet, sys.stderr.isatty()

    def put(self, news: News) -> None:
        job, size, documents, tokens = news
        self.under_way[job] = self.under_way.get(job, 0) + size
        self.documents, self.tokens = self.documents + documents, self.tokens + tokens
        now = time.monotonic()
        if not self.quiet and now - self.shown >= (0.2 if self.terminal else 30):
            self.shown = now
            self._show(now - self.begun)

    def finish(self, job: int, size: int) -> None:
        """A job of this size is done."""
        self.under_way.pop(job, None)
        self.finished += size

    def _show(self, seconds: float) -> None:
        share = min((self.finished + sum(self.under_way.values())) / self.total, 1.0)
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


class Pool:
    """Runs a function over jobs in some processes, or in this one.

    Args:
        workers: processes; 0 for none.
        jobs: how many there will be; with fewer jobs than workers, each gets several threads.
    """

    def __init__(self, workers: int, jobs: int) -> None:
        self.workers, self.threads = min(workers, jobs), max(1, workers // max(jobs, 1))
        self._executor: ProcessPoolExecutor | None = None
        self._queue: Any = None

    def __enter__(self) -> Pool:
        if self.workers:
            import litdata.streaming.writer  # noqa: F401 (once here, instead of once in every worker)

            context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
            self._queue = context.SimpleQueue()
            start = (self.threads, os.getpid(), self._queue)
            self._executor = ProcessPoolExecutor(self.workers, context, _start_worker, start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def each(
        self, function: Callable[[Any], Any], jobs: list[Any], progress: Progress | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """(job, result), as they are done; `progress` is handed what the jobs `tell`."""
        if self._executor is None:
            yield from self._here(function, jobs, progress)
            return
        waiting: dict[Future[Any], Any] = {self._executor.submit(function, job): job for job in jobs}
        try:
            while waiting:
                done = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).done
                while not self._queue.empty():
                    news = self._queue.get()
                    if progress is not None:
                        progress.put(news)
                for future in done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for want of memory; use fewer --num_workers and run again"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def _here(
        self, function: Callable[[Any], Any], jobs: list[Any], progress: Progress | None
    ) -> Iterator[tuple[Any, Any]]:
        global _listener
        before, _listener = _listener, progress
        try:
            for job in jobs:
                yield job, function(job)
        finally:
            _listener = before
