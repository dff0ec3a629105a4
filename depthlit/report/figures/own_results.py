"""Every cell: mean validation loss over seeds."""

from depthlit.report.cells import DATA
from depthlit.report.entry import Entry, Material, Missing, Piece, Table


def make(material: Material) -> Piece:
    """A table per panel."""
    piece = Piece()
    for panel in (*material.panels, *material.lost):
        rows = [
            [cell.design, cell.shape.n_layer, cell.shape.d_model, cell.shape.aspect, cell.first.parameters / 1e6,
             cell.mean().n, cell.mean(), cell.fate, cell.first.trigram]
            for cell in panel.every
        ]  # fmt: skip
        columns = ["design", "L", "d", "d / L", "parameters (M)", "seeds", "loss", "not in the mean", "trigrams"]
        piece.tables.append(Table(panel.title, columns, rows, {"d / L": 2, "parameters (M)": 3}))
        if DATA in panel.keys:
            piece.notes.append(f"{panel.title}: set apart, for one data.path held several data, told by env.json.")
    if not piece.tables:
        raise Missing("no runs")
    return piece


ENTRY = Entry("own", "", "All results", needs="runs", studies=(), make=make)
