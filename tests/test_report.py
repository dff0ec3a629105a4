"""A report of synthetic run folders: every figure and table, gaps, and the page."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import report_toy as toy

from depthlit import residuals
from depthlit.config_files import study_files
from depthlit.report.entry import Entry, Table, entries
from depthlit.report.known import look, published
from depthlit.report.noise import NO_SEED, ONE_SEED, mean
from depthlit.report.tables import as_csv, as_html, as_latex

ENTRIES = entries()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> toy.Report:
    """A report of runs that fill everything."""
    folder = tmp_path_factory.mktemp("full")
    return toy.made_of(toy.everything(folder / "runs"), folder / "report", pictures=0)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> toy.Report:
    """A report of one run without a study, and a broken one beside it."""
    folder = tmp_path_factory.mktemp("single")
    toy.run(folder / "runs" / "one", diagnostics=("CausalScore",))
    (toy.run(folder / "runs" / "<b>bad</b>", diagnostics=()) / "env.json").write_text("{")
    return toy.made_of([folder / "runs"], folder / "report")


# ----------------------------------------------------------------------------------------------- figures and tables


def test_all_figures_and_tables_of_the_papers_have_an_entry() -> None:
    numbers = {paper: [entry.number for entry in ENTRIES if entry.paper == paper] for paper in ("depthbench", "wav")}
    assert sorted(numbers["depthbench"]) == sorted(
        [*(f"Fig. {n}" for n in range(2, 17)), *(f"Table {n}" for n in range(3, 10))]
    )
    assert sorted(numbers["wav"]) == ["Fig. 2", "Fig. 3", "Fig. 4", "Table 1", "Table 2", "Table 3"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_what_fills_it(entry: Entry) -> None:
    assert entry.needs and entry.title
    assert set(entry.studies) <= set(study_files())
    assert import_module(f"depthlit.report.figures.{entry.name}").__doc__


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_made_of_runs_that_fill_it(full: toy.Report, entry: Entry) -> None:
    folder, _, made = full
    one = made[entry.name]
    assert one.piece is not None, one.reason
    assert ("Fig" in entry.number) == bool(one.drawn)
    assert "Fig" in entry.number or one.piece.tables
    for i, drawn in enumerate(one.drawn.values(), 1):
        saved = (folder / "figures" / f"{entry.name}-{i}.svg").read_text()
        assert saved.startswith("<svg") and drawn.startswith("<svg") and drawn.count("<path") > 10
    for i, table in enumerate(one.piece.tables, 1):
        rows = list(csv.reader((folder / "tables" / f"{entry.name}-{i}.csv").open()))
        assert len(rows) == 1 + len(table.rows) > 1
        assert {len(row) for row in rows} == {len(rows[0])}
        assert (folder / "tables" / f"{entry.name}-{i}.tex").read_text().count(r"\\") == len(rows)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_what_is_missing_is_a_labelled_gap(single: toy.Report, entry: Entry) -> None:
    folder, _, made = single
    one = made[entry.name]
    page = (folder / "index.html").read_text()
    article = re.search(rf'<article id="{entry.name}".*?</article>', page, re.S)[0]  # type: ignore[index]
    if one.piece is not None and not one.piece.gaps:
        assert '<div class="gap">' not in article and (one.drawn or one.piece.tables)
        return
    assert '<div class="gap">' in article
    assert one.reason or one.piece
    for study in entry.studies:
        assert f"python tools/sweep.py {study}" in article


def test_gaps_are_where_they_are_expected(single: toy.Report) -> None:
    made = single[2]
    assert {name for name, one in made.items() if one.state == "made"} == {
        "fig14_causal_maps", "own_results", "tab06_parameters"
    }  # fmt: skip
    assert made["fig06_late_pairs"].state == "partly"  # one diagnostic of the two
    assert made["fig02_aspect"].reason == "no finished runs of one design at two shapes of equal size"


def test_results_are_the_means_of_the_last_validations(full: toy.Report) -> None:
    """Recomputed from metrics.csv, without the report's reader."""
    folder, found, made = full
    number = next(i for i, table in enumerate(made["own_results"].piece.tables, 1) if table.title == "rates, lr 0.002")  # type: ignore[union-attr]
    rows = list(csv.DictReader((folder / "tables" / f"own_results-{number}.csv").open()))
    assert {row["design"] for row in rows} == {"Pre-LN", "LNS"}
    for row in rows:
        wanted = {"Pre-LN": "preln", "LNS": "lns"}[row["design"]]
        losses = []
        for path in sorted(found.runs[0].folder.parent.parent.glob(f"rates/{wanted}_0.002_s*/metrics.csv")):
            losses.append([float(line["val/loss"]) for line in csv.DictReader(path.open()) if line["val/loss"]][-1])
        assert len(losses) == 2 == int(row["loss seeds"])
        assert float(row["loss"]) == pytest.approx(np.mean(losses))
        assert float(row["loss +-"]) == pytest.approx(12.7062047 * np.std(losses, ddof=1) / math.sqrt(2))


def test_differences_from_the_baseline_carry_its_sign(full: toy.Report) -> None:
    table = next(t for t in full[2]["wav_fig2_delta"].piece.tables if "text8" in t.title)  # type: ignore[union-attr]
    rows = {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    # losses are 2 + seed / 50, and 1 / L more for WAV: no spread of the paired difference, so nothing to test
    assert rows["WAV", 12]["difference"] == pytest.approx(1 / 12)
    assert rows["WAV", 48]["difference"] == pytest.approx(1 / 48)
    assert rows["WAV", 48]["published"] == pytest.approx(-0.0058)
    assert rows["Pre-LN", 12]["published"] is None


def test_another_baseline_may_be_named(tmp_path: Path) -> None:
    runs = toy.everything(tmp_path / "runs")[-1]
    made = toy.made_of([runs], tmp_path / "report", baseline="PreLN")[2]
    assert "minus Pre-LN's" in made["wav_fig2_delta"].piece.tables[0].title  # type: ignore[union-attr]
    with_none = toy.made_of([runs], tmp_path / "report", baseline="KEEL")[2]
    assert "no runs of KEEL" in with_none["wav_fig2_delta"].reason


def test_published_numbers_stand_beside_runs_of_that_shape(tmp_path: Path) -> None:
    """Only there: losses of other sizes are not comparable."""
    for width, there in ((1216, True), (1248, False)):
        toy.sweep(tmp_path / str(width), [
            ({"shape": str(L)}, {"spec": toy.shape(L, d), "diagnostics": ()}) for L, d in ((16, width), (32, 896))
        ])  # fmt: skip
        made = toy.made_of([tmp_path / str(width)], tmp_path / f"report-{width}")[2]
        (drawn,) = made["fig02_aspect"].drawn.values()
        assert ("Pre-LN (published)" in drawn) and ("HC (published)" in drawn) != there


def test_known_designs_are_those_that_there_are() -> None:
    assert set(published("designs")) <= set(dir(residuals))
    for key in ("loss", "R_causal", "R_perm", "erank", "rate", "parameters"):
        assert set(published("depthbench", key)) <= set(published("designs"))
    looks = [look(name) for name in published("designs")]
    assert max(Counter((one.colour, one.marker, one.dash) for one in looks).values()) == 1
    assert look("Mine").name == "Mine"


def test_published_differences_are_those_of_the_text() -> None:
    losses = published("depthbench", "loss")
    assert losses["PreLN"][32] - losses["PreLN"][16] == pytest.approx(0.023)
    assert losses["FullAttnRes"][32] - losses["FullAttnRes"][16] == pytest.approx(-0.033)
    assert min(losses["BlockAttnRes"], key=losses["BlockAttnRes"].get) == 20
    assert min(losses["MHC"], key=losses["MHC"].get) == 24


def test_tables_in_their_three_forms() -> None:
    table = Table("A & B", ["design", "loss", "L", "p"], [
        ["Pre_LN <x>", mean([2.0, 2.2]), 12_345, 1e-9], ["HC", mean([2.0]), 16, None], ["", mean([]), -1, -0.5],
    ])  # fmt: skip
    rows = list(csv.DictReader(as_csv(table).splitlines()))
    assert rows[0]["loss"] == "2.1" and rows[0]["loss seeds"] == "2" and rows[1]["loss +-"] == ""
    assert float(rows[0]["p"]) == 1e-9
    latex = as_latex(table)
    assert r"Pre\_LN $<$x$>$ & $2.1000 \pm 1.2706$ & $12{,}345$ & $1.0e-09$ \\" in latex.replace(
        "1.0e-09 ", "$1.0e-09$ "
    )
    assert r"\begin{tabular}{lrrr}" in latex and "HC & $2.0000$ & $16$ &  " in latex
    page = as_html(table)
    assert "Pre_LN &lt;x&gt;" in page and "A &amp; B" in page and "2.1000 ± 1.2706" in page and "−0.5000" in page


def test_signs_of_latex_are_escaped() -> None:
    latex = as_latex(Table("t", ["a_b"], [[r"C:\x ~ 2^8 {y} & 5 % # $ <z|w>"]]))
    assert r"a\_b \\" in latex
    assert r"C:\textbackslash{}x \textasciitilde{} 2\textasciicircum{}8 \{y\} \& 5 \% \# \$ $<$z$|$w$>$ \\" in latex


def test_nothing_but_broken_and_unfinished_runs_make_a_page_of_gaps(tmp_path: Path) -> None:
    (toy.run(tmp_path / "broken", diagnostics=()) / "env.json").write_text("{")
    output, found, made = toy.made_of([tmp_path / "broken"], tmp_path / "report")
    assert not found.runs and "env.json is not whole" in (output / "index.html").read_text()
    assert {one.state for one in made.values()} == {"missing", "partly"}
    half = toy.run(tmp_path / "half", steps=5, validated=False, diagnostics=())
    (half / "metrics.csv").write_text("step,train/loss\n1,2.5\n2,nan\n3,")  # the last line is being written
    lost = toy.run(tmp_path / "lost", loss=math.inf)
    output, found, made = toy.made_of([half, lost], tmp_path / "report")
    assert [run.status for run in found.runs] == ["unfinished", "diverged"]
    assert [one.reason for one in found.broken] == [f"same cell and seed as {lost}, which is counted in its place"]
    assert [row[-2] for row in made["own_results"].piece.tables[0].rows] == ["1 of 1 diverged"]  # type: ignore[union-attr]
    assert (output / "index.html").read_text().count('<details class="run"') == 2


def test_seeds_that_were_lost_are_told(tmp_path: Path) -> None:
    """A mean over survivors says so, and a design without any is still in the tables."""
    nan, rates = math.nan, (1e-3, 1e-2)
    losses = {"PreLN": (2.0, 2.1, 2.2), "HC": (1.0, nan, nan), "MoDA": (nan, nan, nan)}
    runs = toy.sweep(tmp_path / "study", [
        ({"design": design, "rate": str(rate)},
         {"strategy": design, "seed": seed, "loss": loss if rate == rates[0] else nan, "model__optimizer__lr": rate,
          "diagnostics": ()})
        for rate in rates for design, own in losses.items() for seed, loss in enumerate(own)
    ])  # fmt: skip
    folder, found, made = toy.made_of([runs], tmp_path / "report")
    tables = made["own_results"].piece.tables  # type: ignore[union-attr]
    assert [table.title for table in tables] == ["study, lr 0.001", "study, lr 0.01"]
    assert [(row[0], row[5], row[7]) for row in tables[0].rows] == [
        ("Pre-LN", 3, ""), ("HC", 1, "2 of 3 diverged"), ("MoDA", 0, "3 of 3 diverged")
    ]  # fmt: skip
    assert [row[7] for row in tables[1].rows] == ["3 of 3 diverged"] * 3
    (table,) = made["own_differences"].piece.tables  # type: ignore[union-attr]
    assert [(row[2], row[3], row[-2], row[4]) for row in table.rows] == [
        ("Pre-LN", "HC", ONE_SEED, "HC: 2 of 3 diverged"),
        ("Pre-LN", "MoDA", NO_SEED, "MoDA: 3 of 3 diverged"),
        ("HC", "MoDA", NO_SEED, "HC: 2 of 3 diverged; MoDA: 3 of 3 diverged"),
    ]
    assert not found.broken and "2 of 3 diverged" in (folder / "index.html").read_text()


def test_runs_that_measure_speed_need_no_validation(tmp_path: Path) -> None:
    runs = toy.aspect(tmp_path / "speed", seeds=(0,), designs=("PreLN", "HC"), validated=False, diagnostics=())
    made = toy.made_of([runs], tmp_path / "report")[2]
    assert "training (thousand tokens per second)" in made["fig11_cost"].piece.tables[0].columns  # type: ignore[union-attr]
    assert made["fig02_aspect"].piece is made["own_results"].piece is None


def test_an_answer_of_another_version_costs_its_own_figures_only(tmp_path: Path) -> None:
    run = toy.run(tmp_path / "run", diagnostics=("CausalScore", "LogitLens", "PathWeights"))
    path = run / "analysis/step_0000040/LogitLens.npz"
    np.savez(path, other=np.zeros(3))
    made = toy.made_of([run], tmp_path / "report", pictures=0)[2]
    assert made["fig08_pruning_lens"].reason == "it could not be made: KeyError: 'kl'"
    assert made["fig14_causal_maps"].state == made["fig07_paths"].state == "made"


def test_runs_without_a_study_keep_their_maps_when_they_differ_in_learning_rate(tmp_path: Path) -> None:
    runs = [toy.run(tmp_path / f"{rate}", diagnostics=("CausalScore",), model__optimizer__lr=rate) for rate in (1, 2)]
    made = toy.made_of(runs, tmp_path / "report")[2]
    assert len(made["fig14_causal_maps"].piece.figures) == 2  # type: ignore[union-attr]


def test_runs_that_differ_in_something_else_are_no_sweep_of_the_learning_rate(tmp_path: Path) -> None:
    settings = [(0.1, 64), (0.2, 128), (0.3, 256), (0.3, 128)]
    runs = [
        toy.run(tmp_path / f"{rate}_{size}", diagnostics=(), model__optimizer__lr=rate, data__block_size=size)
        for rate, size in settings
    ]
    made = toy.made_of(runs, tmp_path / "report")[2]
    (table,) = made["tab04_rates"].piece.tables  # type: ignore[union-attr]
    assert [row[0] for row in table.rows] == ["runs without a study, block_size 128"]
    assert sorted([float(table.rows[0][3].split()[0]), float(table.rows[0][5])]) == [0.2, 0.3]


def test_parameters_are_those_that_the_run_counted(tmp_path: Path) -> None:
    run = toy.run(tmp_path / "run", diagnostics=())
    facts = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps(facts | {"parameters": 4321}))
    assert [one.parameters for one in toy.made_of([run], tmp_path / "report")[1].runs] == [4321]


# ----------------------------------------------------------------------------------------------- the page


class Checked(HTMLParser):
    """Notes ids, references and unbalanced elements."""

    VOID = ("meta", "img", "input", "br", "hr", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href", "background"):
                self.references.append(value or "")
            if tag == "img" and not dict(attrs).get("alt"):
                self.wrong.append("img without alt")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("which", ["full", "single"])
def test_the_page_is_sound_and_refers_to_nothing_outside(which: str, request: pytest.FixtureRequest) -> None:
    text = (request.getfixturevalue(which)[0] / "index.html").read_text()
    page = Checked()
    page.feed(text)
    assert not page.wrong and not page.open
    assert [name for name, number in page.ids.items() if number > 1] == []
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in page.references)
    inside = {reference[1:] for reference in page.references if reference.startswith("#")}
    assert inside <= set(page.ids)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_what_was_made_comes_before_gaps(single: toy.Report) -> None:
    folder, _, made = single
    page = (folder / "index.html").read_text()
    assert page.index('id="own"') < page.index('id="depthbench"') < page.index('id="wav"')
    states = [
        made[name].state for name in re.findall(r'<article id="(\w+)"', page) if made[name].entry.paper == "depthbench"
    ]
    assert states == sorted(states, key=lambda state: state == "missing") and len(set(states)) > 1


def test_each_run_and_what_was_left_out_is_on_the_page(single: toy.Report, full: toy.Report) -> None:
    folder, found, _ = single
    page = (folder / "index.html").read_text()
    assert len(found.runs) == len(found.broken) == 1
    assert "&lt;b&gt;bad&lt;/b&gt;" in page and "<b>bad</b>" not in page
    assert "env.json is not whole" in page
    page = (full[0] / "index.html").read_text()
    assert page.count('<details class="run"') == len(full[1].runs)
    assert 'data-design="Block AttnRes" data-shape="L48 d32"' in page


def test_curves_and_answers_of_a_run_are_shown(full: toy.Report) -> None:
    page = (full[0] / "index.html").read_text()
    run = re.search(r'<details class="run" id="run-hc_l8_s1".*?</details>', page, re.S)[0]  # type: ignore[index]
    assert 'class="spark"' in run and "train/loss" in run and "optim/grad_norm" in run
    for name in toy.answers("HC", toy.shape(8, 46), 1):
        assert f"<h4>{name}" in run
    assert run.count('class="pixels"') >= 5


def test_full_figures_of_diagnostics_are_drawn_by_their_callbacks(tmp_path: Path) -> None:
    run = toy.run(tmp_path / "run", "HC", diagnostics=("CausalScore", "LogitLens", "CostMeter"))
    for path in run.glob("analysis/*/*.json"):  # named as the callbacks are
        module = re.sub(r"(?<!^)(?=[A-Z])", "_", path.stem).lower()
        path.write_text(path.read_text().replace(f"callbacks.{path.stem}", f"callbacks.{module}.{path.stem}"))
    (run / "analysis/step_0000040/LogitLens.png").write_bytes(b"kept")
    page = (toy.made_of([run], tmp_path / "report")[0] / "index.html").read_text()
    assert page.count('class="picture"') == 2
    assert "base64,a2VwdA==" in page  # the saved one, as it is
    page = (toy.made_of([run], tmp_path / "report", pictures=2)[0] / "index.html").read_text()
    assert 'class="picture"' not in page and 'class="pixels"' in page
