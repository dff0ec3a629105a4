"""Cells of studies that sweep the learning rate."""

from __future__ import annotations

from depthlit.report.cells import RATE, Cell
from depthlit.report.entry import Material


def swept(material: Material) -> dict[str, dict[int, dict[str, list[Cell]]]]:
    """Study -> depth -> design -> its cells by rising learning rate, where there are two or more."""
    found: dict[str, dict[int, dict[str, list[Cell]]]] = {}
    for panel in material.panels:
        if RATE in panel.keys:
            for cell in panel.cells:
                found.setdefault(panel.study, {}).setdefault(cell.shape.n_layer, {}).setdefault(cell.design, []).append(
                    cell
                )
    for study in [*found]:
        for depth in [*found[study]]:
            kept = {
                name: sorted(cells, key=lambda cell: cell.first.rate)
                for name, cells in found[study][depth].items()
                if len(cells) > 1
            }
            found[study][depth] = kept
        found[study] = {depth: kept for depth, kept in sorted(found[study].items()) if kept}
    return {study: by_depth for study, by_depth in found.items() if by_depth}
