"""A design whose norm may stand before or behind: which is better? DepthBench, Table 5."""

from depthlit.report.cells import Cell
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published


def make(material: Material) -> Piece:
    """The best learning rate of each placing."""
    best: dict[tuple[str, str, int], Cell] = {}
    for panel in material.panels:
        for cell in panel.cells:
            if "norm" in cell.first.options:
                key = (panel.study, cell.design, cell.shape.n_layer)
                if key not in best or cell.mean().value < best[key].mean().value:
                    best[key] = cell
    placings = {cell.first.options["norm"] for cell in best.values()}
    if len(placings) < 2:
        raise Missing("no finished runs of one design with its norm at both places")
    rows = [
        [study, design, depth, cell.first.options["norm"], f"{cell.first.rate:g}", cell.mean(),
         published("depthbench", "moda").get(cell.first.options["norm"])]
        for (study, design, depth), cell in best.items()
    ]  # fmt: skip
    columns = ["study", "design", "L", "norm", "best rate", "loss", "published at L24"]
    return Piece(tables=[Table("Norm before or behind", columns, rows, {"published at L24": 3})])


ENTRY = Entry(
    "depthbench", "Table 5", "Norm before or behind, of MoDA",
    needs="runs of MoDA with both placings of its norm",
    studies=("moda-norm", "moda-norm-cpu"),
    make=make,
)  # fmt: skip
