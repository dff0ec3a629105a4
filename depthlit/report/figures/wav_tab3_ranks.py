"""Which mechanism is best and second at every depth, and whether seeds tell them apart. WAV, Table 3."""

from depthlit.report import by_depth
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.noise import holm


def make(material: Material) -> Piece:
    """A row per corpus and depth; all mechanisms in the order of their mean loss."""
    rows, steps = [], []
    for panel in by_depth.panels(material):
        for depth in panel.depths:
            ranked = sorted(panel.at(depth), key=lambda cell: cell.mean().value)
            if len(ranked) > 1:
                best, second = ranked[:2]
                steps.append(best.minus(second))
                rows.append([panel.title, depth, best.design, second.design, steps[-1].value,
                             " < ".join(cell.design for cell in ranked)])  # fmt: skip
    if not rows:
        raise Missing("only one mechanism at every depth")
    rows = [[*row[:5], step.p, step.verdict, row[5]] for row, step in zip(rows, holm(steps), strict=True)]
    columns = ["study", "L", "best", "second", "difference", "p (Holm)", "verdict", "order by mean loss"]
    return Piece(tables=[Table("Ranks by final validation loss", columns, rows)])


ENTRY = Entry(
    "wav", "Table 3", "Ranks",
    needs="runs of several mechanisms and depths at equal width",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
