"""NAME/sweep.json: what a sweep knows about a run: its attempts, and whether it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from depthlit import runs
from depthlit.study.planned import Planned, complete, step_of

FILE, LOG = "sweep.json", "log.txt"


@dataclass
class Attempt:
    """One process that worked on a run.

    Args:
        begun: UTC.
        from_step: optimizer step at which it began.
        to_step: that of the last checkpoint behind it; None while it runs, or if its sweep was killed.
        seconds: how long it took.
        code: exit code; negative for a signal.
        stopped: whether the sweep stopped it.
    """

    begun: str
    from_step: int
    to_step: int | None = None
    seconds: float | None = None
    code: int | None = None
    stopped: bool = False


@dataclass
class Record:
    """What is known about a run.

    Args:
        finished: whether the checkpoint of the last step is there; written last.
        attempts: in order.
        error: last line that a failed attempt left.
    """

    finished: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of all attempts whose end was seen."""
        return sum(attempt.seconds or 0.0 for attempt in self.attempts)


def load(folder: Path) -> Record:
    """Of a run folder; an empty one where there is none, or none that can be read: the checkpoint then tells."""
    try:
        content: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content["attempts"]]
        return Record(bool(content["finished"]), attempts, str(content["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Record()


def save(folder: Path, record: Record) -> None:
    """Write it, whole or not at all."""
    runs.write_json(folder / FILE, asdict(record))


def begin(folder: Path) -> Record:
    """Note that an attempt begins."""
    record = load(folder)
    record.attempts.append(Attempt(datetime.now(UTC).isoformat(timespec="seconds"), step_of(folder)))
    save(folder, record)
    return record


def end(run: Planned, folder: Path, record: Record, code: int, seconds: float, stopped: bool = False) -> None:
    """Note that the last attempt has ended. Only its last checkpoint says whether the run is finished: a process that
    is told to stop may leave with exit code 0."""
    last = record.attempts[-1]
    last.to_step, last.code, last.seconds, last.stopped = step_of(folder), code, round(seconds, 2), stopped
    record.finished = complete(run, folder)
    record.error = "" if record.finished or stopped else reason(folder, code)
    save(folder, record)


def reason(folder: Path, code: int) -> str:
    """Why an attempt failed: the last line it printed, and the signal or exit code."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    try:
        with open(folder / LOG, "rb") as log:
            log.seek(max(0, log.seek(0, 2) - 4096))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return how
    said = lines[-1] if lines and not lines[-1].startswith("# ") else ""
    return f"{how}: {said.removeprefix('depthlit: error: ')}" if said else how


class Rates:
    """FLOPs per second, for estimates: as measured of finished runs of the same model, else of all, else as stated.

    Args:
        stated: of the study.
    """

    def __init__(self, stated: float | None = None) -> None:
        self.stated = stated
        self._sums: dict[Any, tuple[float, float]] = {}

    def learn(self, plans: Iterable[Planned], folder: Path) -> Rates:
        """Take in the finished runs of a folder."""
        self._sums = {}
        for run in {run.name: run for run in plans}.values():
            record = load(folder / run.name)
            if record.finished and record.seconds > 1 and run.flops and record.attempts[0].from_step == 0:
                for key in ((run.shape, run.strategy), None):
                    flops, seconds = self._sums.get(key, (0.0, 0.0))
                    self._sums[key] = flops + run.flops, seconds + record.seconds
        return self

    @property
    def measured(self) -> bool:
        """Whether any run has been measured."""
        return bool(self._sums)

    def of(self, run: Planned) -> float | None:
        """For a run."""
        flops, seconds = self._sums.get((run.shape, run.strategy)) or self._sums.get(None) or (0.0, 0.0)
        return flops / seconds if seconds else self.stated
