"""A report from beginning to end: read the runs, make every entry, and when all are made let files take their names.

Of the output folder, only index.html and what entries make in figures/ and tables/ is replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from depthlit import plots, runs
from depthlit.report import cells, drawing, page, tables
from depthlit.report.entry import Entry, Material, Missing, entries
from depthlit.report.found import Found, Run, find, looks_like_a_run
from depthlit.report.known import published
from depthlit.report.page import Made

INDEX, FIGURES, TABLES = "index.html", "figures", "tables"
Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How to report.

    Args:
        pictures: put the full figures of diagnostics into the page if there are no more than this many, of some 100 kB
            each; small pictures of their arrays otherwise.
        pdf: write every figure as PDF too.
        baseline: class of the strategy that others are measured against by depth.
    """

    pictures: int = 120
    pdf: bool = False
    baseline: str = ""


def write(
    folders: Sequence[Path], output: Path, options: Options | None = None,
    advance: Advance = lambda what, done, total: None,
) -> tuple[Found, list[Made]]:  # fmt: skip
    """Write a report into a folder, in place of an earlier one; returns what was found and made.

    Other files in that folder stay as they are.

    Args:
        folders: run folders, folders of sweeps, or folders of such.
        output: index.html, figures/ and tables/ go here; a link is followed.
        options: how.
        advance: told what is done, how many of it, and how many there are.

    Raises:
        ValueError: there is nothing to report, `output` is something else that a report would mix with, or a run to be
            read lies where figures and tables go.
    """
    options = options or Options()
    output = output.resolve()
    _check(output)
    found = find(folders, lambda done, total: advance("reading runs", done, total))
    _check_apart([*folders, *(run.folder for run in found.runs)], output)
    panels = cells.panels(found.runs)
    found.broken += cells.left_out(panels)
    material = Material(
        found,
        panels=[panel for panel in panels if panel.scored],
        baseline=options.baseline or published("baseline"),
        unscored=[panel for panel in panels if panel.cells and not panel.scored],
        lost=[panel for panel in panels if not panel.cells],
    )
    made, listed = [], entries()
    output.mkdir(parents=True, exist_ok=True)
    partial = output / f".partial.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with drawing.style():
            for i, entry in enumerate(listed):
                made.append(make(entry, material, partial, options.pdf))
                advance("figures and tables", i + 1, len(listed))
        drawn = pictures(found.runs, options.pictures)
        listing: list[str] = []
        times: Counter[str] = Counter()
        for run in in_order(found.runs):
            times[run.name] += 1  # two studies may hold the same run
            name = run.name if times[run.name] == 1 else f"{run.name}-{times[run.name]}"
            listing.append(page.of_run(run, name, drawn))
            advance("the page", len(listing), len(found.runs))
        runs.write_text(partial / INDEX, page.page(found, [panel for panel in panels if panel.cells], made, listing))
        _replace(partial, output, [entry.name for entry in listed])
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not any(output.iterdir()):
            output.rmdir()
    return found, made


def make(entry: Entry, material: Material, folder: Path, pdf: bool = False) -> Made:
    """Make one entry and write its files."""
    try:
        piece = entry.make(material)
    except Missing as reason:
        return Made(entry, None, {}, str(reason))
    except Exception as error:  # an answer of another version, or an entry of somebody's own: the others are made
        return Made(entry, None, {}, f"it could not be made: {type(error).__name__}: {error}")
    drawn = {}
    for i, (caption, figure) in enumerate(piece.figures.items(), 1):
        stem = f"{entry.name}-{i}"
        text = drawing.svg(figure, stem)
        runs.write_text(folder / FIGURES / f"{stem}.svg", text)
        if pdf:
            figure.savefig(folder / FIGURES / f"{stem}.pdf")
        drawn[caption] = drawing.in_page(text, caption)
        piece.figures[caption] = Figure()  # drawn: what it held may go
    for i, table in enumerate(piece.tables, 1):
        stem = f"{entry.name}-{i}"
        runs.write_text(folder / TABLES / f"{stem}.csv", tables.as_csv(table))
        runs.write_text(folder / TABLES / f"{stem}.tex", tables.as_latex(table))
    return Made(entry, piece, drawn)


def in_order(found: Sequence[Run]) -> list[Run]:
    """By study, design, shape and seed."""
    return sorted(
        found, key=lambda run: (run.study, run.strategy, run.shape.n_layer, run.shape.d_model, run.seed, run.name)
    )


def pictures(found: Sequence[Run], most: int) -> dict[Path, bytes]:
    """The figures that diagnostics drew of their last answers, drawn anew where the file is lost; none if too many."""
    paths = [path for run in found for path in run.answers.values()]
    if len(paths) > most:
        return {}
    drawn = {}
    for path in paths:
        image = path.with_suffix(".png")
        if image.is_file():
            drawn[path] = image.read_bytes()
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                drawn[path] = plots.redraw(path, output=Path(folder) / "drawn.png").read_bytes()
            except (ValueError, KeyError):  # no figure, or the class that draws it is not here
                continue
    return drawn


def _check(output: Path) -> None:
    """Refuse a folder that is a run, and files of others under the names that a report uses."""
    if not output.exists():
        return
    index = output / INDEX
    if index.is_file():
        fits = page.TITLE in index.read_text(encoding="utf-8", errors="replace")[:2000]
    else:
        fits = output.is_dir() and not any((output / name).exists() for name in (INDEX, FIGURES, TABLES))
    if not fits or looks_like_a_run(output):
        raise ValueError(f"{output} exists and is no report; name another --output")


def _check_apart(inputs: Sequence[Path], output: Path) -> None:
    """Refuse to read from where figures and tables go."""
    for path in inputs:
        for place in (output / FIGURES, output / TABLES):
            if path.resolve().is_relative_to(place.resolve()):
                raise ValueError(f"{path} lies in {place}, which the report fills; move it, or name another --output")


def _replace(partial: Path, output: Path, names: Sequence[str]) -> None:
    """Let finished files take their names, the page last; what an earlier report made besides goes."""
    own = re.compile(rf"({'|'.join(map(re.escape, names))})-\d+\.(svg|pdf|csv|tex)")
    for kind in (FIGURES, TABLES):
        (output / kind).mkdir(exist_ok=True)
        made = {path.name for path in (partial / kind).glob("*")}
        for path in (output / kind).iterdir():
            if own.fullmatch(path.name) and path.name not in made and path.is_file():
                path.unlink()
        for name in made:
            (partial / kind / name).replace(output / kind / name)
    (partial / INDEX).replace(output / INDEX)
