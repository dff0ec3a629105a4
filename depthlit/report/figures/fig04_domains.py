"""Loss on reference answers in coding, STEM and mathematics. DepthBench, Fig. 4."""

from functools import partial

from depthlit.report import drawing
from depthlit.report.cells import Cell
from depthlit.report.entry import Entry, Material, Missing, Piece, Table

CATEGORIES = ("coding", "stem", "math")


def make(material: Material) -> Piece:
    """A panel per category: nats per reference token, the mean of its two sets."""
    piece = Piece()
    for panel in material.over_shapes():
        there = [key for key in CATEGORIES if any(cell.by_seed(f"nll/{key}") for cell in panel.cells)]
        if not there:
            continue
        figure, axes = drawing.grid(len(there), columns=3)
        ticks = sorted({cell.shape.aspect for cell in panel.cells})
        for one, key in zip(axes, there, strict=True):
            drawn = drawing.by_design(panel.designs, drawing.aspect, partial(Cell.mean, metric=f"nll/{key}"))
            drawing.curves(one, drawn, key, "d / L (deep to wide)", "nats per reference token", log=True, ticks=ticks)
        piece.figures[f"Negative log-likelihood by domain: {panel.title}"] = figure
        rows = [[cell.design, cell.shape.n_layer, *(cell.mean(f"nll/{key}") for key in there)] for cell in panel.cells]
        piece.tables.append(Table(f"Negative log-likelihood by domain: {panel.title}", ["design", "L", *there], rows))
        piece.gaps += [
            f"{panel.title}: no {key}, which needs both of its sets" for key in CATEGORIES if key not in there
        ]
    if not piece.figures:
        raise Missing("no finished runs of several shapes that were asked by DomainNLL")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 4", "Negative log-likelihood by domain",
    needs="runs of several shapes with the callback DomainNLL",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
