"""Final loss of every mechanism, depth and corpus. WAV, Table 2."""

from depthlit.report import by_depth
from depthlit.report.entry import Entry, Material, Piece, Table
from depthlit.report.known import published


def make(material: Material) -> Piece:
    """Rows are mechanisms, columns depths; published values beside ours where the corpus is the paper's."""
    piece = Piece()
    for panel in by_depth.panels(material):
        known = {depth: by_depth.theirs(panel, depth) for depth in panel.depths}
        columns, rows = ["mechanism"], [[name] for name in panel.designs]
        for depth in panel.depths:
            columns += [f"L = {depth}", *([f"L = {depth}, published"] if known[depth] else [])]
            for row, cells in zip(rows, panel.designs.values(), strict=True):
                cell = next((cell for cell in cells if cell.shape.n_layer == depth), None)
                row.append(cell and cell.mean())  # type: ignore[arg-type]
                if known[depth]:
                    row.append(known[depth].get(cells[0].strategy))  # type: ignore[arg-type]
        piece.tables.append(Table(f"Final validation loss: {panel.title}", columns, rows))
    words = "; ".join(f"{depth} layers: {text}" for depth, text in published("wav", "words").items())
    piece.notes.append(f"Published in words, WAV against Block AttnRes: {words}. Table bodies are not public.")
    return piece


ENTRY = Entry(
    "wav", "Table 2", "Final losses",
    needs="runs of several depths at equal width",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
