"""All maps of permutation scores, at 16, 24 and 32 layers. DepthBench, Figs. 14-16."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.maps import SWAPPED, of_designs, score


def make(material: Material) -> Piece:
    """A map per design and depth."""
    return of_designs(material, "PermutationScore", score, "Permutation score P", unit="P(a, b)", **SWAPPED)


ENTRY = Entry(
    "depthbench", "Fig. 15", "All maps of permutation scores",
    needs="runs with the callback PermutationScore at 16, 24 and 32 layers",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
