"""Do streams stay apart through all mixing? Effective rank, overlap, spectrum. DepthBench, Fig. 10."""

from functools import partial

from depthlit.report import drawing
from depthlit.report.cells import Cell, depths_shown
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published

NUMBERS = {"final_erank": "effective rank of the product", "final_overlap": "mean |cos| between streams"}


def metric(key: str) -> str:
    """As it is logged."""
    return f"depth/Propagation/{key}"


def spectra(cells: list[Cell]) -> list[Line]:
    """Spectra of the lowest seed, with their bands."""
    found = []
    for cell in cells:
        answer = cell.first.answer("Propagation")
        if answer is not None and "spectrum" in answer.values:
            v = answer.values
            places, band = list(range(1, 1 + len(v["spectrum"]))), (v["spectrum_low"], v["spectrum_high"])
            found.append(Line(cell.design, cell.look, places, list(v["spectrum"]), band=band))
    return found


def make(material: Material) -> Piece:
    """Rank and overlap by depth, and the spectrum at the greatest, with its band."""
    piece = Piece()
    for panel in material.panels:
        own = [cell for cell in panel.cells if cell.by_seed(metric("final_erank"))]
        if not own:
            continue
        designs = {
            name: [cell for cell in own if cell.design == name] for name in dict.fromkeys(cell.design for cell in own)
        }
        figure, axes = drawing.grid(3, columns=3)
        for one, (key, what) in zip(axes, NUMBERS.items(), strict=False):
            drawn = drawing.by_design(designs, drawing.depth, partial(Cell.mean, metric=metric(key)))
            drawing.curves(one, drawn, what, "layers L", what, ticks=panel.depths)
        depths = [cell.shape.n_layer for cell in own]
        depth = next((depth for depth in reversed(depths_shown(panel)) if depth in depths), max(depths))
        drawn = spectra([cell for cell in own if cell.shape.n_layer == depth])
        ticks = drawn[0].x if drawn else ()
        drawing.curves(axes[2], drawn, f"spectrum, L = {depth}", "singular value", "sigma / sigma_max", ticks=ticks)
        piece.figures[f"Product of all residual maps: {panel.title}"] = figure
        rows = [
            [cell.design, cell.shape.n_layer, *(cell.mean(metric(key)) for key in NUMBERS),
             " to ".join(map(str, published("depthbench", "erank", cell.strategy)))] for cell in own
        ]  # fmt: skip
        columns, digits = ["design", "L", *NUMBERS.values(), "published rank"], dict.fromkeys(NUMBERS.values(), 3)
        piece.tables.append(Table(f"Product of all residual maps: {panel.title}", columns, rows, digits))
    if not piece.figures:
        raise Missing("no finished run of a design with several streams was asked by Propagation")
    piece.notes.append("The band of the spectrum is 95 % by bootstrap over documents or windows of the lowest seed.")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 10", "Rank, overlap and spectrum of the streams",
    needs="runs with the callback Propagation of a design with several streams",
    studies=("depthbench-400m", "mhc-relaxed", "mhc-relaxed-cpu"),
    make=make,
)  # fmt: skip
