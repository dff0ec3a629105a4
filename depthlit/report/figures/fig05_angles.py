"""How far the state turns between any two depths, at the greatest depth. DepthBench, Fig. 5."""

from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.maps import TURNED, UPWARD, angles, of_designs


def make(material: Material) -> Piece:
    """A map per design."""
    return of_designs(
        material, "AngularDistance", angles, "Angular distance", unit="angle / pi", deepest=True, **TURNED, **UPWARD
    )


ENTRY = Entry(
    "depthbench", "Fig. 5", "Angular distance between depths",
    needs="runs with the callback AngularDistance; the paper shows 32 layers at one learning rate",
    studies=("depthbench-400m", "learning-rate-angles-cpu"),
    make=make,
)  # fmt: skip
