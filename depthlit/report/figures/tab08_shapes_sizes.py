"""Shapes of 200M to 500M parameters. DepthBench, Table 8."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.shapes import table


def make(material: Material) -> Piece:
    """Closed-form counts of the Pre-LN model, beside the published ones where there are some."""
    return table(material, "Table 8", "Shapes of 200M to 500M parameters", "200m", "300m", "500m")


ENTRY = Entry(
    "depthbench", "Table 8", "Shapes of 200M to 500M parameters",
    needs="runs of these shapes",
    studies=("depthbench-scale",),
    make=make,
)  # fmt: skip
