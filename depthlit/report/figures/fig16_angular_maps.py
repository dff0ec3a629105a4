"""All maps of angular distances, at 16, 24 and 32 layers. DepthBench, Figs. 14-16."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.maps import TURNED, UPWARD, angles, of_designs


def make(material: Material) -> Piece:
    """A map per design and depth."""
    return of_designs(material, "AngularDistance", angles, "Angular distance", unit="angle / pi", **TURNED, **UPWARD)


ENTRY = Entry(
    "depthbench", "Fig. 16", "All maps of angular distances",
    needs="runs with the callback AngularDistance at 16, 24 and 32 layers",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
