"""Shapes of about 1.6B parameters. DepthBench, Table 9."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.shapes import table


def make(material: Material) -> Piece:
    """Closed-form counts of the Pre-LN model, beside the published ones where there are some."""
    return table(material, "Table 9", "Shapes of about 1.6B parameters", "1600m")


ENTRY = Entry(
    "depthbench", "Table 9", "Shapes of about 1.6B parameters",
    needs="runs of these shapes",
    studies=("depthbench-1600m",),
    make=make,
)  # fmt: skip
