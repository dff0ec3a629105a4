"""Reading run folders: what is whole, what is broken, and what may be compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import report_toy as toy

from depthlit.report.cells import left_out, panels
from depthlit.report.found import LOOSE, Run, find


def damage(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def without_seeds(folder: Path) -> None:
    facts = json.loads((folder / "env.json").read_text())
    del facts["seeds"]
    (folder / "env.json").write_text(json.dumps(facts))


def unknown_shape(folder: Path) -> None:
    facts = json.loads((folder / "env.json").read_text())
    facts["model"]["shape"]["n_eyes"] = 3
    (folder / "env.json").write_text(json.dumps(facts))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated env.json": (damage("env.json", '{"seeds": {"mo'), "env.json is not whole"),
    "a list for env.json": (damage("env.json", "[]"), "holds no mapping"),
    "no env.json": (lambda folder: (folder / "env.json").unlink(), "env.json is missing"),
    "no metrics.csv": (lambda folder: (folder / "metrics.csv").unlink(), "metrics.csv is missing"),
    "no config.yaml": (lambda folder: (folder / "config.yaml").unlink(), "config.yaml is missing"),
    "config.yaml of something else": (damage("config.yaml", "a: [1,"), "config.yaml is not whole"),
    "config.yaml with code": (damage("config.yaml", "a: !!python/name:os.system"), "python"),
    "an empty config.yaml": (damage("config.yaml", ""), "config.yaml holds no mapping"),
    "env.json of an old version": (without_seeds, "does not name 'seeds'"),
    "env.json of a later version": (unknown_shape, "n_eyes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_listed_and_the_others_are_read(tmp_path: Path, what: str) -> None:
    toy.run(tmp_path / "good", diagnostics=())
    bad = toy.run(tmp_path / "bad", diagnostics=())
    spoil, reason = BROKEN[what]
    spoil(bad)
    found = find([tmp_path])
    assert [run.name for run in found.runs] == ["good"]
    assert [one.path.name for one in found.broken] == ["bad"]
    assert reason in found.broken[0].reason
    assert "\n" not in found.broken[0].reason


def later(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 99}))


def pickled(path: Path) -> None:
    np.savez(path.with_suffix(".npz"), score=np.array([{"not": "a number"}], dtype=object))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:40]),
        lambda path: path.write_text("{}"),
        lambda path: path.with_suffix(".npz").write_bytes(path.with_suffix(".npz").read_bytes()[:90]),
        lambda path: path.with_suffix(".npz").write_bytes(b""),
        lambda path: path.with_suffix(".npz").unlink(),
        later,
        pickled,
    ],
    ids=["truncated", "other JSON", "torn arrays", "empty arrays", "no arrays", "later version", "pickles"],
)
def test_a_broken_answer_is_listed_and_its_run_is_read(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = toy.run(tmp_path / "r", diagnostics=("CausalScore", "LogitLens")) / "analysis/step_0000040/CausalScore.json"
    spoil(path)
    found = find([tmp_path])
    assert [one.path for one in found.broken] == [path]
    assert found.broken[0].reason
    assert set(found.runs[0].answers) == {"LogitLens"}


def test_answers_of_a_stretch_given_up_are_left_out(tmp_path: Path) -> None:
    """A run went on from an earlier checkpoint, with diagnostics asked at another pace."""
    run = toy.run(tmp_path / "r", steps=20, diagnostics=("CausalScore", "LogitLens", "PathWeights"))
    analysis = run / "analysis"
    shutil.copytree(analysis / "step_0000020", analysis / "step_0000040")
    (analysis / "step_0000020").rename(analysis / "step_0000009")
    shutil.copytree(analysis / "step_0000009", analysis / "step_0000020")
    (analysis / "step_0000020" / "LogitLens.json").unlink()
    for step in (9, 20):
        (analysis / f"step_{step:07d}" / "PathWeights.json").unlink()
    found = find([tmp_path])
    assert {name: path.parent.name for name, path in found.runs[0].answers.items()} == {
        "CausalScore": "step_0000020", "LogitLens": "step_0000009"
    }  # fmt: skip
    assert {one.path.parent.name for one in found.broken} == {"step_0000040"} and len(found.broken) == 3
    assert found.broken[0].reason.startswith("of step 40, behind the last step of its run, 20")


def test_a_study_names_its_runs_and_what_is_missing(tmp_path: Path) -> None:
    folder = toy.aspect(tmp_path / "study", seeds=(0,), designs=("PreLN",), diagnostics=())
    shutil.rmtree(folder / "preln_l4_s0")
    toy.run(folder / "left_over", diagnostics=())
    found = find([tmp_path])
    assert [(run.name, run.study, run.labels) for run in found.runs] == [
        ("preln_l8_s0", "study", {"design": "PreLN", "shape": "L8"})
    ]
    assert found.missing == ["study: preln_l4_s0"]
    assert [one.path.name for one in found.broken] == ["left_over"]


def test_runs_of_a_broken_study_are_loose(tmp_path: Path) -> None:
    folder = toy.aspect(tmp_path / "study", seeds=(0,), designs=("PreLN",), diagnostics=())
    (folder / "study.json").write_text('{"cells": [')
    found = find([tmp_path])
    assert {run.study for run in found.runs} == {""} and len(found.runs) == 2
    assert [one.path.name for one in found.broken] == ["study.json"]


def test_a_run_named_twice_is_one(tmp_path: Path) -> None:
    folder = toy.aspect(tmp_path / "study", seeds=(0,), designs=("PreLN",), diagnostics=())
    found = find([folder / "preln_l4_s0", folder, tmp_path])
    assert sorted(run.name for run in found.runs) == ["preln_l4_s0", "preln_l8_s0"]
    assert {run.study for run in found.runs} == {"study"}


def test_links_that_go_round_are_followed_once(tmp_path: Path) -> None:
    toy.run(tmp_path / "runs" / "a", diagnostics=())
    (tmp_path / "runs" / "round").symlink_to(tmp_path / "runs")
    assert [run.name for run in find([tmp_path]).runs] == ["a"]


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folders in"):
        find([tmp_path])
    with pytest.raises(ValueError, match="is no folder"):
        find([tmp_path / "nowhere"])


def read(folder: Path) -> list[Run]:
    return find([folder]).runs


def test_only_finished_runs_are_averaged(tmp_path: Path) -> None:
    toy.run(tmp_path / "a", seed=0, loss=2.0, diagnostics=())
    toy.run(tmp_path / "b", seed=1, loss=3.0, diagnostics=())
    toy.run(tmp_path / "half", seed=2, loss=9.0, steps=20, diagnostics=())
    toy.run(tmp_path / "lost", seed=3, loss=float("nan"), diagnostics=())
    runs = read(tmp_path)
    assert {run.name: run.status for run in runs} == {
        "a": "finished", "b": "finished", "half": "unfinished", "lost": "diverged"
    }  # fmt: skip
    (panel,) = panels(runs)
    (cell,) = panel.cells
    assert cell.mean().value == 2.5 and cell.mean().n == 2


def test_runs_of_one_initialisation_and_several_orders_of_data_are_seeds(tmp_path: Path) -> None:
    for order in (0, 1, 10, 2):
        toy.run(tmp_path / f"pre{order}", "PreLN", data_seed=order, loss=2.0 + order, diagnostics=())
        toy.run(tmp_path / f"hc{order}", "HC", data_seed=order, loss=3.0 + order + order**2 / 100, diagnostics=())
    (panel,) = panels(read(tmp_path))
    second, first = panel.cells  # HC, Pre-LN
    assert first.mean().n == second.mean().n == 4
    assert first.mean().value == pytest.approx(5.25) and second.mean().value == pytest.approx(6.5125)
    assert first.minus(second).test == "paired t, 4 seeds"
    assert not left_out([panel])


def test_a_seed_of_a_cell_is_counted_once(tmp_path: Path) -> None:
    for place, loss in (("a", 2.0), ("b", 4.0)):
        toy.sweep(tmp_path / place / "study", [
            ({"design": "PreLN"}, {"seed": seed, "loss": loss, "diagnostics": ()}) for seed in (0, 1)
        ])  # fmt: skip
    (panel,) = found = panels(read(tmp_path))
    (cell,) = panel.cells
    assert cell.mean().n == 2 and cell.mean().value == 2.0
    assert [(one.path, one.reason) for one in left_out(found)] == [
        (
            tmp_path / "b/study" / name,
            f"same cell and seed as {tmp_path / 'a/study' / name}, which is counted in its place",
        )
        for name in ("preln_s0", "preln_s1")
    ]


def test_what_counts_as_finished(tmp_path: Path) -> None:
    toy.run(tmp_path / "unvalidated", validated=False, diagnostics=())
    toy.run(tmp_path / "unvalidated-half", validated=False, steps=20, diagnostics=())
    toy.run(tmp_path / "budget", planned=None, diagnostics=())
    saved = toy.run(tmp_path / "saved", steps=20, diagnostics=())  # logged every 20 steps only
    (saved / "checkpoints" / "step_0000040.ckpt").mkdir(parents=True)
    swept = toy.run(tmp_path / "swept", steps=20, planned=25, diagnostics=())
    (swept / "sweep.json").write_text('{"finished": true, "attempts": [], "error": ""}')
    failed = toy.run(tmp_path / "failed", steps=20, diagnostics=())
    (failed / "sweep.json").write_text('{"finished": false, "attempts": [], "error": "exit code 1: out of memory"}')
    assert {run.name: run.status for run in read(tmp_path)} == {
        "unvalidated": "finished", "unvalidated-half": "unfinished", "budget": "finished", "saved": "finished",
        "swept": "finished", "failed": "failed",
    }  # fmt: skip


def test_a_setting_that_varies_by_design_alone_is_no_condition(tmp_path: Path) -> None:
    toy.sweep(tmp_path / "study", [
        ({"design": d, "rate": str(lr)}, {"strategy": d, "model__optimizer__lr": lr, "diagnostics": ()})
        for d, lr in (("PreLN", 1e-3), ("HC", 2e-3))
    ])  # fmt: skip
    (panel,) = panels(read(tmp_path))
    assert panel.keys == () and set(panel.designs) == {"Pre-LN", "HC"}


def test_a_swept_setting_separates_panels(tmp_path: Path) -> None:
    toy.sweep(tmp_path / "study", [
        ({"design": d, "data": data}, {"strategy": d, "data__path": data, "diagnostics": ()})
        for d in ("PreLN", "HC") for data in ("data/one", "data/two")
    ])  # fmt: skip
    assert [panel.condition for panel in panels(read(tmp_path))] == ["path one", "path two"]


@pytest.mark.parametrize("study", [True, False])
def test_runs_on_other_data_under_one_path_are_no_seeds(tmp_path: Path, study: bool) -> None:
    cells = [
        ({"design": design}, {"strategy": design, "seed": seed, "data": data, "diagnostics": ()})
        for design in ("PreLN", "HC") for seed, data in ((0, "aa"), (1, "aa"), (2, "bb"))
    ]  # fmt: skip
    folder = toy.sweep(tmp_path / "study", cells)
    if not study:
        (folder / "study.json").unlink()
    found = panels(read(tmp_path))
    assert [panel.condition for panel in found] == ["data of fingerprint aa", "data of fingerprint bb"]
    assert [[cell.mean().n for cell in panel.cells] for panel in found] == [[2, 2], [1, 1]]


def test_data_that_follow_from_their_path_need_no_fingerprint(tmp_path: Path) -> None:
    toy.sweep(tmp_path / "study", [
        ({"data": path}, {"data__path": path, "data": path[-3:], "diagnostics": ()})
        for path in ("data/one", "data/two")
    ])  # fmt: skip
    assert [panel.condition for panel in panels(read(tmp_path))] == ["path one", "path two"]


def test_loose_runs_are_compared_only_where_all_settings_agree(tmp_path: Path) -> None:
    toy.run(tmp_path / "a", "PreLN", diagnostics=())
    toy.run(tmp_path / "b", "HC", diagnostics=())
    toy.run(tmp_path / "c", "HC", diagnostics=(), model__optimizer__lr=1e-2)
    found = panels(read(tmp_path))
    assert [(panel.study, sorted(panel.designs)) for panel in found] == [(LOOSE, ["HC", "Pre-LN"]), (LOOSE, ["HC"])]


def test_an_option_that_only_some_runs_know_is_no_condition(tmp_path: Path) -> None:
    toy.run(tmp_path / "old", seed=0, diagnostics=())
    toy.run(tmp_path / "new", seed=1, diagnostics=(), trainer__novel=True)
    (panel,) = panels(read(tmp_path))
    assert panel.cells[0].mean().n == 2


def test_options_in_which_a_class_differs_are_part_of_its_name(tmp_path: Path) -> None:
    for length in (2, 4):
        toy.run(tmp_path / str(length), "BlockAttnRes", options={"block_size": length, "preset": "x"}, diagnostics=())
    (panel,) = panels(read(tmp_path))
    assert set(panel.designs) == {"Block AttnRes block_size=2", "Block AttnRes block_size=4"}


def test_what_shapes_share_is_found_out(tmp_path: Path) -> None:
    toy.everything(tmp_path)
    held = {panel.study: panel.held for panel in panels(read(tmp_path))}
    assert "total parameters" in held["aspect"]
    assert "backbone parameters" in held["backbone"]
    assert held["scale"] == held["norms"] == ()
    assert held["depths"] == ("width",)
