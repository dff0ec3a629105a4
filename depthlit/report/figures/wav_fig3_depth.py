"""Final loss by depth and corpus. WAV, Fig. 3."""

from depthlit.report import by_depth, drawing
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Piece
from depthlit.report.known import look


def make(material: Material) -> Piece:
    """A panel per corpus, with the published points where the corpus is the paper's."""
    shown = by_depth.panels(material)
    figure, axes = drawing.grid(len(shown), columns=2, width=5.2, height=3.8)
    for one, panel in zip(axes, shown, strict=True):
        lines = drawing.by_design(panel.designs, drawing.depth)
        lines += [
            Line(f"{look(strategy).name} (published)", look(strategy), [depth], [loss], published=True)
            for depth in panel.depths for strategy, loss in by_depth.theirs(panel, depth).items()
        ]  # fmt: skip
        drawing.curves(one, lines, panel.title, "layers L", "validation loss", ticks=panel.depths)
        bound = panel.cells[0].first.trigram
        if bound == bound:
            one.axhline(bound, color="#888888", linestyle=":", linewidth=1)
            one.annotate("trigrams", (panel.depths[-1], bound), fontsize=7.5, ha="right", va="bottom")
    return Piece({"Validation loss by depth at equal width": figure})


ENTRY = Entry(
    "wav", "Fig. 3", "Loss by depth",
    needs="runs of several depths at equal width",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
