"""The best learning rate of each design. DepthBench, Table 4."""

from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published
from depthlit.report.noise import holm
from depthlit.report.rates import swept


def make(material: Material) -> Piece:
    """Best and next best rate of every design and depth, and whether seeds tell them apart."""
    rows, steps = [], []
    for study, by_depth in swept(material).items():
        for depth, by_design in by_depth.items():
            for name, cells in by_design.items():
                best, second = sorted(cells, key=lambda cell: cell.mean().value)[:2]
                edge = " (at the edge)" if best in (cells[0], cells[-1]) else ""
                steps.append(best.minus(second))
                theirs = published("depthbench", "rate").get(best.strategy)
                rows.append([study, name, depth, f"{best.first.rate:g}{edge}", best.mean(), f"{second.first.rate:g}",
                             steps[-1].value, theirs and f"{theirs:g}"])  # fmt: skip
    if not rows:
        raise Missing("no design was trained at two learning rates in one study")
    rows = [[*row[:7], step.p, step.verdict, row[7]] for row, step in zip(rows, holm(steps), strict=True)]
    columns = ["study", "design", "L", "best rate", "loss", "next rate", "difference", "p (Holm)", "verdict",
               "published at 400M"]  # fmt: skip
    return Piece(tables=[Table("Best peak learning rate", columns, rows)])


ENTRY = Entry(
    "depthbench", "Table 4", "Best learning rates",
    needs="runs of one design and shape at several learning rates",
    studies=("learning-rate", "learning-rate-cpu"),
    make=make,
)  # fmt: skip
