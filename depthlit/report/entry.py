"""What a figure or table of the report is: one file in `figures/` that ends with ENTRY.

    ENTRY = Entry("depthbench", "Fig. 2", "Loss by aspect ratio", needs="...", studies=("depthbench-400m",), make=make)

`make` gets the material and returns what it could make of it as a `Piece`, with a gap for each part that it could not;
where nothing can be made it raises `Missing`. The report then shows the gap, and which study would fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from matplotlib.figure import Figure

from depthlit.answer import Answer
from depthlit.report.cells import RATE, Cell, Panel
from depthlit.report.found import Found

PAPERS = {
    "own": "Results",
    "depthbench": "DepthBench, arXiv:2609.32534",
    "wav": "WAV, arXiv:2606.06564v1",
}
"""Whose figures and tables there are, in the order of the report."""


class Missing(Exception):
    """Nothing can be made: the message says what is missing."""


@dataclass(frozen=True)
class Table:
    """A table, to be written as CSV, LaTeX and HTML.

    Args:
        title: in one line.
        columns: their names.
        rows: text, whole numbers, floats, `Mean`s, or None for what there is not.
        digits: behind the point, of floats and means; by column, 4 where it is not named.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    digits: dict[str, int] = field(default_factory=dict)


@dataclass
class Piece:
    """What an entry made.

    Args:
        figures: caption -> figure.
        tables: in order.
        notes: for the reader.
        gaps: parts that could not be made, and why.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Material:
    """What a report is made of.

    Args:
        found: the runs, and what is broken or missing.
        panels: the runs, put together, where some are finished and validated.
        baseline: class of the strategy that others are measured against, where a paper does so.
        unscored: panels whose runs were never validated, such as those that measure speed.
        lost: panels of which no run finished.
    """

    found: Found
    panels: Sequence[Panel]
    baseline: str
    unscored: Sequence[Panel] = ()
    lost: Sequence[Panel] = ()

    def over_shapes(self, *held: str) -> list[Panel]:
        """Panels of several shapes that share this; any if none is named. Swept learning rates are not among them."""
        return [
            panel
            for panel in self.panels
            if len(panel.depths) > 1 and RATE not in panel.keys and (not held or {*held} & {*panel.held})
        ]

    def answers(self, diagnostic: str) -> Iterator[tuple[Panel, Cell, Answer]]:
        """Answers of a diagnostic about the lowest seed of every cell."""
        for panel in self.panels:
            for cell in panel.cells:
                if (answer := cell.first.answer(diagnostic)) is not None:
                    yield panel, cell, answer


@dataclass(frozen=True)
class Entry:
    """A figure or table of the report.

    Args:
        paper: whose it is, one of PAPERS.
        number: in the paper; "" if it has none.
        title: what it shows.
        needs: what runs must hold for it.
        studies: which of configs/studies/ fill it.
        make: makes it, or raises Missing.
        name: of its file, which orders the report.
    """

    paper: str
    number: str
    title: str
    needs: str
    studies: tuple[str, ...]
    make: Callable[[Material], Piece]
    name: str = ""

    @property
    def heading(self) -> str:
        """Number and title."""
        return f"{self.number}. {self.title}" if self.number else self.title

    def commands(self) -> list[str]:
        """Which make what is missing."""
        return [f"python tools/sweep.py {study}" for study in self.studies]


def entries() -> list[Entry]:
    """All entries, in the order of papers and file names."""
    package = import_module("depthlit.report.figures")
    found = []
    for module in sorted(iter_modules(package.__path__), key=lambda module: module.name):
        entry = getattr(import_module(f"{package.__name__}.{module.name}"), "ENTRY", None)
        if isinstance(entry, Entry):
            found.append(replace(entry, name=module.name))
    return sorted(found, key=lambda entry: list(PAPERS).index(entry.paper))
