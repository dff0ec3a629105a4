"""Parameters that each design adds to the Pre-LN model of the same shape. DepthBench, Table 6."""

from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published

PUBLISHED = (24, 1024)


def make(material: Material) -> Piece:
    """A row per design and shape."""
    rows, seen = [], set()
    for panel in material.panels:
        for cell in panel.cells:
            key = (cell.design, cell.shape)
            if key not in seen:
                seen.add(key)
                total, plain = cell.first.parameters, cell.shape.parameters()
                at = (cell.shape.n_layer, cell.shape.d_model) == PUBLISHED
                theirs = published("depthbench", "parameters").get(cell.strategy) if at else None
                rows.append([cell.design, cell.shape.n_layer, cell.shape.d_model, total, total - plain,
                             100 * (total - plain) / plain, theirs and theirs / 1e6])  # fmt: skip
    if not rows:
        raise Missing("no finished runs")
    columns = ["design", "L", "d", "parameters", "beyond Pre-LN", "%", "published (M)"]
    return Piece(tables=[Table("Parameters", columns, rows, {"%": 2, "published (M)": 2})])


ENTRY = Entry(
    "depthbench", "Table 6", "Parameters of each design",
    needs="runs of a study, or with the callback CostMeter, which count them",
    studies=("depthbench-400m", "depthbench-400m-cpu"),
    make=make,
)  # fmt: skip
