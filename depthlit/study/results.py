"""What a sweep writes down: study.json before the runs, results.csv behind them, and the tables that it prints.

study.json holds the cells of the study as it is now; a run folder whose row has left the study stays where it is.

    {"study", "title", "file", "axes": {name: [labels]}, "depthlit", "written",
     "cells": [{"run", "labels": {axis: label}, "seed", "steps", "tokens", "parameters", "flops",
                "settings": {dotted key: value, of all that is no default}, "command": [words]}]}

results.csv has one line per cell, in the order of the study: run, one column per axis, seed, status (finished, failed,
unfinished, missing), step, steps, tokens, parameters, flops, train/loss and val/loss of the last validated step, and
for small vocabularies the held-out cross-entropy of trigrams (depthlit/data/ngram.py), which a run should have passed.
No times are in it: an interrupted sweep ends with the same file as an unbroken one. They are in NAME/sweep.json.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from depthlit import __version__, runs
from depthlit.data.corpus import open_corpus
from depthlit.data.mirror import is_url
from depthlit.data.ngram import of_corpus
from depthlit.loggers import METRICS, rows_of
from depthlit.progress import duration
from depthlit.study import record
from depthlit.study.experiment import Study
from depthlit.study.planned import Planned, fit, step_of

COUNTED = 1024
"""Vocabularies up to this size have their trigrams counted."""


def write_study(study: Study, plans: Sequence[Planned], folder: Path) -> None:
    """study.json"""
    cells = [
        {
            "run": run.name,
            "labels": dict(run.cell.labels),
            "seed": run.cell.seed,
            "steps": run.steps,
            "tokens": run.tokens,
            "parameters": run.parameters,
            "flops": run.flops,
            "settings": dict(run.settings),
            "command": ["depthlit", *fit(run, folder / run.name)],
        }
        for run in plans
    ]
    runs.write_json(
        folder / "study.json",
        {
            "study": study.name,
            "title": study.title,
            "file": str(study.file),
            "axes": {name: list(labels) for name, labels in study.axes.items()},
            "depthlit": __version__,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "cells": cells,
        },
    )


def rows(plans: Sequence[Planned], folder: Path) -> list[dict[str, Any]]:
    """Lines of results.csv."""
    found = []
    for run in plans:
        place = folder / run.name
        losses = final(place / METRICS)
        found.append(
            {
                "run": run.name,
                **run.cell.labels,
                "seed": "" if run.cell.seed is None else run.cell.seed,
                "status": status(place),
                "step": step_of(place),
                "steps": run.steps,
                "tokens": run.tokens,
                "parameters": run.parameters,
                "flops": None if run.flops is None else f"{run.flops:.6g}",
                "train/loss": losses.get("train/loss", ""),
                "val/loss": losses.get("val/loss", ""),
                "trigram": trigram(tuple(run.data)) if "val/loss" in losses else "",
            }
        )
    return found


def status(place: Path) -> str:
    """Of a run folder, from its record."""
    known = record.load(place)
    if known.finished:
        return "finished"
    return "missing" if not known.attempts else "failed" if known.error else "unfinished"


def final(metrics: Path) -> dict[str, str]:
    """Losses of the last step that was validated, as they stand in the file."""
    if not metrics.is_file():
        return {}
    last: dict[str, str] = {}
    for row in rows_of(metrics):
        last = row if "val/loss" in row else last
    return {name: last[name] for name in ("train/loss", "val/loss") if name in last}


@cache
def trigram(paths: tuple[str, ...]) -> str:
    """Nats per token that counting reaches on one corpus of a small vocabulary; "" elsewhere."""
    if len(paths) != 1 or is_url(paths[0]):
        return ""
    try:
        return f"{of_corpus(paths[0])[-1]:.4f}" if open_corpus(paths[0]).vocab_size <= COUNTED else ""
    except ValueError:
        return ""


def read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Names of the axes of a results.csv, and its lines.

    Raises:
        ValueError: there is no such file, or it is none.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            names, found = list(reader.fieldnames or []), list(reader)
        first, last = names.index("run") + 1, names.index("seed")
        if not {"status", "val/loss"} <= set(names):
            raise ValueError("columns are missing")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{file} is no results.csv of a sweep ({error})") from None
    return names[first:last], found


def known(file: Path) -> dict[str, dict[str, str]]:
    """Lines by run of what is finished in a results.csv that another folder has left.

    Raises:
        ValueError: there is no such file, or it is none.
    """
    return {line["run"]: line for line in read(file)[1] if line["status"] == "finished"}


def write_results(
    plans: Sequence[Planned], folder: Path, elsewhere: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """results.csv; returns its lines.

    Args:
        plans: all runs of the study.
        folder: of the run folders.
        elsewhere: lines of runs that were finished in another folder.
    """
    lines, text = rows(plans, folder), io.StringIO()
    for line in lines:
        line |= {key: value for key, value in (elsewhere or {}).get(line["run"], {}).items() if key in line}
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    runs.write_text(folder / "results.csv", text.getvalue())
    return lines


def dry(study: Study, plans: Sequence[Planned], folder: Path, rates: record.Rates, commands: bool = False) -> str:
    """What the study would run: a table with the cost of each run, and their sum."""
    names = list(study.axes)
    head = ["run", *names, "seed", "params M", "steps", "tokens M", "PFLOP", "hours", "status"]
    unique = {run.name: run for run in plans}
    lines, hours = [], 0.0
    for run in plans:
        seconds = _seconds(run, rates)
        lines.append(
            [run.name, *(run.cell.labels[name] for name in names), _text(run.cell.seed), f"{run.parameters / 1e6:.3f}",
             _text(run.steps), _text(run.tokens, 1e-6, ".1f"), _text(run.flops, 1e-15, ".3g"),
             _text(seconds, 1 / 3600, ".3g"), status(folder / run.name)]
        )  # fmt: skip
    left = [run for run in unique.values() if not record.load(folder / run.name).finished]
    text = table([head, *lines], left=len(names) + 1)
    if commands:
        text += "\n\n" + "\n".join(shlex.join(["depthlit", *fit(run, folder / run.name)]) for run in left)
    for name, runs_ in (("all", list(unique.values())), ("left", left)):
        unknown = sum(run.flops is None for run in runs_)
        hours = sum(_seconds(run, rates) or 0.0 for run in runs_) / 3600
        tokens, flops = sum(run.tokens or 0 for run in runs_), sum(run.flops or 0.0 for run in runs_)
        text += f"\n{name}: {len(runs_)} runs, {tokens / 1e9:.4g}B tokens, {flops / 1e15:.4g} PFLOP"
        text += f", {hours:.3g} hours" if any(rates.of(run) for run in runs_) else ""
        text += f"; {unknown} of unknown length: run the study that measures their speed first" if unknown else ""
    if len(unique) < len(plans):
        text += f"\n{len(plans)} cells share {len(unique)} runs: those with the same settings are one"
    rate = {rates.of(run) for run in plans} - {None}
    if rate:
        text += "\nhours at " + (f"{min(rate):.3g}" if len(rate) == 1 else f"{min(rate):.3g} to {max(rate):.3g}")  # type: ignore[type-var]
        text += " FLOP/s per run, " + ("measured in finished runs" if rates.measured else "as the study states")
    return text


def outcome(lines: Sequence[dict[str, Any]], folder: Path) -> str:
    """The table at the end, with what the attempts took."""
    if not lines:
        return "no runs"
    dropped = ("parameters", "flops", "tokens", "steps")
    head = [name for name in lines[0] if name not in dropped]
    body = []
    for line in lines:
        known = record.load(folder / line["run"])
        cells = [_short(name, line[name]) for name in head]
        body.append([*cells, duration(known.seconds) if known.attempts else "", known.error[:80]])
    first = sum(name not in ("step", "train/loss", "val/loss", "trigram", "seed", "status") for name in head)
    return table([[*head, "took", ""], *body], left=first)


def table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns, the first ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if i < left or i == len(widths) - 1 else str.rjust for i in range(len(widths))]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )


def _seconds(run: Planned, rates: record.Rates) -> float | None:
    rate = rates.of(run)
    return None if rate is None or run.flops is None else run.flops / rate


def _text(value: float | None, scale: float | None = None, form: str = "") -> str:
    if value is None:
        return "-"
    return format(value if scale is None else value * scale, form)


def _short(name: str, value: Any) -> str:
    return f"{float(value):.4f}" if name.endswith("loss") and value != "" else str(value)
