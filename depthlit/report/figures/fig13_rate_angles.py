"""What the learning rate does to the map of angles. DepthBench, Fig. 13."""

from depthlit.report import drawing
from depthlit.report.entry import Entry, Material, Missing, Piece
from depthlit.report.maps import TURNED, UPWARD, angles
from depthlit.report.rates import swept


def make(material: Material) -> Piece:
    """A row per design, a column per learning rate."""
    piece = Piece()
    for study, by_depth in swept(material).items():
        for depth, by_design in by_depth.items():
            found = {
                f"{name}, {cell.first.rate:g}": angles(answer)
                for name, cells in by_design.items() for cell in cells
                if (answer := cell.first.answer("AngularDistance")) is not None
            }  # fmt: skip
            if found:
                most = max(len(cells) for cells in by_design.values())
                piece.figures[f"Angular distance by learning rate at {depth} layers: {study}"] = drawing.maps(
                    found, unit="angle / pi", columns=most, **TURNED, **UPWARD
                )
    if not piece.figures:
        raise Missing("no design was asked by AngularDistance at two learning rates in one study")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 13", "Angular distance by learning rate",
    needs="runs of one design and shape at several learning rates with the callback AngularDistance",
    studies=("learning-rate-angles", "learning-rate-angles-cpu"),
    make=make,
)  # fmt: skip
