"""Loss relative to a baseline, by depth. WAV, Fig. 2."""

from matplotlib.axes import Axes

from depthlit.report import by_depth, drawing
from depthlit.report.cells import Cell, Panel
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import look
from depthlit.report.noise import Mean, holm


def published(panel: Panel, cell: Cell, baseline: str) -> float | None:
    """The paper's difference at this depth on this corpus."""
    losses = by_depth.theirs(panel, cell.shape.n_layer)
    return losses[cell.strategy] - losses[baseline] if {cell.strategy, baseline} <= set(losses) else None


def against(material: Material, panel: Panel, one: Axes) -> Table:
    """Draw a panel and make its table."""
    base, name = by_depth.baseline(material, panel), look(material.baseline).name
    cells = [cell for cell in panel.cells if cell.strategy != material.baseline and cell.shape.n_layer in base]
    steps = [cell.minus(base[cell.shape.n_layer]) for cell in cells]
    theirs = [published(panel, cell, material.baseline) for cell in cells]
    lines = []
    for design in dict.fromkeys(cell.design for cell in cells):
        own = [(cell, step) for cell, step in zip(cells, steps, strict=True) if cell.design == design]
        heights = [Mean(step.value, (step.high - step.low) / 2) for _, step in own]
        lines.append(Line(design, own[0][0].look, [cell.shape.n_layer for cell, _ in own], heights))
    lines += [
        Line(f"{cell.design} (published)", cell.look, [cell.shape.n_layer], [height], published=True)
        for cell, height in zip(cells, theirs, strict=True) if height is not None
    ]  # fmt: skip
    drawing.curves(one, lines, panel.title, "layers L", f"loss minus {name}'s", ticks=panel.depths)
    one.axhline(0, color="#000000", linewidth=0.8)
    low, high = one.get_ylim()
    one.set_ylim(min(low, 0), max(high, 0))
    rows = [
        [cell.design, cell.shape.n_layer, step.value, step.low, step.high, step.p, step.verdict, step.test, height]
        for cell, step, height in zip(cells, holm(steps), theirs, strict=True)
    ]
    columns = ["design", "L", "difference", "low", "high", "p (Holm)", "verdict", "test", "published"]
    return Table(f"Loss minus {name}'s: {panel.title}", columns, rows)


def make(material: Material) -> Piece:
    """A panel per corpus; below zero is better than the baseline."""
    piece, shown = Piece(), []
    for panel in by_depth.panels(material):
        if by_depth.baseline(material, panel):
            shown.append(panel)
        else:
            piece.gaps.append(f"{panel.title}: no runs of {look(material.baseline).name}, the baseline")
    if not shown:
        raise Missing("; ".join(piece.gaps))
    figure, axes = drawing.grid(len(shown), columns=2, width=5.2, height=3.8)
    piece.tables = [against(material, panel, one) for one, panel in zip(axes, shown, strict=True)]
    piece.figures[f"Validation loss minus {look(material.baseline).name}'s, by depth"] = figure
    piece.notes.append("Whiskers are the 95 % interval of the difference, by the test that its row names.")
    return piece


ENTRY = Entry(
    "wav", "Fig. 2", "Difference from Block AttnRes by depth",
    needs="runs of several depths at equal width, the baseline among them",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
