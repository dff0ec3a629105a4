"""Tables as CSV, LaTeX and HTML. A mean over seeds stands with half the width of its 95 % t-interval behind +-."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from depthlit.report.entry import Table
from depthlit.report.noise import INTERVAL, Mean

DIGITS = 4
FOLDED = 15
"""Tables of more rows are folded up in the page."""


def as_csv(table: Table) -> str:
    """Full precision; a column of means becomes three: mean, half width, number of seeds."""
    means = {i for row in table.rows for i, value in enumerate(row) if isinstance(value, Mean)}
    head: list[str] = []
    for i, name in enumerate(table.columns):
        head += [name, f"{name} +-", f"{name} seeds"] if i in means else [name]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in table.rows:
        cells: list[Any] = []
        for i, value in enumerate(row):
            if i in means:
                cells += [value.value, value.half, value.n] if isinstance(value, Mean) else ["", "", ""]
            else:
                cells.append(value)
        writer.writerow(
            ["" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell for cell in cells]
        )
    return text.getvalue()


def as_latex(table: Table) -> str:
    """For \\input; needs the package booktabs."""
    numeric = [_numeric(column) for column in zip(*table.rows, strict=True)] or [False] * len(table.columns)
    lines = [
        f"% {' '.join(table.title.split())}; +- is half the width of the {INTERVAL}",
        rf"\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}",
        r"\toprule",
        " & ".join(map(_escaped, table.columns)) + r" \\",
        r"\midrule",
        *(" & ".join(_latex(cell) for cell in cells(table, row)) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def as_html(table: Table) -> str:
    """A figure element, whose table scrolls sideways where it is wider than the page."""
    numeric = [_numeric(column) for column in zip(*table.rows, strict=True)] or [False] * len(table.columns)
    kinds = [' class="n"' if n else "" for n in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_html(cell)}</td>" for cell, kind in zip(cells(table, row), kinds, strict=True))
        + "</tr>\n" for row in table.rows
    )  # fmt: skip
    title = html.escape(table.title)
    folded = len(table.rows) > FOLDED
    caption = f'<caption class="hide">{title}</caption>' if folded else f"<caption>{title}</caption>"
    whole = (
        f'<figure class="table" tabindex="0"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></figure>"
    )
    return f"<details><summary>{title}, {len(table.rows)} rows</summary>{whole}</details>" if folded else whole


def cells(table: Table, row: Sequence[Any]) -> Iterable[str]:
    """The texts of a row."""
    return (text(value, table.digits.get(name, DIGITS)) for name, value in zip(table.columns, row, strict=True))


def text(value: Any, digits: int = DIGITS) -> str:
    """A value for people; "" for what there is not."""
    if isinstance(value, Mean):
        if math.isnan(value.value):
            return ""
        whole = f"{value.value:.{digits}f}"
        return whole if math.isnan(value.half) else f"{whole} ± {value.half:.{digits}f}"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.{digits}f}" if not value or abs(value) >= 0.5 * 10.0**-digits else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def _numeric(column: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, int | float | Mean) for value in column)


def _html(cell: str) -> str:
    return html.escape(cell).replace("-", "−", 1) if cell[:1] == "-" else html.escape(cell)


def _latex(cell: str) -> str:
    value, sign, half = cell.partition(" ± ")
    plain = value.removeprefix("-").replace(",", "").replace(".", "", 1)
    if not plain.isdigit():
        return _escaped(cell)
    return rf"${value.replace(',', '{,}')} \pm {half}$" if sign else f"${value.replace(',', '{,}')}$"


ESCAPES = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"${sign}$" for sign in "<>|"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
})  # fmt: skip


def _escaped(words: str) -> str:
    return words.translate(ESCAPES)
