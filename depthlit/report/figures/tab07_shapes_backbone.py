"""Shapes with a backbone of about 300M parameters. DepthBench, Table 7."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.shapes import table


def make(material: Material) -> Piece:
    """Closed-form counts of the Pre-LN model, beside the published ones where there are some."""
    return table(material, "Table 7", "Shapes with a backbone of about 300M parameters", "300m-backbone")


ENTRY = Entry(
    "depthbench", "Table 7", "Shapes with a backbone of about 300M parameters",
    needs="runs of these shapes",
    studies=("depthbench-backbone",),
    make=make,
)  # fmt: skip
