"""All maps of causal scores, at 16, 24 and 32 layers. DepthBench, Figs. 14-16."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.maps import LAYERS, of_designs, score


def make(material: Material) -> Piece:
    """A map per design and depth."""
    return of_designs(material, "CausalScore", score, "Causal score C", unit="C(s, l)", **LAYERS)


ENTRY = Entry(
    "depthbench", "Fig. 14", "All maps of causal scores",
    needs="runs with the callback CausalScore at 16, 24 and 32 layers",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
