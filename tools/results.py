"""Means over seeds from the results.csv of a sweep, and which designs differ by more than their seeds do.

    python tools/results.py configs/studies/results/wav-cpu.csv
    python tools/results.py runs/depthbench-400m-cpu/results.csv --columns shape

One table for each setting of the axes that are neither rows nor columns. Every two designs of a column are compared as
in a report (depthlit/report/noise.py): paired t over three or more shared seeds, else Welch's t, Holm's method over all
pairs of a table, 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from depthlit.report.noise import INTERVAL, Difference, compare, holm, mean
from depthlit.study.results import read, table

Rows = list[dict[str, str]]


def by_seed(rows: Rows) -> dict[str, float]:
    """Seed -> loss of the finished runs among some."""
    return {row["seed"]: float(row["val/loss"]) for row in rows if row["status"] == "finished" and row["val/loss"]}


def cell(rows: Rows) -> str:
    """Such as "1.683 ± 0.071 (1.689, 1.677)"."""
    found = mean(list(by_seed(rows).values()))
    lost = len(rows) - found.n
    text = f"{found.value:.3f}" if found.n else "-"
    text += f" ± {found.half:.3f}" if found.n > 1 else ""
    text += f" ({', '.join(f'{value:.3f}' for value in found.values)})" if found.n > 1 else ""
    return text + (f", {lost} of {len(rows)} not finished" if lost else "")


def said(first: str, second: str, place: str, step: Difference) -> list[str]:
    """A line about one difference."""
    return [place, f"{first} - {second}", f"{step.value:+.3f}", f"{step.low:+.3f} to {step.high:+.3f}", f"{step.p:.3f}",
            step.verdict]  # fmt: skip


def show(rows: Rows, design: str, columns: str | None) -> str:
    """The table of a setting, and the differences in it."""
    designs = list(dict.fromkeys(row[design] for row in rows))
    places = list(dict.fromkeys(row[columns] for row in rows)) if columns else [""]

    def at(name: str, place: str) -> Rows:
        return [row for row in rows if row[design] == name and (not columns or row[columns] == place)]

    body = [[name, *(cell(at(name, place)) for place in places)] for name in designs]
    head = [design, *(f"{columns} {place}" if columns else "val/loss" for place in places)]
    text = markdown([head, *body])
    run = {place: [name for name in designs if by_seed(at(name, place))] for place in places}
    pairs = [(a, b, place) for place in places for a, b in combinations(run[place], 2)]
    steps = holm([compare(by_seed(at(a, place)), by_seed(at(b, place))) for a, b, place in pairs])
    tested = [(*pair, step) for pair, step in zip(pairs, steps, strict=True) if step.p == step.p]
    apart = [said(*one) for one in tested if one[3].verdict != "not separated"]
    text += f"\n\n{len(tested)} of {len(pairs)} pairs could be tested, {len(apart)} are separated"
    if tested:
        widths = sorted(step.high - step.low for *_, step in tested)
        text += f"; 95 % intervals of single differences are {widths[0]:.3f} to {widths[-1]:.3f} wide"
    if apart:
        text += "\n" + table([[columns or "", "pair", "difference", "interval", "p (Holm)", ""], *apart], left=2)
    bounds = {float(row["trigram"]) for row in rows if row.get("trigram") and by_seed([row])}
    if bounds:
        above = sum(loss >= min(bounds) for row in rows for loss in by_seed([row]).values())
        text += f"\n{above} runs above the trigram cross-entropy, {min(bounds):.3f}"
    return text


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table for a README."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*ruled, strict=True)]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in ruled
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="results.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="results.csv of a sweep")
    parser.add_argument("--rows", metavar="AXIS", help="what is compared; the first axis if left out")
    parser.add_argument("--columns", metavar="AXIS", help="what runs along; the second axis if left out")
    options = parser.parse_args(argv)
    try:
        axes, rows = read(options.file)
        for name in (options.rows, options.columns):
            if name is not None and name not in axes:
                raise ValueError(f"{options.file} has no axis {name}; there are {', '.join(axes) or 'none'}")
        if not axes:
            raise ValueError(f"{options.file} has no axes: there is nothing to compare")
    except ValueError as error:
        print(f"results.py: error: {error}", file=sys.stderr)
        return 2
    design = options.rows or next(axis for axis in axes if axis != options.columns)
    columns = options.columns or next((axis for axis in axes if axis != design), None)
    others = [axis for axis in axes if axis not in (design, columns)]
    print(f"val/loss in nats per token: mean over seeds ± half its {INTERVAL} (each seed)")
    for setting in product(*(dict.fromkeys(row[axis] for row in rows) for axis in others)):
        chosen = [row for row in rows if all(row[axis] == label for axis, label in zip(others, setting, strict=True))]
        title = ", ".join(f"{axis} {label}" for axis, label in zip(others, setting, strict=True))
        print(f"\n{title}\n" if title else "")
        print(show(chosen, design, columns) if by_seed(chosen) else "no finished runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
