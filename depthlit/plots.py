"""Figures of diagnostics, drawn from saved answers.

    python -m depthlit.plots RUN/analysis/step_0000008/CausalScore.json            draws it anew
    python -m depthlit.plots A/analysis/*/AngularDistance.json --shared            all on one scale, to compare runs

Layers are counted from 0, as everywhere in the code. Colours: cividis for amounts, whose lightness grows evenly and
which reads the same with any colour vision; a blue to red map with white at zero for signed values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from depthlit.answer import Answer, png, replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
"""Okabe and Ito's palette, safe for colour-blind readers, without its yellow."""
MARKERS = "os^Dv*XP"

Scale = Sequence[float] | None


def blank(title: str, rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 5.2) -> tuple[Figure, Any]:
    """A figure and its axes (one, or an array); `width` and `height` in inches are those of one panel."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns)
    figure.suptitle(title, fontsize=11)
    return figure, axes


def heat(
    axes: Axes, matrix: np.ndarray, title: str, x: str, y: str, unit: str,
    scale: Scale = None, signed: bool = False, upward: bool = False, colours: str | None = None,
    first: tuple[int, int] = (0, 0), top: float = 1.0, least: float = -np.inf,
) -> None:  # fmt: skip
    """A heat map of matrix[y, x] with its colour bar; cells that are NaN stay grey.

    Args:
        axes: where.
        matrix: (rows, columns).
        title: of the panel.
        x: what the columns are.
        y: what the rows are.
        unit: what the colours are.
        scale: [low, high] of the colours; the data's own if None.
        signed: values have a sign: white is zero, and the scale is symmetric.
        upward: row 0 at the bottom.
        colours: name of another colour map.
        first: numbers of the first row and column.
        top: quantile of the data at which the colours end, so that a few outliers do not darken all else.
        least: value that the colours reach at least.
    """
    finite = matrix[np.isfinite(matrix)]
    if scale is not None:
        low, high = scale
    else:
        low, high = (finite.min(), max(np.quantile(finite, top), least)) if finite.size else (0.0, 1.0)
    norm: Normalize
    if signed:
        reach = max(abs(low), abs(high)) or 1.0
        low, high = (low, high) if scale is not None and low < 0 < high else (-reach, reach)
        norm = TwoSlopeNorm(0.0, low, high)
    else:
        if high <= low:  # all the same: the scale begins at zero
            low, high = (0.0, low) if low > 0 else (low, low + 1.0)
        norm = Normalize(low, high)
    axes.set_facecolor("0.88")
    top, left = first[0] - 0.5, first[1] - 0.5
    ends = (top, top + len(matrix)) if upward else (top + len(matrix), top)
    image = axes.imshow(
        np.ma.masked_invalid(matrix), norm=norm, cmap=colours or ("RdBu_r" if signed else "cividis"),
        origin="lower" if upward else "upper", aspect="auto", interpolation="nearest",
        extent=(left, left + matrix.shape[1], *ends),
    )  # fmt: skip
    _labels(axes, title, x, y)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))  # numbers are wider than high
    figure = axes.figure
    below = bool(finite.size) and bool(finite.min() < low - 1e-12)
    above = bool(finite.size) and bool(finite.max() > high + 1e-12)
    arrows = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    figure.colorbar(image, ax=axes, label=unit, extend=arrows[below, above], shrink=0.95)


def lines(
    axes: Axes, curves: Mapping[str, np.ndarray], title: str, x: str, y: str,
    at: np.ndarray | None = None, bands: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    scale: Scale = None, log: bool = False, mark: float | None = None,
) -> None:  # fmt: skip
    """Curves by name, with a band (low, high) about those named in `bands`; a single curve has no legend.

    Args:
        axes: where.
        curves: by name.
        title: of the panel.
        x: what runs along.
        y: what goes up.
        at: places of the points; 0, 1, ... if None.
        bands: (low, high) about some curves.
        scale: [low, high] of y.
        log: logarithmic y.
        mark: where to draw a dashed upright line.
    """
    whole = at is None or bool((at == np.round(at)).all())
    for i, (name, curve) in enumerate(curves.items()):
        place = np.arange(len(curve)) if at is None else at
        colour = COLOURS[i % len(COLOURS)]
        few = len(curve) <= 40
        marker = MARKERS[i % len(MARKERS)] if few else None
        axes.plot(place, curve, color=colour, label=name, marker=marker, markersize=4, linewidth=1.5)
        if bands and name in bands:
            axes.fill_between(place, *bands[name], color=colour, alpha=0.2, linewidth=0)
    if mark is not None:
        axes.axvline(mark, color="0.3", linestyle="--", linewidth=1)
    if scale is not None:
        axes.set_ylim(*scale)
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 10 * low:  # no or one power of ten is in sight: plain numbers
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(fontsize=8)
    _labels(axes, title, x, y, whole)


def bars(
    axes: Axes, heights: np.ndarray, title: str, x: str, y: str,
    interval: tuple[np.ndarray, np.ndarray] | None = None, scale: Scale = None,
) -> None:  # fmt: skip
    """One bar per layer, with intervals (low, high) where there are some."""
    place = np.arange(len(heights))
    axes.bar(place, heights, color=COLOURS[0], width=0.8)
    if interval is not None:
        low, high = interval
        reach = np.clip(np.stack([heights - low, high - heights]), 0, None)
        axes.errorbar(place, heights, reach, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    axes.axhline(0, color="black", linewidth=0.8)
    if scale is not None:
        axes.set_ylim(*scale)
    axes.grid(alpha=0.3, axis="y")
    _labels(axes, title, x, y)


def stack(axes: Axes, parts: Mapping[str, np.ndarray], title: str, x: str, y: str) -> None:
    """Shares laid on top of each other, one bar per place."""
    bottom = np.zeros(len(next(iter(parts.values()))))
    for (name, part), colour in zip(parts.items(), (COLOURS[2], "0.75", *COLOURS), strict=False):
        axes.bar(np.arange(len(part)), part, bottom=bottom, color=colour, width=1.0, label=name, edgecolor="none")
        bottom = bottom + part
    axes.set_xlim(-0.5, len(bottom) - 0.5)
    axes.set_ylim(0, 1.14 * bottom.max())
    axes.legend(fontsize=8, loc="upper right", ncols=len(parts))
    _labels(axes, title, x, y)


def _labels(axes: Axes, title: str, x: str, y: str, whole: bool = True) -> None:
    """Title and names of the axes; layers have whole numbers only."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=12))


def redraw(path: str | Path, scale: Scale = None, output: str | Path | None = None) -> Path:
    """Draw a saved answer anew, without the model; returns the path of the PNG file.

    Args:
        path: NAME.json.
        scale: [low, high] of its colours or values, in place of the one it was asked with.
        output: where the figure goes; beside the answer if left out.

    Raises:
        ValueError: nothing is saved there, its diagnostic cannot be imported, or it has no figure.
    """
    answer = Answer.load(path)
    figure = _asker(answer, scale).draw(answer)
    if figure is None:
        raise ValueError(f"{answer.name} has no figure")
    target = Path(path).with_suffix(".png") if output is None else Path(output)
    with replacing(target) as file:
        file.write(png(figure))
    return target


def shared(paths: Sequence[str | Path]) -> list[Path]:
    """Draw several answers of one diagnostic anew, on the scale that holds them all."""
    answers = [Answer.load(path) for path in paths]
    key = _asker(answers[0]).draws
    if not key:
        raise ValueError(f"figures of {answers[0].name} have no scale to share")
    values = np.concatenate([answer.values[key].ravel() for answer in answers if key in answer.values])
    return [redraw(path, (float(np.nanmin(values)), float(np.nanmax(values)))) for path in paths]


def _asker(answer: Answer, scale: Scale = None) -> Any:
    """The diagnostic that gave an answer, made again with its options."""
    module, _, name = answer.diagnostic.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{answer.diagnostic}, which drew {answer.name}, cannot be imported: {error}") from error
    return kind(**{**answer.options, **({} if scale is None else {"scale": scale})})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw figures of saved diagnostics anew.")
    parser.add_argument("answers", nargs="+", help="NAME.json files in RUN/analysis/step_*/")
    parser.add_argument("--shared", action="store_true", help="one scale for all of them")
    parser.add_argument("--scale", nargs=2, type=float, metavar=("LOW", "HIGH"), help="this scale for all of them")
    options = parser.parse_args(arguments)
    try:
        drawn = shared(options.answers) if options.shared else [redraw(path, options.scale) for path in options.answers]
    except ValueError as error:
        parser.error(str(error))
    print(*drawn, sep="\n")


if __name__ == "__main__":
    main()
