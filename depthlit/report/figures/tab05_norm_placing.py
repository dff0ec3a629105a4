"""A design whose norm may stand before or behind: which is better? DepthBench, Table 5."""

from depthlit.report.cells import Cell
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published


def make(material: Material) -> Piece:
    """The best learning rate of each placing."""
    theirs = published("depthbench", "moda")
    best: dict[tuple[str, str, int], Cell] = {}
    for panel in material.panels:
        for cell in panel.cells:
            key = (panel.study, cell.design, cell.shape.n_layer)
            placed = cell.first.options.get("norm") in theirs
            if placed and (key not in best or cell.mean().value < best[key].mean().value):
                best[key] = cell
    if {cell.first.options["norm"] for cell in best.values()} != set(theirs):
        raise Missing("no finished runs of one design with its norm at both places")
    rows = [
        [study, design, depth, place, f"{cell.first.rate:g}", cell.mean(), theirs[place]]
        for (study, design, depth), cell in best.items()
        for place in [cell.first.options["norm"]]
    ]
    columns = ["study", "design", "L", "norm", "best rate", "loss", "published at L24"]
    return Piece(tables=[Table("Norm before or behind", columns, rows, {"published at L24": 3})])


ENTRY = Entry(
    "depthbench", "Table 5", "Norm before or behind, of MoDA",
    needs="runs of MoDA with both placings of its norm",
    studies=("moda-norm", "moda-norm-cpu"),
    make=make,
)  # fmt: skip
