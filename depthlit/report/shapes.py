"""Tables of shapes: the named ones of a paper's table, with how many of the runs here have each."""

from __future__ import annotations

from depthlit.report.entry import Material, Piece, Table
from depthlit.report.known import published
from depthlit.shape import NAMED, ShapeSpec


def same(shape: ShapeSpec, other: ShapeSpec) -> bool:
    """Equal but for vocabulary and context, which data decide."""
    keys = ("n_layer", "d_model", "n_head", "kv_heads", "d_ff")
    return all(getattr(shape, key) == getattr(other, key) for key in keys)


def table(material: Material, number: str, title: str, *families: str) -> Piece:
    """Depth, width, aspect ratio and size of the named shapes of these families.

    Args:
        material: of the report.
        number: of the paper's table.
        title: of ours.
        families: beginnings of names, up to the depth.
    """
    theirs = published("depthbench", "shapes", number)
    finished = [run for run in material.found.runs if run.status == "finished"]
    rows, gaps = [], []
    for name, shape in NAMED.items():
        if name.rpartition("-L")[0] in families:
            here = sum(same(run.shape, shape) for run in finished)
            backbone, total = theirs.get(name, (None, None))
            rows.append([name, shape.n_layer, shape.d_model, shape.aspect, shape.backbone() / 1e6,
                         shape.parameters() / 1e6, backbone, total, here])  # fmt: skip
            gaps += [] if here else [name]
    columns = ["shape", "L", "d", "d / L", "backbone (M)", "total (M)", "backbone, published (M)",
               "total, published (M)", "finished runs here"]  # fmt: skip
    if not theirs:
        rows, columns = [[*row[:6], row[8]] for row in rows], [*columns[:6], columns[8]]
    piece = Piece(tables=[Table(title, columns, rows, dict.fromkeys(columns[3:6], 2))])
    if gaps:
        piece.gaps.append(f"no finished runs of {', '.join(gaps)}")
    return piece
