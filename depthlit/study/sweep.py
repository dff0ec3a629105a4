"""The sweep: makes the runs of a study that are not there yet, one after another or several at a time.

A run is `depthlit fit` as a process, and the leader of a group, of its own. Whoever begins it holds its claim
(claims.py), so sweeps at once share the work. A run that was interrupted is continued from its checkpoint; one that
failed is tried again; one that others work on is waited for, and taken over if they die.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from depthlit.study import record
from depthlit.study.claims import Claim, claim, holder
from depthlit.study.planned import Planned, complete, fit

POLL, POLL_OTHERS = 0.2, 2.0
PATIENCE = 10.0
"""Seconds that a run has to end by itself when the sweep is stopped."""


@dataclass
class Running:
    """A run at work."""

    run: Planned
    process: subprocess.Popen[bytes]
    claim: Claim
    record: record.Record
    since: float


class Watcher(Protocol):
    """Whoever shows what goes on."""

    def event(self, name: str, status: str, text: str = "") -> None:
        """A run changed its status: to running, finished, failed, retrying, elsewhere or stopped."""

    def tick(self, running: Sequence[Running]) -> None:
        """Time passed."""


def sweep(
    plans: Sequence[Planned],
    folder: Path,
    watcher: Watcher,
    parallel: int = 1,
    retries: int = 2,
    launcher: Sequence[str] = (),
) -> dict[str, str]:
    """Make all runs of a study.

    Args:
        plans: what to run; those with the same name are one.
        folder: that holds the run folders.
        watcher: is told what happens.
        parallel: runs at a time.
        retries: how often a run that fails is tried again in this sitting. An attempt that got as far as a new
            checkpoint does not count.
        launcher: words before the command, such as `srun`.

    Returns:
        Name -> "finished" or "failed".

    Raises:
        KeyboardInterrupt: on Ctrl-C or SIGTERM, when all runs have been stopped.
        ValueError: a run has no length, because the sweep that should have measured its speed is missing.
    """
    for run in plans:
        if run.steps is None:
            raise ValueError(f"{run.name} has no length: its speed was not measured; run that study first")
    work = Sitting(plans, folder, watcher, parallel, retries, launcher)
    with stoppable():
        try:
            while work.waiting or work.active:
                work.start()
                work.collect()
                watcher.tick(work.active)
                if work.waiting or work.active:
                    time.sleep(POLL)
        except BaseException:
            stop(work.active, folder)
            for one in work.active:
                watcher.event(one.run.name, "stopped")
            raise
    return work.done


class Sitting:
    """The state of a sweep at work; the arguments are those of `sweep`.

    Attributes:
        waiting: runs to be made, in order.
        active: at work.
        done: name -> "finished" or "failed".
    """

    def __init__(
        self, plans: Sequence[Planned], folder: Path, watcher: Watcher, parallel: int, retries: int,
        launcher: Sequence[str],
    ) -> None:  # fmt: skip
        self.folder, self.watcher, self.parallel, self.retries = folder, watcher, parallel, retries
        self.launcher = launcher
        self.waiting = list({run.name: run for run in plans}.values())
        self.active: list[Running] = []
        self.done: dict[str, str] = {}
        self._failures: dict[str, int] = {}
        self._elsewhere: set[str] = set()
        self._asked = 0.0

    def start(self) -> None:
        """Begin as many runs as there is room for. Those that others work on are asked for now and then."""
        due = time.monotonic() - self._asked > POLL_OTHERS
        for run in list(self.waiting):
            if len(self.active) >= self.parallel or (run.name in self._elsewhere and not due):
                continue
            begun = begin(run, self.folder, self.parallel, self.launcher)
            if begun is None:
                if run.name not in self._elsewhere:
                    self._elsewhere.add(run.name)
                    self.watcher.event(run.name, "elsewhere", holder(claim_of(run, self.folder)))
                continue
            self.waiting.remove(run)
            if isinstance(begun, Running):
                self.active.append(begun)
                step = begun.record.attempts[-1].from_step
                self.watcher.event(run.name, "running", f"from step {step}" if step else "")
            else:
                self.done[run.name] = "finished"
                self.watcher.event(run.name, "finished")
        if due:
            self._asked = time.monotonic()

    def collect(self) -> None:
        """Look after the runs that have ended."""
        for one in [one for one in self.active if one.process.poll() is not None]:
            finish(one, self.folder)
            self.active.remove(one)
            name, last = one.run.name, one.record.attempts[-1]
            if one.record.finished:
                self.done[name] = "finished"
                self.watcher.event(name, "finished")
                continue
            further = (last.to_step or 0) > last.from_step
            self._failures[name] = 0 if further else self._failures.get(name, 0) + 1
            if self._failures[name] > self.retries:
                self.done[name] = "failed"
                self.watcher.event(name, "failed", one.record.error)
            else:
                self.waiting.append(one.run)
                self.watcher.event(name, "retrying", one.record.error)


def claim_of(run: Planned, folder: Path) -> Path:
    """The file of a run's claim."""
    return folder / "claims" / f"{run.name}.lock"


def begin(run: Planned, folder: Path, parallel: int = 1, launcher: Sequence[str] = ()) -> Running | bool | None:
    """Begin a run, or go on with it. True: it is finished already. None: somebody else is at work on it."""
    place = folder / run.name
    if record.load(place).finished:
        return True
    held = claim(claim_of(run, folder))
    if held is None:
        return None
    try:
        known = record.load(place)
        if known.finished or complete(run, place):  # meanwhile, or by a run whose sweep was killed
            known.finished = True
            record.save(place, known)
            held.release()
            return True
        place.mkdir(parents=True, exist_ok=True)
        known = record.begin(place)
        command = [*launcher, sys.executable, "-m", "depthlit", *fit(run, place)]
        environment = dict(os.environ)
        if parallel > 1:  # else every run would take every core
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // parallel)))
        with open(place / record.LOG, "ab") as log:
            log.write(
                f"# attempt {len(known.attempts)}, {known.attempts[-1].begun}\n# {shlex.join(command)}\n".encode()
            )
            log.flush()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True, pass_fds=[held.fd],
            )  # fmt: skip
        held.say(run=process.pid)
        return Running(run, process, held, known, time.monotonic())
    except BaseException:
        held.release()
        raise


def finish(one: Running, folder: Path, stopped: bool = False) -> None:
    """Note how a run ended, and end what is left of its group."""
    code = one.process.wait()
    _signal(one, signal.SIGKILL)
    record.end(one.run, folder / one.run.name, one.record, code, time.monotonic() - one.since, stopped)
    one.claim.release()


def stop(active: Sequence[Running], folder: Path) -> None:
    """Have runs end, at once if they do not hurry. Their last checkpoints are whole whenever this happens."""
    for one in active:
        _signal(one, signal.SIGTERM)
    limit = time.monotonic() + PATIENCE
    with suppress(KeyboardInterrupt):  # pressed once more
        while time.monotonic() < limit and any(one.process.poll() is None for one in active):
            time.sleep(0.05)
    for one in active:
        _signal(one, signal.SIGKILL)
        finish(one, folder, stopped=True)


def _signal(one: Running, number: int) -> None:
    """To all processes of a run."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, number)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which batch systems send, stops like Ctrl-C."""

    def raise_it(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
