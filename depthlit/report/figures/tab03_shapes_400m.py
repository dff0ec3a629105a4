"""Shapes of about 400M parameters. DepthBench, Table 3."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.shapes import table


def make(material: Material) -> Piece:
    """Closed-form counts of the Pre-LN model, beside the published ones where there are some."""
    return table(material, "Table 3", "Shapes of about 400M parameters", "400m")


ENTRY = Entry(
    "depthbench", "Table 3", "Shapes of about 400M parameters",
    needs="runs of these shapes",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
