"""Final loss by depth and corpus. WAV, Fig. 3."""

import math

from depthlit.report import by_depth, drawing
from depthlit.report.entry import Entry, Material, Piece


def make(material: Material) -> Piece:
    """A panel per corpus. Published losses are in Table 2: as their settings are not public, differences compare."""
    shown = by_depth.panels(material)
    figure, axes = drawing.grid(len(shown), columns=2, width=5.2, height=3.8)
    for one, panel in zip(axes, shown, strict=True):
        lines = drawing.by_design(panel.designs, drawing.depth)
        drawing.curves(one, lines, panel.title, "layers L", "validation loss", ticks=panel.depths)
        bound = panel.cells[0].first.trigram
        if not math.isnan(bound):
            one.axhline(bound, color="#888888", linestyle=":", linewidth=1)
            one.annotate("trigrams", (panel.depths[-1], bound), fontsize=7.5, ha="right", va="bottom")
    return Piece({"Validation loss by depth at equal width": figure})


ENTRY = Entry(
    "wav", "Fig. 3", "Loss by depth",
    needs="runs of several depths at equal width",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
