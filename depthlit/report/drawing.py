"""How the report's figures are drawn: with depthlit.plots, as SVG that takes its text colour from the page around it.

Designs keep their colour and marker from figure to figure. Whiskers are the 95 % t-interval over seeds, dots the seeds;
published numbers are dotted with hollow markers.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from depthlit import plots
from depthlit.report.cells import Cell
from depthlit.report.known import Look
from depthlit.report.noise import Mean

INK = "#000001"
"""Stands for the colour of text, and is none that data has."""
EMPTY = "#e0e0e0"
"""Where a heat map has no value."""


@contextmanager
def style() -> Iterator[None]:
    """Settings under which figures are made and saved."""
    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "axes.titlecolor")
    clear = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
    settings: Any = dict.fromkeys(inked, INK) | dict.fromkeys(clear, "none")
    settings |= {"legend.frameon": False, "svg.fonttype": "none", "font.size": 9.5, "grid.color": "#888888"}
    settings |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(settings):
        yield


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element that can stand in a page; ids are of this name, black becomes the text's colour."""
    file = io.StringIO()
    figure.set_dpi(144)  # of maps
    with matplotlib.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})  # `savefig` would draw everything twice
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.S)
    text = re.sub(f"{INK}|#000000", "currentColor", text)
    return text.replace(f"fill: {EMPTY}", "fill: currentColor; fill-opacity: 0.12")


def in_page(text: str, caption: str) -> str:
    """An SVG element as it goes into a page: without style rules and ids of its own that nothing refers to; no smaller
    than two thirds of its size, so that its text stays readable where it has to scroll."""
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r' id="(?:[\w.]+_\d+|image\w+)"', "", text)
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])  # type: ignore[index]
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(caption)}" style="min-width:{width * 0.85:.0f}px" ', 1
    )


@dataclass(frozen=True)
class Line:
    """A curve with intervals.

    Args:
        name: in the legend.
        look: colour and marker.
        x: places.
        y: means over seeds, or bare numbers.
        published: it is a paper's.
        band: low and high ends of a band about it.
    """

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[Mean | float]
    published: bool = False
    band: tuple[np.ndarray, np.ndarray] | None = None


def by_design(
    designs: Mapping[str, Sequence[Cell]], x: Callable[[Cell], float], y: Callable[[Cell], Mean] = Cell.mean
) -> list[Line]:
    """A line per design.

    Args:
        designs: name -> cells.
        x: place of a cell.
        y: its height; the validation loss if left out.
    """
    return [Line(name, cells[0].look, [*map(x, cells)], [*map(y, cells)]) for name, cells in designs.items()]


def aspect(cell: Cell) -> float:
    """d / L"""
    return cell.shape.aspect


def depth(cell: Cell) -> float:
    """L"""
    return cell.shape.n_layer


def curves(
    axes: Axes, lines: Sequence[Line], title: str, x: str, y: str, log: bool = False, ticks: Sequence[float] = ()
) -> None:
    """Lines with whiskers over seeds. The scale is that of means and seeds: with two seeds whiskers are long, and cut.

    Args:
        axes: where.
        lines: what.
        title: of the panel.
        x: what runs along.
        y: what goes up.
        log: logarithmic x.
        ticks: places of the ticks of x, such as the depths that there are.
    """
    seen: list[float] = []
    places = [place for line in lines for place in line.x] or [1.0]
    sure = any(isinstance(value, Mean) and value.half > 0 for line in lines for value in line.y)
    reach = math.log10(max(places) / min(places)) if log else max(places) - min(places)
    for i, line in enumerate(lines):
        apart = 0.014 if sure else 0.0  # so that whiskers do not overlap
        aside = 0.0 if line.published else apart * reach * (i - (len(lines) - 1) / 2)
        at = [place * 10**aside if log else place + aside for place in line.x]
        centre = np.array([value.value if isinstance(value, Mean) else value for value in line.y])
        half = np.array([value.half if isinstance(value, Mean) else np.nan for value in line.y])
        seen += [*centre[np.isfinite(centre)]]
        if line.band is not None:
            axes.fill_between(at, *line.band, color=line.look.colour, alpha=0.2, linewidth=0)
        for x_of, value in zip(at, line.y, strict=True):
            if isinstance(value, Mean) and value.n > 1:
                seen += value.values
                axes.plot([x_of] * value.n, value.values, ".", color=line.look.colour, markersize=4, alpha=0.5)
        axes.errorbar(
            at, centre, None if np.isnan(half).all() else np.nan_to_num(half), label=line.name,
            color=line.look.colour, linestyle=(0, (1, 1.5)) if line.published else line.look.dash,
            marker=line.look.marker, markerfacecolor="none" if line.published else line.look.colour, markersize=5.5,
            linewidth=1.5, elinewidth=0.8, capsize=2.5, alpha=0.75 if line.published else 1.0,
        )  # fmt: skip
    if len(set(seen)) > 1:
        edge = 0.15 * (max(seen) - min(seen))
        axes.set_ylim(min(seen) - edge, max(seen) + edge)
    if log:
        axes.set_xscale("log")
    if ticks:
        axes.set_xticks(list(ticks), [f"{tick:.0f}" if tick >= 10 else f"{tick:.2g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    elif log:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(alpha=0.3)
    axes.set_title(folded(title, 48), fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if len(lines) > 4:
        axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(lines) > 1:
        axes.legend(fontsize=7.5)


def folded(title: str, width: int) -> str:
    """A long title in several lines."""
    return "\n".join(textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False))


def grid(n: int, columns: int = 3, width: float = 4.4, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure of n panels in rows."""
    columns = min(columns, n)
    figure, axes = plots.blank("", -(-n // columns), columns, width, height)
    return figure, _first(axes, n)


def _first(axes: Any, n: int) -> list[Axes]:
    """The first n of an array of axes; the others are hidden."""
    flat = list(np.atleast_1d(axes).flat)
    for spare in flat[n:]:
        spare.set_axis_off()
    return flat[:n]


def maps(matrices: Mapping[str, np.ndarray], x: str, y: str, unit: str, columns: int = 4, **heat: object) -> Figure:
    """Heat maps on one scale, up to the 99th percentile of all of them, so that panels can be compared.

    Args:
        matrices: title of the panel -> (rows, columns).
        x: what columns are.
        y: what rows are.
        unit: what colours are.
        columns: panels in a row.
        heat: further arguments of `depthlit.plots.heat`.
    """
    values = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices.values()])
    scale = tuple(np.quantile(values, (0.0, 0.99))) if values.size else None
    columns = min(columns, len(matrices))
    rows, width, height = -(-len(matrices) // columns), 3.3, 2.9
    across, down = width * columns, height * rows
    figure = Figure(figsize=(across, down))  # equal panels have known margins; to find them would take most of the time
    figure.subplots_adjust(0.55 / across, 0.5 / down, 1 - 0.45 / across, 1 - 0.45 / down, 0.9 / width, 1.15 / height)
    axes = _first(figure.subplots(rows, columns), len(matrices))
    for i, (one, (name, matrix)) in enumerate(zip(axes, matrices.items(), strict=True)):
        ends = (i + 1) % columns == 0 or i + 1 == len(matrices)
        plots.heat(one, matrix, folded(name, 34), x, "" if i % columns else y, unit if ends else "", scale, **heat)  # type: ignore[arg-type]
    return figure


def by_distance(distance: np.ndarray) -> np.ndarray:
    """[n - 1, l] = distance between depth l and l + n, from (L + 1, L + 1); NaN where there is no such depth."""
    depths = len(distance)
    return np.array(
        [[distance[l, l + n] if l + n < depths else np.nan for l in range(depths - 1)] for n in range(1, depths)]
    )
