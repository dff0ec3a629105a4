"""Which learning rate each design wants, and each shape. DepthBench, Fig. 12."""

from depthlit.report import drawing
from depthlit.report.entry import Entry, Material, Missing, Piece
from depthlit.report.rates import swept


def make(material: Material) -> Piece:
    """A panel per study and depth: loss over the peak learning rate."""
    sweeps = swept(material)
    if not sweeps:
        raise Missing("no design was trained at two learning rates in one study")
    piece = Piece()
    for study, by_depth in sweeps.items():
        figure, axes = drawing.grid(len(by_depth), columns=2, width=5.4, height=4.0)
        for one, (depth, by_design) in zip(axes, by_depth.items(), strict=True):
            drawn = drawing.by_design(by_design, lambda cell: cell.first.rate)
            drawing.curves(one, drawn, f"{study}, L = {depth}", "peak learning rate", "validation loss", log=True)
        piece.figures[f"Validation loss by learning rate: {study}"] = figure
        of_study = [run for run in material.found.runs if run.study and f"{study}, ".startswith(f"{run.study}, ")]
        lost = [run for run in of_study if run.status == "diverged"]
        piece.notes += [f"Diverged, not drawn: {run.name} at {run.rate:g}" for run in lost]
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 12", "Learning-rate sweeps",
    needs="runs of one design and shape at several learning rates",
    studies=("learning-rate", "learning-rate-cpu"),
    make=make,
)  # fmt: skip
