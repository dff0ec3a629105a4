"""Do streams stay apart through all mixing? Effective rank, overlap, spectrum. DepthBench, Fig. 10."""

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
        names = list(dict.fromkeys(cell.design for cell in own))
        figure, axes = drawing.grid(3, columns=3)
        for one, (key, what) in zip(axes, NUMBERS.items(), strict=False):
            drawn = []
            for name in names:
                same = [cell for cell in own if cell.design == name]
                heights = [cell.mean(metric(key)) for cell in same]
                drawn.append(Line(name, same[0].look, [cell.shape.n_layer for cell in same], heights))
            drawing.curves(one, drawn, what, "layers L", what, ticks=panel.depths)
        depth = [depth for depth in depths_shown(panel) if any(cell.shape.n_layer == depth for cell in own)][-1:]
        depth = depth or [own[-1].shape.n_layer]
        drawn = spectra([cell for cell in own if cell.shape.n_layer == depth[0]])
        places = drawn[0].x if drawn else ()
        drawing.curves(axes[2], drawn, f"spectrum, L = {depth[0]}", "singular value", "sigma / sigma_max", ticks=places)
        piece.figures[f"Product of all residual maps: {panel.title}"] = figure
        theirs = published("depthbench", "erank")
        piece.tables.append(
            Table(
                f"Product of all residual maps: {panel.title}",
                ["design", "L", *NUMBERS.values(), "published rank"],
                [
                    [
                        cell.design,
                        cell.shape.n_layer,
                        *(cell.mean(metric(key)) for key in NUMBERS),
                        " to ".join(map(str, theirs.get(cell.strategy, ()))),
                    ]
                    for cell in own
                ],
                dict.fromkeys(NUMBERS.values(), 3),
            )
        )
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
