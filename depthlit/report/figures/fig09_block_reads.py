"""How much of each read goes to the running sum, by depth. DepthBench, Fig. 9."""

import numpy as np

from depthlit import plots
from depthlit.report import drawing
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published


def make(material: Material) -> Piece:
    """A row of stacked shares per depth, and the length of the early segment that hardly reads the running sum."""
    asked = [found for found in material.answers("BlockReads") if "running" in found[2].values]
    if not asked:
        raise Missing("no finished run of a design that keeps a running sum was asked by BlockReads")
    piece = Piece()
    for panel in material.panels:
        own = [(cell, answer) for where, cell, answer in asked if where is panel]
        if not own:
            continue
        figure, axes = drawing.grid(len(own), columns=1, width=9.0, height=2.4)
        for one, (cell, answer) in zip(axes, own, strict=True):
            v = answer.values
            shares = {"running sum": np.nan_to_num(v["running"]), "the rest": v["saved"]}
            title = f"{cell.design}, L = {cell.shape.n_layer}"
            plots.stack(one, shares, title, "reading sublayer", "share of the read")
            for place in np.flatnonzero(v["border"]):
                one.axvline(place - 0.5, color="#000000", linestyle="--", linewidth=0.7)
        piece.figures[f"Share of the running sum in every read: {panel.title}"] = figure
        piece.tables.append(
            Table(
                f"Leading layers that hardly read the running sum: {panel.title}",
                ["design", "L", "layers", "share of L", "published"],
                [
                    [
                        cell.design,
                        L,
                        round(n := answer.numbers["low_use_segment"]),
                        n / L,
                        published("depthbench", "low_use_segment", cell.strategy, L) or None,
                    ]
                    for cell, answer in own
                    for L in [cell.shape.n_layer]
                ],
                {"share of L": 3},
            )
        )
    piece.notes.append("Of the lowest seed. Dashed: a new sum begins there.")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 9", "Block reads: is the running sum read?",
    needs="runs with the callback BlockReads of a design that sums in groups, at 16, 24 and 32 layers",
    studies=("depthbench-400m", "block-growth", "block-growth-cpu"),
    make=make,
)  # fmt: skip
