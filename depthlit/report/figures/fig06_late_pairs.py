"""Which share of late pairs of layers depends on each other, and on their order. DepthBench, Fig. 6."""

import numpy as np

from depthlit import plots
from depthlit.report import drawing
from depthlit.report.cells import Panel, depths_shown
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published
from depthlit.report.maps import LAYERS, SWAPPED, of_designs, score
from depthlit.report.noise import Mean

SHARES = {"R_causal": "CausalScore", "R_perm": "PermutationScore"}
PUBLISHED_DEPTH = 32


def bars(panel: Panel, depth: int, piece: Piece) -> None:
    """Bars of both shares at one depth, and their table."""
    cells = panel.at(depth)
    found: dict[str, list[Mean]] = {}
    for key, diagnostic in SHARES.items():
        means = [cell.mean(f"depth/{diagnostic}/{key}") for cell in cells]
        if any(mean.n for mean in means):
            found[key] = means
        else:
            piece.gaps.append(f"{panel.title}, L = {depth}: no {key}, which needs {diagnostic}")
    if not found:
        return
    figure, axes = drawing.grid(len(found), columns=2, width=4.8, height=3.2)
    for one, (key, means) in zip(axes, found.items(), strict=True):
        value, half = np.array([mean.value for mean in means]), np.nan_to_num([mean.half for mean in means])
        plots.bars(one, np.nan_to_num(value), f"{key}, L = {depth}", "", "share of late pairs",
                   (value - half, value + half), scale=(0, max(0.05, 1.15 * np.nanmax(value + half))))  # fmt: skip
        one.set_xticks(range(len(cells)), [drawing.folded(cell.design, 18) for cell in cells], rotation=35, ha="right")
        if not value.any():
            one.text(0.5, 0.5, "none of the pairs", ha="center", va="center", transform=one.transAxes)
        known = published("depthbench", key) if depth == PUBLISHED_DEPTH else {}
        for place, cell in enumerate(cells):
            one.patches[place].set_facecolor(cell.look.colour)
            if cell.strategy in known:
                one.plot([place - 0.4, place + 0.4], [known[cell.strategy]] * 2, color="#000000", linestyle=":")
    piece.figures[f"Late pairs above the threshold at {depth} layers: {panel.title}"] = figure
    theirs = {f"{key} published at L32": published("depthbench", key) for key in found}
    rows = [
        [cell.design, *(means[i] for means in found.values()), *(known.get(cell.strategy) for known in theirs.values())]
        for i, cell in enumerate(cells)
    ]
    title = f"Late pairs above the threshold at {depth} layers: {panel.title}"
    piece.tables.append(
        Table(title, ["design", *found, *theirs], rows, dict.fromkeys(found, 3) | dict.fromkeys(theirs, 2))
    )


def make(material: Material) -> Piece:
    """Bars at the greatest depth shown, then the maps."""
    piece = Piece()
    for panel in material.panels:
        asked = any(cell.by_seed(f"depth/{diagnostic}/{key}") for key, diagnostic in SHARES.items()
                    for cell in panel.cells)  # fmt: skip
        if asked:
            bars(panel, depths_shown(panel)[-1], piece)
    if not piece.figures:
        raise Missing("no finished run was asked by CausalScore or PermutationScore")
    maps = (
        ("CausalScore", "Causal score C", "C(s, l)", LAYERS),
        ("PermutationScore", "Permutation score P", "P(a, b)", SWAPPED),
    )
    for diagnostic, what, unit, names in maps:
        try:
            own = of_designs(material, diagnostic, score, what, unit=unit, deepest=True, **names)
        except Missing as reason:
            piece.gaps.append(str(reason))
        else:
            piece.figures |= own.figures
            piece.notes = own.notes
    piece.notes.append("Dotted lines are published values, where the depth is the paper's 32.")
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 6", "Late pairs: R_causal, R_perm and their maps",
    needs="runs with the callbacks CausalScore and PermutationScore",
    studies=("depthbench-400m",),
    make=make,
)  # fmt: skip
