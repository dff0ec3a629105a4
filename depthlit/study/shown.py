"""What a person sees while a sweep is at work: a live table on a terminal, a line per event elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from depthlit.loggers import METRICS
from depthlit.progress import duration
from depthlit.study.planned import Planned
from depthlit.study.record import Rates, load
from depthlit.study.results import final
from depthlit.study.sweep import Running

REFRESH = 1.0


class Shown:
    """Shows a sweep; to be entered for as long as it works.

    Args:
        plans: all runs.
        folder: that holds the run folders.
        rates: for the time left.
        parallel: runs at a time.
        console: where to; live if it is a terminal.
    """

    def __init__(
        self, plans: Sequence[Planned], folder: Path, rates: Rates, parallel: int, console: Console | None = None
    ) -> None:
        self.plans = {run.name: run for run in plans}
        self.folder, self.rates, self.parallel = folder, rates, parallel
        self.console = console or Console()
        self.status = dict.fromkeys(self.plans, "waiting")
        self.said: dict[str, str] = {}
        self._live: Live | None = None
        self._ticked = 0.0

    def __enter__(self) -> Shown:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self.table([]), refresh=True)
            self._live.stop()

    def event(self, name: str, status: str, text: str = "") -> None:
        """A run changed its status."""
        self.status[name], self.said[name] = status, text
        if status == "finished":
            loss = final(self.folder / name / METRICS).get("val/loss")
            took = load(self.folder / name).seconds
            self.said[name] = (f"val/loss {float(loss):.4f} " if loss else "") + (
                f"in {duration(took)}" if took else ""
            )
            self.rates.learn(self.plans.values(), self.folder)
        if self._live is None:
            said = f": {self.said[name]}" if self.said[name] else ""
            about = f"  [{self.summary([])}]" if status in ("finished", "failed") else ""
            self.console.print(
                f"{datetime.now():%H:%M:%S} {status} {name}{said}{about}", highlight=False, markup=False, soft_wrap=True
            )

    def tick(self, running: Sequence[Running]) -> None:
        """Time passed: draw the table anew, not too often."""
        now = time.monotonic()
        if self._live is not None and now - self._ticked > REFRESH:
            self._ticked = now
            self._live.update(self.table(running), refresh=True)

    def summary(self, running: Sequence[Running]) -> str:
        """Counts, and the time left."""
        counts = Counter(self.status.values())
        parts = [f"{counts['finished']} of {len(self.plans)} finished"]
        parts += [f"{n} {status}" for status, n in sorted(counts.items()) if status not in ("finished", "waiting")]
        left = self.left(running)
        return ", ".join(parts) + (f"; about {duration(left)} left" if left else "")

    def left(self, running: Sequence[Running]) -> float | None:
        """Seconds until all are done; None where no rate is known."""
        total = 0.0
        for name, run in self.plans.items():
            if self.status[name] in ("finished", "failed"):
                continue
            rate = self.rates.of(run)
            if rate is None or run.flops is None:
                return None
            total += run.flops / rate * (1 - step_logged(self.folder / name / METRICS) / (run.steps or 1))
        return max(0.0, total) / self.parallel

    def table(self, running: Sequence[Running]) -> Table:
        """The runs at work, and those that went wrong."""
        drawn = Table(title=self.summary(running), title_justify="left")
        for column in ("run", "", "status", "step", "took", ""):
            drawn.add_column(column, overflow="fold")
        now = {one.run.name: time.monotonic() - one.since for one in running}
        for name, run in self.plans.items():
            status = self.status[name]
            if status in ("waiting", "finished"):
                continue
            labels = " ".join(f"{axis}={label}" for axis, label in run.cell.labels.items())
            step = f"{step_logged(self.folder / name / METRICS)}/{run.steps}"
            drawn.add_row(name, labels, status, step, duration(now[name]) if name in now else "", self.said[name])
        return drawn


def step_logged(metrics: Path) -> int:
    """The step of the last line of a metrics file; 0 if it has none."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            last = file.read().splitlines()[-1]
        return int(last.partition(b",")[0])
    except (OSError, ValueError, IndexError):
        return 0
