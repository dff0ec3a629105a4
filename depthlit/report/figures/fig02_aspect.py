"""Loss by aspect ratio: deep and narrow is on the left. DepthBench, Fig. 2."""

from depthlit.report import drawing
from depthlit.report.cells import HELD, Panel
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import look, published
from depthlit.report.noise import holm

PUBLISHED = " (published)"


def theirs() -> list[Line]:
    """Fig. 2ab's curves, at about 400M parameters."""
    width = published("depthbench", "width")
    return [
        Line(f"{look(strategy).name}{PUBLISHED}", look(strategy), [width[depth] / depth for depth in losses],
             list(losses.values()), published=True)
        for strategy, losses in published("depthbench", "loss").items()
    ]  # fmt: skip


def comparable(panel: Panel) -> bool:
    """Whether a panel's shapes are those of the published curves."""
    width = published("depthbench", "width")
    return all(width.get(cell.shape.n_layer) == cell.shape.d_model for cell in panel.cells)


def make(material: Material) -> Piece:
    """A panel per study and condition, and the published curves beside or in it."""
    shown = material.over_shapes(*HELD[:3])
    if not shown:
        raise Missing("no finished runs of one design at two shapes of equal size")
    piece = Piece()
    for held in dict.fromkeys(panel.held for panel in shown):
        own = [panel for panel in shown if panel.held == held]
        beside = HELD[0] in held and not all(map(comparable, own)) and not piece.figures
        figure, axes = drawing.grid(len(own) + beside, columns=2, width=5.4, height=4.0)
        for one, panel in zip(axes, own, strict=False):
            drawn = drawing.by_design(panel.designs, drawing.aspect)
            if comparable(panel):
                there = {cell.look.name for cell in panel.cells}
                drawn += [line for line in theirs() if line.name.removesuffix(PUBLISHED) in there]
            ticks = sorted({cell.shape.aspect for cell in panel.cells})
            drawing.curves(one, drawn, panel.title, "d / L (deep to wide)", "validation loss", log=True, ticks=ticks)
        if beside:
            ticks = [width / depth for depth, width in published("depthbench", "width").items()]
            title = f"DepthBench, 400M{PUBLISHED}"
            drawing.curves(axes[-1], theirs(), title, "d / L (deep to wide)", "validation loss", log=True, ticks=ticks)
        piece.figures[f"Validation loss by aspect ratio, shapes of equal {' and '.join(held)}"] = figure
    there = {what for panel in shown for what in panel.held}
    piece.gaps = [f"no runs of several shapes with equal {what}" for what in HELD[:3] if what not in there]
    ends = [(panel, cells[0], cells[-1]) for panel in shown for cells in panel.designs.values() if len(cells) > 1]
    steps = holm([deep.minus(wide) for _, wide, deep in ends])
    rows = [
        [panel.title, wide.design, wide.shape.n_layer, deep.shape.n_layer, wide.mean(), deep.mean(), step.value, step.p,
         step.verdict, change(wide.strategy)]
        for (panel, wide, deep), step in zip(ends, steps, strict=True)
    ]  # fmt: skip
    columns = ["study", "design", "wide L", "deep L", "wide loss", "deep loss", "deep − wide", "p (Holm)", "verdict",
               "published, L16 to L32"]  # fmt: skip
    piece.tables.append(Table("From the widest to the deepest shape", columns, rows))
    return piece


def change(strategy: str) -> str:
    """The published change from L16 to L32."""
    losses = published("depthbench", "loss", strategy)
    return f"{losses[32] - losses[16]:+.3f}" if losses else ""


ENTRY = Entry(
    "depthbench", "Fig. 2", "Loss by aspect ratio",
    needs="runs of several shapes with equal total parameters (a, b) or equal backbone (c)",
    studies=("depthbench-400m", "depthbench-backbone", "depthbench-400m-cpu", "depthbench-backbone-cpu"),
    make=make,
)  # fmt: skip
