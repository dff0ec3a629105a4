"""The page: one HTML file with everything in it, readable offline."""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import numpy as np

from depthlit import __version__
from depthlit.answer import Answer
from depthlit.report import noise, small
from depthlit.report.cells import Panel
from depthlit.report.entry import PAPERS, Entry, Piece
from depthlit.report.found import LOOSE, Found, Run
from depthlit.report.known import look
from depthlit.report.tables import as_html, text
from depthlit.study.experiment import SEED_KEYS

TITLE = "<title>depthlit report"
"""By which a report is known."""
LOSSES = ("train/loss", "val/loss")
WIDE = ' class="wide"'
PREVIEWS = 4
"""Small pictures per diagnostic."""


@dataclass(frozen=True)
class Made:
    """An entry, and what came of it.

    Args:
        entry: which.
        piece: what was made; None where nothing could be.
        drawn: caption -> SVG element.
        reason: why nothing could be made.
    """

    entry: Entry
    piece: Piece | None
    drawn: Mapping[str, str]
    reason: str = ""

    @property
    def state(self) -> str:
        """made, partly or missing."""
        return "missing" if self.piece is None else "partly" if self.piece.gaps else "made"


SIGNS = {"made": "✓", "partly": "◐", "missing": "○"}


def page(found: Found, panels: Sequence[Panel], made: Sequence[Made], runs: Sequence[str]) -> str:
    """The whole file.

    Args:
        found: the runs, and what was left out.
        panels: finished runs, put together.
        made: all entries.
        runs: a details element per run (`of_run`).
    """
    own = files(__package__)
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    papers = "".join(
        f'<section id="{key}"><h2>{html.escape(title)}</h2>{"".join(of_entry(one) for one in mine)}</section>\n'
        for key, title in PAPERS.items()
        if (mine := sorted((one for one in made if one.entry.paper == key), key=lambda one: one.state == "missing"))
    )
    links = "".join(f'<a href="#{key}">{html.escape(title.partition(",")[0])}</a>' for key, title in PAPERS.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
{TITLE}: {len(found.runs)} runs</title>
<style>
{style}</style>
</head>
<body>
<header>
<div><h1>depthlit report</h1>
<p class="quiet">{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, depthlit {__version__}</p></div>
<nav aria-label="Parts"><a href="#overview">Overview</a>{links}<a href="#runs">Runs</a>{_left_out_link(found)}</nav>
</header>
<main>
<section id="overview"><h2>Overview</h2>
{_counts(found, panels)}
<p class="quiet">Means are over seeds of finished runs, ± half the width of the {noise.INTERVAL}. A difference is called
one only where a two-sided test against the noise of seeds gives p below 5 %: paired t over three or more shared seeds,
else Welch’s t with two seeds or more on both sides; Holm’s method where a table has many. With one seed nothing is
tested. Whiskers are intervals, and are cut where they leave a panel; dots are seeds; dotted lines and hollow markers
are published numbers.</p>
<h3>What these runs fill</h3>
{_coverage(made)}
</section>
{papers}<section id="runs"><h2>Runs</h2>
{_filters(found)}
<div id="list">
{"".join(runs)}</div>
</section>
{_left_out(found)}</main>
<script>
{script}</script>
</body>
</html>
"""


def of_entry(one: Made) -> str:
    """A figure or table with its gaps."""
    entry, piece = one.entry, one.piece
    body = ""
    if piece is not None:
        body += "".join(
            f'<figure class="drawing"><figcaption>{html.escape(caption)}</figcaption>'
            f'<div tabindex="0">{drawn}</div></figure>'
            for caption, drawn in one.drawn.items()
        )
        body += "".join(map(as_html, piece.tables))
        body += "".join(f'<p class="note">{html.escape(note)}</p>' for note in piece.notes)
    gaps = [one.reason] if piece is None else piece.gaps
    if gaps:
        listed = "".join(f"<li>{html.escape(gap)}</li>" for gap in gaps)
        commands = " or ".join(f"<code>{html.escape(command)}</code>" for command in entry.commands())
        filled = f" Filled by {commands}." if commands else ""
        body += f'<div class="gap"><b>Gap</b><ul>{listed}</ul><p>Needs {html.escape(entry.needs)}.{filled}</p></div>'
    return f'<article id="{entry.name}" class="{one.state}"><h3>{html.escape(entry.heading)}</h3>{body}</article>\n'


def of_run(run: Run, name: str, pictures: Mapping[Path, bytes]) -> str:
    """A details element: facts, curves, and what diagnostics found.

    Args:
        run: which.
        name: by which the page's address opens it.
        pictures: figures of diagnostics as PNG, by the path of the answer, to stand in place of small ones.
    """
    known, loss = look(run.strategy), run.last("val/loss")
    options = " ".join(f"{key}={value}" for key, value in run.options.items() if value is not None)
    curve = run.curves.get("train/loss")
    seeds = "/".join(str(seed) for seed in dict.fromkeys(run.seeds))
    summary = (
        f'<span class="who"><i class="swatch" style="background:{known.colour}"></i>'
        f'<b>{html.escape(known.name)}</b> <span class="quiet">{html.escape(_where(run))}</span></span>'
        f'<span class="n">L {run.shape.n_layer}</span><span class="n">d {run.shape.d_model}</span>'
        f'<span class="n">seed {seeds}</span><span class="n loss">{text(loss)}</span>'
        f'<span class="line">{small.spark(curve, "training loss") if curve else ""}</span>'
        f'<span class="status {run.status}">{run.status}</span>'
    )
    facts = {
        "folder": str(run.folder), "study": run.study or LOOSE,
        **{f"study: {axis}": label for axis, label in run.labels.items()},
        "options": options, "parameters": f"{run.parameters:,}", "d / L": f"{run.shape.aspect:.3g}",
        "step": f"{run.step:,} of {run.planned or '?'}", "peak learning rate": small.number(run.rate),
        "seeds": ", ".join(f"{key} {seed}" for key, seed in zip(SEED_KEYS, run.seeds, strict=True)),
        "trigrams": text(run.trigram), "error": run.error,
    }  # fmt: skip
    listed = "".join(
        f"<div{WIDE if len(value) > 18 else ''}><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts.items()
        if value
    )
    curves = small.chart({name: run.curves[name] for name in LOSSES if name in run.curves}, "loss", "step")
    for metric, curve in run.curves.items():
        if metric not in LOSSES and metric.partition("/")[0] in ("optim", "throughput"):
            curves += small.chart({metric: curve}, metric, "step")
    answers = "".join(of_answer(path, pictures) for path in run.answers.values())
    words = f"{run.name} {known.name} {run.strategy} {run.study}".lower()
    return (
        f'<details class="run" id="run-{html.escape(name)}" data-design="{html.escape(known.name)}" '
        f'data-shape="{_shape(run)}" data-study="{html.escape(run.study or LOOSE)}" data-status="{run.status}" '
        f'data-words="{html.escape(words)}"><summary>{summary}</summary><div class="body"><dl>{listed}</dl>'
        f'<div class="row">{curves}</div>{answers}</div></details>\n'
    )


def of_answer(path: Path, pictures: Mapping[Path, bytes]) -> str:
    """The last answer of a diagnostic: its numbers, notes and pictures."""
    answer = Answer.load(path)
    numbers = "".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{small.number(value)}</dd></div>" for key, value in answer.numbers.items()
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in answer.notes)
    if path in pictures:
        data = base64.b64encode(pictures[path]).decode()
        image = f'<img class="picture" alt="{html.escape(answer.name)}, drawn" src="data:image/png;base64,{data}">'
        shown = f'<div class="scroll" tabindex="0">{image}</div>'
    else:
        shown = f'<div class="row">{previews(answer)}</div>' if answer.values else ""
    return (
        f'<section class="answer"><h4>{html.escape(answer.name)} <span class="quiet">step {answer.step:,}</span></h4>'
        f"{shown}<dl>{numbers}</dl>{notes}</section>"
    )


def previews(answer: Answer) -> str:
    """Small pictures of an answer's arrays, first the one that its figure is scaled by."""
    try:
        module, _, name = answer.diagnostic.rpartition(".")
        first = str(getattr(import_module(module), name).draws)
    except (ImportError, AttributeError, ValueError):
        first = ""  # a diagnostic of somebody's own, whose file is not here
    shown: list[str] = []
    for key in sorted(answer.values, key=lambda key: key != first):
        value = np.asarray(answer.values[key])
        bare = key.endswith(("low", "high", "_threshold", "_totals", "_tokens")) or key.startswith("unit_")
        if bare or len(shown) == PREVIEWS or value.dtype.kind not in "fiu":
            continue
        if value.ndim == 2 and min(value.shape) > 1 and max(value.shape) <= 256:
            shown.append(small.pixels(value.astype(float), key))
        elif value.ndim == 1 and 1 < len(value) <= 1024:
            shown.append(small.chart({key: (np.arange(len(value)), value.astype(float))}, key, "place"))
    return "".join(shown)


def _where(run: Run) -> str:
    """Study and labels, such as "wav-cpu, corpus pydoc"."""
    labels = (f"{axis} {label}" for axis, label in run.labels.items())
    return ", ".join([run.study, *labels]) if run.study else run.name


def _shape(run: Run) -> str:
    return f"L{run.shape.n_layer} d{run.shape.d_model}"


def _counts(found: Found, panels: Sequence[Panel]) -> str:
    by_status = Counter(run.status for run in found.runs)
    seeds = {run.seeds for run in found.runs}
    tiles = {
        "runs": len(found.runs),
        **{status: number for status, number in by_status.items()},
        "designs": len({run.strategy for run in found.runs}),
        "shapes": len({_shape(run) for run in found.runs}),
        "seeds": len(seeds),
        "comparisons": len(panels),
        **({"wanted, not there": len(found.missing)} if found.missing else {}),
        **({"left out": len(found.broken)} if found.broken else {}),
    }
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{name}</dt><dd>{n:,}</dd></div>" for name, n in tiles.items())
        + "</dl>"
    )


def _coverage(made: Sequence[Made]) -> str:
    rows = ""
    for key, title in PAPERS.items():
        chips = "".join(
            f'<li class="{one.state}"><a href="#{one.entry.name}" title="{html.escape(one.entry.title)}: {one.state}">'
            f'<span aria-hidden="true">{SIGNS[one.state]}</span> {html.escape(one.entry.number or one.entry.title)}'
            f'<span class="hide">, {one.state}</span></a></li>'
            for one in made if one.entry.paper == key
        )  # fmt: skip
        rows += f'<div class="chips"><b>{html.escape(title.partition(",")[0])}</b><ul>{chips}</ul></div>'
    said = ", ".join(f"{sign} {state}" for state, sign in SIGNS.items())
    return f'{rows}<p class="quiet">{said}</p>'


def _filters(found: Found) -> str:
    def select(name: str, what: str, values: Sequence[str]) -> str:
        options = "".join(f'<option value="{html.escape(value)}">{html.escape(value)}</option>' for value in values)
        return (
            f'<label>{what} <select name="{name}"><option value="">all</option>{options}</select></label>'
            if len(values) > 1 else ""
        )  # fmt: skip

    designs = list(dict.fromkeys(look(run.strategy).name for run in found.runs))
    shapes = sorted({(run.shape.n_layer, run.shape.d_model) for run in found.runs})
    studies = list(dict.fromkeys(run.study or LOOSE for run in found.runs))
    status = list(dict.fromkeys(run.status for run in found.runs))
    return (
        '<form id="filters" hidden>'
        + select("design", "architecture", designs)
        + select("shape", "shape", [f"L{n} d{d}" for n, d in shapes])
        + select("study", "study", studies)
        + select("status", "status", status)
        + '<label>name <input name="words" type="search" autocomplete="off"></label>'
        + '<button type="reset">reset</button><output aria-live="polite"></output></form>'
    )


def _left_out_link(found: Found) -> str:
    return '<a href="#left-out">Left out</a>' if found.broken or found.missing else ""


def _left_out(found: Found) -> str:
    if not found.broken and not found.missing:
        return ""
    parts = ""
    if found.broken:
        rows = "".join(
            f"<tr><td><code>{html.escape(str(one.path))}</code></td><td>{html.escape(one.reason)}</td></tr>"
            for one in found.broken
        )
        parts += (
            '<figure class="table" tabindex="0"><table><caption>Folders and files that were left out</caption>'
            '<thead><tr><th scope="col">path</th><th scope="col">reason</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></figure>"
        )
    if found.missing:
        listed = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in found.missing)
        parts += (
            f"<details><summary>{len(found.missing)} runs that a study wants are not there; the same sweep again makes "
            f'them</summary><ul class="plain">{listed}</ul></details>'
        )
    return f'<section id="left-out"><h2>Left out</h2>{parts}</section>\n'
