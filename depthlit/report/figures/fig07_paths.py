"""With which weight each sublayer's output reaches each later reader. DepthBench, Fig. 7."""

import numpy as np

from depthlit import plots
from depthlit.report import drawing
from depthlit.report.cells import depths_shown
from depthlit.report.entry import Entry, Material, Missing, Piece


def make(material: Material) -> Piece:
    """A map per design, each on its own scale: a softmax weight and a signed product of streams differ in kind."""
    piece = Piece()
    for panel in material.panels:
        depth = depths_shown(panel)[-1]
        found: dict[str, np.ndarray] = {}
        for cell in panel.at(depth):
            answer = cell.first.answer("PathWeights")
            if answer is not None and "weight" in answer.values:
                found[cell.design] = answer.values["weight"]
            elif answer is None and cell.first.answers.get("PathWeights"):
                piece.notes.append(f"{panel.title}: {cell.design} has no scalar paths.")
        if not found:
            continue
        figure, axes = drawing.grid(len(found), columns=4, width=3.4, height=2.9)
        for one, (name, weight) in zip(axes, found.items(), strict=True):
            plots.heat(one, weight, f"{name}, L = {depth}", "source sublayer (-1: embedding)", "reader", "weight",
                       signed=bool(np.nanmin(weight) < 0), first=(0, -1), top=0.99)  # fmt: skip
        piece.figures[f"Path weights at {depth} layers: {panel.title}"] = figure
    if not piece.figures:
        raise Missing("no finished run was asked by PathWeights")
    piece.notes.append("Scales differ between panels, as in the paper. Maps are of the lowest seed.")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 7", "Weights of the residual paths",
    needs="runs with the callback PathWeights",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
