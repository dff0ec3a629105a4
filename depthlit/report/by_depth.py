"""Panels that vary depth at equal width, as the WAV paper does."""

from __future__ import annotations

from depthlit.report.cells import HELD, Cell, Panel
from depthlit.report.entry import Material, Missing
from depthlit.report.known import published


def panels(material: Material) -> list[Panel]:
    """Those there are.

    Raises:
        Missing: there are none.
    """
    found = material.over_shapes(HELD[3])
    if not found:
        raise Missing("no finished runs of several depths at equal width")
    return found


def baseline(material: Material, panel: Panel) -> dict[int, Cell]:
    """Depth -> the cell that others are measured against; empty where the panel has none."""
    return {cell.shape.n_layer: cell for cell in panel.cells if cell.strategy == material.baseline}


def theirs(panel: Panel, depth: int) -> dict[str, float]:
    """Published losses at a depth, by strategy, on the corpus of this panel; empty elsewhere."""
    where = str(panel.cells[0].first.settings.get("data.path", ""))
    for corpus, losses in published("wav", depth).items():
        if corpus in where and "like" not in where:
            return dict(losses)
    return {}
