"""Small pictures for the page, without matplotlib: curves as SVG, matrices as one pixel per entry."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from PIL import Image

from depthlit.report.found import Curve

MOST = 160
"""Points of a curve that are kept."""


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The finite points, at most about MOST of them, ends included."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST)).round().astype(int))
    return x[chosen], y[chosen]


def spark(curve: Curve, label: str) -> str:
    """A curve without axes, as an SVG element."""
    x, y = thinned(*curve)
    if len(x) < 2:
        return ""
    points = _points(x, y, (x[0], x[-1]), (y.min(), y.max()), 96, 22, 2)
    return (
        f'<svg class="spark" viewBox="0 0 96 22" role="img" aria-label="{html.escape(label)}">'
        f'<polyline points="{points}"/></svg>'
    )


def chart(curves: Mapping[str, Curve], title: str, x: str) -> str:
    """Curves on one scale, with the ends of both axes, as a figure element; "" where there is nothing to see."""
    kept = {name: thinned(*curve) for name, curve in curves.items()}
    kept = {name: (u, v) for name, (u, v) in kept.items() if len(u)}
    if not kept:
        return ""
    left, right = min(u[0] for u, _ in kept.values()), max(u[-1] for u, _ in kept.values())
    low, high = min(v.min() for _, v in kept.values()), max(v.max() for _, v in kept.values())
    parts = []
    for i, (u, v) in enumerate(kept.values()):
        points = _points(u, v, (left, right), (low, high), 300, 110, 4)
        if len(u) < 2:
            at, up = points.split(",")
            parts.append(f'<circle class="c{i % 8}" cx="{at}" cy="{up}" r="2.5"/>')
        else:
            parts.append(f'<polyline class="c{i % 8}" points="{points}"/>')
    names = "".join(
        f'<span class="key k{i % 8}">{html.escape(name)}</span>' for i, name in enumerate(kept) if len(kept) > 1
    )
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)} {names}</figcaption>'
        f'<svg viewBox="0 0 300 110" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}, from '
        f'{number(low)} to {number(high)}">{"".join(parts)}</svg>'
        f'<div class="ends"><span>{number(high)}</span><span>{number(low)}</span></div>'
        f'<div class="span"><span>{number(left)}</span><span>{html.escape(x)}</span><span>{number(right)}</span></div>'
        "</figure>"
    )


def pixels(matrix: np.ndarray, title: str) -> str:
    """A matrix, one pixel per entry, as a figure element; NaN is clear."""
    finite = matrix[np.isfinite(matrix)]
    if not finite.size:
        return ""
    low, high = float(finite.min()), float(np.quantile(finite, 0.99))
    signed = low < -0.05 * abs(high)
    reach = max(abs(low), abs(high)) or 1.0
    low, high = (-reach, reach) if signed else (low, high if high > low else low + 1.0)
    colours = colormaps["RdBu_r" if signed else "cividis"]
    with np.errstate(invalid="ignore"):
        shade = colours(np.clip((matrix - low) / (high - low), 0, 1), bytes=True)
    shade[~np.isfinite(matrix)] = 0
    file = io.BytesIO()
    Image.fromarray(shade).save(file, format="PNG")
    return (
        f'<figure class="pixels"><figcaption>{html.escape(title)}</figcaption>'
        f'<img alt="{html.escape(title)}, {matrix.shape[0]} rows by {matrix.shape[1]} columns, from {number(low)} to '
        f'{number(high)}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
        f'<div class="span"><span>{number(low)}</span><i class="{"signed" if signed else "amount"}"></i>'
        f"<span>{number(high)}</span></div></figure>"
    )


def number(value: float) -> str:
    """Four digits, as short as they go."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _points(
    x: np.ndarray, y: np.ndarray, across: tuple[float, float], up: tuple[float, float],
    width: float, height: float, edge: float,
) -> str:  # fmt: skip
    """Places in a box of this size, upwards on the page."""
    u = edge + (x - across[0]) / ((across[1] - across[0]) or 1) * (width - 2 * edge)
    v = height - edge - (y - up[0]) / ((up[1] - up[0]) or 1) * (height - 2 * edge)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(u, v, strict=True))
