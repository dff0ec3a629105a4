"""Validation loss while training, at the greatest depth. WAV, Fig. 4."""

import numpy as np

from depthlit.report import by_depth, drawing
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece
from depthlit.report.noise import mean


def make(material: Material) -> Piece:
    """A panel per corpus; means over seeds at the steps that all of them validated."""
    shown = by_depth.panels(material)
    piece = Piece()
    figure, axes = drawing.grid(len(shown), columns=2, width=5.2, height=3.8)
    most = 0
    for one, panel in zip(axes, shown, strict=True):
        lines = []
        for cell in panel.at(panel.depths[-1]):
            curves = [dict(zip(*map(np.ndarray.tolist, run.curves["val/loss"]), strict=True)) for run in cell.runs]
            steps = sorted(set.intersection(*map(set, curves)))
            most = max(most, len(steps))
            lines.append(
                Line(cell.design, cell.look, steps, [mean([curve[step] for curve in curves]) for step in steps])
            )
        drawing.curves(one, lines, f"{panel.title}, L = {panel.depths[-1]}", "optimizer step", "validation loss")
    if most < 2:
        raise Missing("the runs were validated once only; set trainer.validate_every")
    piece.figures["Validation loss while training, at the greatest depth"] = figure
    return piece


ENTRY = Entry(
    "wav", "Fig. 4", "Loss while training, at the greatest depth",
    needs="runs of several depths at equal width that were validated more than once",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
