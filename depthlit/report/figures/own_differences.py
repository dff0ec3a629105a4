"""Which designs differ by more than their seeds do, at each shape."""

from itertools import combinations

from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.noise import holm


def make(material: Material) -> Piece:
    """A table per panel: every pair of designs at every shape."""
    piece = Piece()
    for panel in material.panels:
        pairs = [
            (first, second)
            for first, second in combinations(panel.every, 2)
            if first.shape == second.shape and first.design != second.design and (first.runs or second.runs)
        ]
        if not pairs:
            continue
        raised = holm([first.minus(second) for first, second in pairs])
        rows = [
            [first.shape.n_layer, first.shape.d_model, first.design, second.design,
             "; ".join(f"{cell.design}: {cell.fate}" for cell in (first, second) if cell.fate),
             step.value, step.low, step.high, step.p, step.verdict, step.test]
            for (first, second), step in zip(pairs, raised, strict=True)
        ]  # fmt: skip
        rows.sort(key=lambda row: row[:2])
        columns = ["L", "d", "design", "against", "not in the means", "difference", "low", "high", "p (Holm)",
                   "verdict", "test"]  # fmt: skip
        piece.tables.append(Table(f"Differences of validation loss: {panel.title}", columns, rows))
    if not piece.tables:
        raise Missing("no two designs at one shape in one study")
    piece.notes.append(
        "Intervals are those of each difference alone; p is raised for all of its table by Holm's method."
    )
    return piece


ENTRY = Entry(
    "own", "", "Differences, tested against the noise of seeds",
    needs="finished runs of two designs at one shape, with two seeds or more each",
    studies=("seeds", "seeds-cpu"),
    make=make,
)  # fmt: skip
