"""Loss by model size, a line per aspect ratio. DepthBench, Fig. 3."""

import numpy as np

from depthlit.plots import COLOURS, MARKERS
from depthlit.report import drawing
from depthlit.report.cells import Cell, Panel
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece
from depthlit.report.known import Look


def bands(cells: list[Cell]) -> list[list[Cell]]:
    """Cells by aspect ratio: a new band begins where the ratio grows by more than a fifth."""
    ordered = sorted(cells, key=lambda cell: cell.shape.aspect)
    found: list[list[Cell]] = []
    for cell in ordered:
        if found and cell.shape.aspect < 1.2 * found[-1][0].shape.aspect:
            found[-1].append(cell)
        else:
            found.append([cell])
    return [sorted(band, key=lambda cell: cell.first.parameters) for band in found]


def sizes(panel: Panel) -> int:
    """How many sizes a panel has: a new one begins where parameters grow by more than a fifth."""
    ordered = np.sort([cell.shape.parameters() for cell in panel.cells])
    return 1 + int((ordered[1:] > 1.2 * ordered[:-1]).sum())


def grouped(panel: Panel) -> bool:
    """Whether query heads share keys and values, as in the paper's panel at 1.6B."""
    return bool(panel.held) and all(cell.shape.kv_heads < cell.shape.n_head for cell in panel.cells)


def make(material: Material) -> Piece:
    """A panel per design over sizes; at one size with grouped queries a panel over aspect ratios."""
    several = [panel for panel in material.over_shapes() if not panel.held and sizes(panel) > 1]
    one_size = list(filter(grouped, material.over_shapes()))
    if not several and not one_size:
        raise Missing("no finished runs of one design at several sizes and aspect ratios")
    piece = Piece()
    for panel in several:
        figure, axes = drawing.grid(len(panel.designs), columns=3)
        for one, (name, cells) in zip(axes, panel.designs.items(), strict=True):
            drawn = [
                Line(f"d / L about {np.mean([cell.shape.aspect for cell in band]):.3g}",
                     Look("", COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]),
                     [cell.first.parameters / 1e6 for cell in band], [cell.mean() for cell in band])
                for i, band in enumerate(bands(cells))
            ]  # fmt: skip
            drawing.curves(one, drawn, name, "parameters (M)", "validation loss", log=True)
        piece.figures[f"Validation loss by size: {panel.title}"] = figure
    for panel in one_size:
        figure, axes = drawing.grid(1, width=6.0, height=4.0)
        ticks = sorted({cell.shape.aspect for cell in panel.cells})
        size = f"{np.median([cell.first.parameters for cell in panel.cells]) / 1e6:.4g}M parameters, grouped queries"
        drawing.curves(
            axes[0],
            drawing.by_design(panel.designs, drawing.aspect),
            size,
            "d / L (deep to wide)",
            "validation loss",
            log=True,
            ticks=ticks,
        )
        piece.figures[f"Validation loss by aspect ratio with grouped queries: {panel.title}"] = figure
    for found, what in ((several, "runs of several sizes"), (one_size, "runs of one size with grouped queries (1.6B)")):
        piece.gaps += [] if found else [f"no {what}"]
    piece.notes.append("The paper publishes no numbers for this figure. There, the widest HC at 500M diverged.")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 3", "Loss by size, at three aspect ratios",
    needs="runs of several sizes, each at several aspect ratios, and of one size with grouped queries",
    studies=("depthbench-scale", "depthbench-1600m", "depthbench-scale-cpu", "depthbench-1600m-cpu"),
    make=make,
)  # fmt: skip
