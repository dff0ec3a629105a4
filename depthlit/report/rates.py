"""Cells of studies that sweep the learning rate."""

from __future__ import annotations

from collections.abc import Iterable

from depthlit.report.cells import RATE, Cell, Panel, panels_over
from depthlit.report.entry import Material


def swept(material: Material) -> dict[str, dict[int, dict[str, list[Cell]]]]:
    """Title -> depth -> design -> its cells by rising learning rate, where there are two rates or more."""
    found = {title: _by_depth(panels) for title, panels in panels_over(material.panels, RATE).items()}
    return {title: by_depth for title, by_depth in found.items() if by_depth}


def _by_depth(panels: Iterable[Panel]) -> dict[int, dict[str, list[Cell]]]:
    found: dict[int, dict[str, list[Cell]]] = {}
    cells = [cell for panel in panels for cell in panel.cells]
    for cell in sorted(cells, key=lambda cell: (cell.shape.n_layer, cell.first.rate)):
        found.setdefault(cell.shape.n_layer, {}).setdefault(cell.design, []).append(cell)
    several = {
        depth: {name: own for name, own in at.items() if len({cell.first.rate for cell in own}) > 1}
        for depth, at in found.items()
    }
    return {depth: at for depth, at in several.items() if at}
