"""What a single layer contributes, and how early the answer is there. DepthBench, Fig. 8."""

import numpy as np

from depthlit import plots
from depthlit.report import drawing
from depthlit.report.cells import depths_shown
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece

PRUNINGS = {
    "ArcEasy": ("drop", "drop of accuracy on ARC-Easy"),
    "LayerPruning": ("change", "change of the loss (nats)"),
}


def make(material: Material) -> Piece:
    """Bars of every design without each layer, then the divergence from the final prediction by depth."""
    piece = Piece()
    for panel in material.panels:
        depth = depths_shown(panel)[-1]
        cells = panel.at(depth)
        for diagnostic, (key, what) in PRUNINGS.items():
            pruned = {cell.design: answer.values for cell in cells
                      if (answer := cell.first.answer(diagnostic)) is not None and key in answer.values}  # fmt: skip
            if pruned:
                figure, axes = drawing.grid(len(pruned), columns=3, width=4.2, height=2.8)
                for one, (name, v) in zip(axes, pruned.items(), strict=True):
                    plots.bars(one, v[key], f"{name}, L = {depth}", "left-out layer", what, (v["low"], v["high"]))
                piece.figures[f"Without a single layer, {what}: {panel.title}"] = figure
        lens = [
            Line(cell.design, cell.look, list(np.arange(len(kl)) / (len(kl) - 1)), list(kl))
            for cell in cells
            if (answer := cell.first.answer("LogitLens")) is not None and (kl := answer.values["kl"]).size > 1
        ]
        if lens:
            figure, axes = drawing.grid(1, width=6.0, height=4.0)
            drawing.curves(
                axes[0], lens, f"logit lens, L = {depth}", "share of the layers done", "KL to the end (nats)"
            )
            piece.figures[f"Distance to the final prediction by depth: {panel.title}"] = figure
    if not piece.figures:
        raise Missing("no finished run was asked by ArcEasy, LayerPruning or LogitLens")
    if not any("ARC-Easy" in caption for caption in piece.figures):
        piece.gaps.append("no accuracy on ARC-Easy without each layer, which is the paper's measure and needs ArcEasy")
    piece.notes.append(
        "Of the lowest seed. Whiskers of bars are 95 % by bootstrap over documents, windows or questions."
    )
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 8", "Single-layer pruning and logit lens",
    needs="runs with the callbacks ArcEasy or LayerPruning, and LogitLens",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
