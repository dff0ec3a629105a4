"""Cells of studies that sweep the learning rate."""

from __future__ import annotations

from depthlit.report.cells import RATE, Cell
from depthlit.report.entry import Material


def swept(material: Material) -> dict[str, dict[int, dict[str, list[Cell]]]]:
    """Study -> depth -> design -> its cells by rising learning rate, where there are two or more."""
    found: dict[str, dict[int, dict[str, list[Cell]]]] = {}
    cells = [(panel.study, cell) for panel in material.panels if RATE in panel.keys for cell in panel.cells]
    for study, cell in sorted(cells, key=lambda pair: (pair[1].shape.n_layer, pair[1].first.rate)):
        at = found.setdefault(study, {}).setdefault(cell.shape.n_layer, {})
        at.setdefault(cell.design, []).append(cell)
    several = {
        study: {depth: {name: own for name, own in at.items() if len(own) > 1} for depth, at in by_depth.items()}
        for study, by_depth in found.items()
    }
    return {study: kept for study, by_depth in several.items() if (kept := {d: at for d, at in by_depth.items() if at})}
