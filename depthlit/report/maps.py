"""What figures of heat maps have in common: a panel per design, one scale for all."""

from collections.abc import Callable
from typing import Any

import numpy as np

from depthlit.answer import Answer
from depthlit.report import drawing
from depthlit.report.cells import RATE, depths_shown
from depthlit.report.entry import Material, Missing, Piece
from depthlit.report.found import LOOSE

Matrix = Callable[[Answer], np.ndarray]


def score(answer: Answer) -> np.ndarray:
    """(L, L) of a causal or permutation score."""
    return answer.values["score"]


def angles(answer: Answer) -> np.ndarray:
    """[n - 1, l] of an angular distance."""
    return drawing.by_distance(answer.values["distance"])


def of_designs(
    material: Material, diagnostic: str, matrix: Matrix, what: str, x: str, y: str, unit: str,
    deepest: bool = False, **heat: Any,
) -> Piece:  # fmt: skip
    """A figure of heat maps per panel and depth.

    Args:
        material: of the report.
        diagnostic: which answers.
        matrix: what to draw of one.
        what: the figure shows.
        x: what columns are.
        y: what rows are.
        unit: what colours are.
        deepest: only the greatest of the depths shown.
        heat: further arguments of `depthlit.plots.heat`.

    Raises:
        Missing: no finished run was asked.
    """
    piece = Piece()
    for panel in material.panels:
        if RATE in panel.keys and panel.study != LOOSE:
            continue  # a study's maps by learning rate are a figure of their own
        for depth in depths_shown(panel)[-1:] if deepest else depths_shown(panel):
            found = {
                f"{cell.design}, L = {depth}": matrix(answer)
                for cell in panel.at(depth)
                if (answer := cell.first.answer(diagnostic)) is not None and answer.values
            }
            if found:
                drawn = drawing.maps(found, x, y, unit, **heat)
                piece.figures[f"{what} at {depth} layers: {panel.title}"] = drawn
    if not piece.figures:
        raise Missing(f"no finished run was asked by {diagnostic}")
    piece.notes.append("Maps are of the lowest seed; all panels of a figure have one scale, which ends at its 99 %.")
    return piece


LAYERS: dict[str, Any] = {"x": "affected layer", "y": "skipped layer"}
SWAPPED: dict[str, Any] = {"x": "layer b", "y": "layer a"}
TURNED: dict[str, Any] = {"x": "start layer l", "y": "distance n"}
UPWARD: dict[str, Any] = {"upward": True, "colours": "cividis_r", "first": (1, 0)}
