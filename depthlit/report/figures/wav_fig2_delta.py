"""Loss relative to a baseline, by depth. WAV, Fig. 2."""

from depthlit.report import by_depth, drawing
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import look
from depthlit.report.noise import Mean, holm


def make(material: Material) -> Piece:
    """A panel per corpus; below zero is better than the baseline."""
    piece, shown = Piece(), []
    for panel in by_depth.panels(material):
        if by_depth.baseline(material, panel):
            shown.append(panel)
        else:
            piece.gaps.append(by_depth.no_baseline(material, panel))
    if not shown:
        raise Missing("; ".join(piece.gaps))
    name = look(material.baseline).name
    figure, axes = drawing.grid(len(shown), columns=2, width=5.2, height=3.8)
    for one, panel in zip(axes, shown, strict=True):
        against = by_depth.baseline(material, panel)
        lines, rows, steps = [], [], []
        for design, cells in panel.designs.items():
            own = [cell for cell in cells if cell.strategy != material.baseline and cell.shape.n_layer in against]
            found = [cell.minus(against[cell.shape.n_layer]) for cell in own]
            if own:
                depths = [cell.shape.n_layer for cell in own]
                heights = [Mean(step.value, (step.high - step.low) / 2) for step in found]
                lines.append(Line(design, own[0].look, depths, heights))
            steps += found
            for cell, step in zip(own, found, strict=True):
                losses = by_depth.theirs(panel, L := cell.shape.n_layer)
                known = {cell.strategy, material.baseline} <= set(losses)
                rows.append([design, L, step.value, step.low, step.high, step.test,
                             losses[cell.strategy] - losses[material.baseline] if known else None])  # fmt: skip
        drawing.curves(one, lines, panel.title, "layers L", f"loss minus {name}'s", ticks=panel.depths)
        one.axhline(0, color="#000000", linewidth=0.8)
        low, high = one.get_ylim()
        one.set_ylim(min(low, 0), max(high, 0))
        raised = holm(steps)
        rows = [[*row[:5], step.p, step.verdict, *row[5:]] for row, step in zip(rows, raised, strict=True)]
        columns = ["design", "L", "difference", "low", "high", "p (Holm)", "verdict", "test", "published"]
        piece.tables.append(Table(f"Loss minus {name}'s: {panel.title}", columns, rows))
    piece.figures[f"Validation loss minus {name}'s, by depth"] = figure
    piece.notes.append("Whiskers are the 95 % interval of the difference, by the test that its row names.")
    return piece


ENTRY = Entry(
    "wav", "Fig. 2", "Difference from Block AttnRes by depth",
    needs="runs of several depths at equal width, the baseline among them",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
