"""Study files: what cells they come to, what runs are called, what is said about them before any runs."""

from __future__ import annotations

import random
import runpy
import shlex
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlit import cost, residuals
from depthlit.loggers import METRICS
from depthlit.module import LanguageModel
from depthlit.optim import Budget, Schedule
from depthlit.shape import ShapeSpec
from depthlit.study import experiment, planned, record, results
from depthlit.study.experiment import Study, from_mapping

ROOT = Path(__file__).resolve().parents[1]
main = runpy.run_path(str(ROOT / "tools" / "sweep.py"))["main"]

BASE = """\
trainer: {accelerator: cpu, max_steps: 4}
model:
  shape: {n_layer: 2, d_model: 32, n_head: 4, vocab_size: 64, max_seq_len: 32}
  residual: PreLN
data: {path: nowhere, block_size: 32, batch_size: 2}
"""
AXES = {
    "design": {"plain": {"model.residual": "PreLN"}, "streams": {"model.residual": "HC"}},
    "rate": {"model.optimizer.lr": [0.001, 0.002, 0.004]},
    "depth": {2: {"model.shape.n_layer": 2}, 3: {"model.shape.n_layer": 3, "trainer.max_steps": 6}},
}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with a small base config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)


def study(**content: Any) -> Study:
    """A study of this content over the base."""
    return from_mapping({"configs": ["base.yaml"], **content}, Path("made.yaml"))


def names(made: Study) -> list[str]:
    """Of the runs of its cells."""
    return [run.name for run in planned.plan(made.cells)]


def spelt_out(made: Study) -> dict[tuple[Any, ...], list[str]]:
    """Labels and seed -> arguments, of which the name is a function."""
    return {(*sorted(cell.labels.items()), cell.seed): cell.arguments for cell in made.cells}


# What cells a file comes to


def test_the_three_spellings_of_an_axis() -> None:
    made = study(axes={**AXES, "config": {"configs": ["residual/preln", "residual/hc"]}})
    assert {name: list(labels) for name, labels in made.axes.items()} == {
        "design": ["plain", "streams"],
        "rate": ["0.001", "0.002", "0.004"],
        "depth": ["2", "3"],
        "config": ["preln", "hc"],
    }
    assert len(made.cells) == 2 * 3 * 2 * 2
    cell = made.cells[-1]
    assert cell.arguments == [
        "--config", "base.yaml", "--config", "residual/hc", "--model.optimizer.lr=0.004", "--model.residual=HC",
        "--model.shape.n_layer=3", "--trainer.max_steps=6",
    ]  # fmt: skip


def test_every_combination_or_the_rows() -> None:
    cells = [(cell.labels["design"], cell.labels["rate"], cell.seed) for cell in study(axes=AXES, seeds=[0, 1]).cells]
    assert len(cells) == 24 and len(set(cells)) == 12  # twelve at each depth
    made = study(
        axes=AXES,
        seeds=[0],
        rows=[{"depth": 2, "rate": 0.001}, {"depth": [2, 3], "design": "streams", "rate": "0.001", "seeds": [1, 2]}],
    )
    found = {(cell.labels["design"], cell.labels["depth"], cell.seed) for cell in made.cells}
    assert found == {("plain", "2", 0), ("streams", "2", 0), *product(["streams"], "23", [1, 2])}
    assert len(study(axes=AXES, rows=[{"depth": 2}, {"depth": 2}]).cells) == 6  # a cell named twice is one


def test_later_settings_win() -> None:
    """Base, axes, seed, overrides: told by what the command line makes of it."""
    made = study(
        set={"trainer.max_steps": 5, "model.residual": "HC", "model.residual.streams": 2},
        axes=AXES,
        rows=[{"depth": [2, 3], "rate": 0.001, "design": "streams"}],
        seeds=[7],
        overrides=[{"where": {"depth": 3}, "set": {"data.seed": 9, "model.residual.streams": 3}}],
    )
    two, three = (run.settings for run in planned.plan(made.cells))
    assert (two["trainer.max_steps"], three["trainer.max_steps"]) == (5, 6)
    assert (two["data.seed"], two["model.init_seed"], two["seed_everything"]) == (7, 7, 7)
    assert (three["data.seed"], three["model.init_seed"]) == (9, 7)
    assert three["model.residual"]["init_args"] == {"streams": 3}


def test_a_key_below_another_comes_behind_it_whatever_the_axes_are_called() -> None:
    made = study(axes={"z": {"model.residual": ["MHC"]}, "a": {"model.residual.mixing": ["free", "softmax"]}})
    assert [run.strategy.mixing for run in planned.plan(made.cells)] == ["free", "softmax"]


@st.composite
def axes_of(draw: st.DrawFn) -> dict[str, Any]:
    """Axes over keys of their own."""
    keys = ["model.optimizer.lr", "data.batch_size", "model.shape.n_layer"]
    found: dict[str, Any] = {}
    for key in keys[: draw(st.integers(1, 3))]:
        values = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
        spelling = draw(st.booleans())
        name = key.rpartition(".")[2]
        found[name] = {key: values} if spelling else {f"at {value}": {key: value} for value in values}
    return found


@settings(max_examples=60, deadline=None)
@given(axes=axes_of(), seed=st.integers(0, 99))
def test_the_order_of_axes_and_labels_is_of_no_consequence(axes: dict[str, Any], seed: int) -> None:
    def shuffled(tree: dict[str, Any]) -> dict[str, Any]:
        items = list(tree.items())
        random.Random(seed).shuffle(items)
        return dict(items)

    before = study(axes=axes, seeds=[0, 1])
    after = study(axes=shuffled({name: shuffled(values) for name, values in axes.items()}), seeds=[1, 0])
    assert spelt_out(before) == spelt_out(after)


@settings(max_examples=60, deadline=None)
@given(axes=axes_of(), more=st.integers(10, 99), data=st.data())
def test_a_new_row_a_new_label_or_a_new_seed_leaves_the_others_as_they_are(
    axes: dict[str, Any], more: int, data: st.DataObject
) -> None:
    before = spelt_out(study(axes=axes, seeds=[0]))
    name = data.draw(st.sampled_from(sorted(axes)))
    key, values = next(iter(axes[name].items()))
    grown = {key: [*values, more]} if isinstance(values, list) else {**axes[name], "more": {"data.seed": more}}
    after = spelt_out(study(axes={**axes, name: grown}, seeds=[0, 1]))
    assert before.items() <= after.items() and len(after) > len(before)


MISTAKES = [
    ({"axis": {}}, "a study has the key 'axis', which there is not; did you mean axes?"),
    ({"axes": {"depth": {}}}, "axis depth has no values"),
    ({"axes": {"depth": [1, 2]}}, "axis depth must be a mapping, not"),
    ({"axes": {"rate": {"model.optimizer.lr": [1, 1]}}}, "axis rate has 1 twice"),
    ({"axes": {"seed": {"data.seed": [1]}}}, "an axis cannot be called seed"),
    ({"axes": {"a": {"data.seed": [1]}, "b": {"data.seed": [2]}}}, "axes a and b both set data.seed"),
    ({"axes": AXES, "rows": [{"depths": 2}]}, "a row has the axis 'depths', which there is not; did you mean depth or"),
    ({"axes": AXES, "rows": [{"design": "plane"}]}, "'plane', which axis design does not have; did you mean plain?"),
    ({"axes": AXES, "overrides": [{"where": {"depth": 4}}]}, "an override names '4', which axis depth does not have"),
    ({"axes": AXES, "overrides": [{"when": {}}]}, "an override has the key 'when'"),
    ({"seeds": ["a"]}, "seeds are"),
    ({"seeds": -1}, "seeds are"),
    ({"flops_per_second": "fast"}, "flops_per_second is 'fast'"),
    ({"hours": {"each": 0, "measured": "runs"}}, "hours needs `each`, a positive number"),
]


@pytest.mark.parametrize(("content", "complaint"), MISTAKES)
def test_a_mistake_is_named_with_its_file(content: dict[str, Any], complaint: str) -> None:
    Path("wrong.yaml").write_text(yaml.safe_dump({"configs": ["base.yaml"], **content}))
    with pytest.raises(ValueError) as told:
        experiment.read(Path("wrong.yaml"))
    assert complaint in str(told.value) and str(told.value).startswith("wrong.yaml: ")


def test_a_key_that_stands_twice_is_not_dropped_without_a_word() -> None:
    Path("twice.yaml").write_text("axes:\n  depth:\n    2: {data.seed: 1}\n    2: {data.seed: 2}\n")
    with pytest.raises(ValueError, match=r"twice\.yaml:4: .*2 stands here twice"):
        experiment.read(Path("twice.yaml"))


def test_what_the_command_line_would_refuse_is_refused_with_the_cell() -> None:
    with pytest.raises(ValueError, match=r"cell rate=-1: optimizer\.lr is -1"):
        names(study(axes={"rate": {"model.optimizer.lr": [-1]}}))
    with pytest.raises(ValueError, match=r"cell width=30: shape: d_model 30 is not divisible"):
        names(study(axes={"width": {"model.shape.d_model": [30]}}))
    with pytest.raises(ValueError, match=r"there is no key trainer\.max_step; did you mean trainer\.max_steps"):
        names(study(set={"trainer.max_step": 3}))
    with pytest.raises(ValueError, match="nothing says how long"):
        names(study(set={"trainer.max_steps": -1}))
    with pytest.raises(ValueError, match="no packaged config of this name"):
        names(from_mapping({"configs": ["nothing"]}, Path("made.yaml")))


# What runs are called


def test_the_name_is_a_function_of_the_settings_wherever_they_stand() -> None:
    Path("deep.yaml").write_text("model: {shape: {n_layer: 3}, optimizer: {lr: 2.0e-3}}\n")
    spellings = [
        study(set={"model.shape.n_layer": 3, "model.optimizer.lr": "2e-3"}, seeds=[1]),
        study(axes={"x": {"deep": {"configs": "deep.yaml"}}}, seeds=[1]),
        study(axes={"rate": {"model.optimizer.lr": [0.002]}, "depth": {"model.shape.n_layer": [3]}}, seeds=[1]),
        study(
            set={"model.shape.n_layer": 9, "model.optimizer.lr": 0.002, "trainer.default_root_dir": "elsewhere",
                 "model.init_seed": 1, "seed_everything": 1, "data.seed": 1, "model.optimizer.weight_decay": 0.1,
                 "model.residual": "depthlit.residuals.PreLN", "trainer.enable_progress_bar": False},
            overrides=[{"set": {"model.shape.n_layer": 3}}],
        ),
    ]  # fmt: skip
    found = {name for made in spellings for name in names(made)}
    assert found == {"preln_l3_d32_s1_471eb5f2"}  # a change here makes every run of everybody anew


@pytest.mark.parametrize(
    "key, value",
    {
        "model.optimizer.lr": 0.003, "model.optimizer.weight_decay": 0, "data.batch_size": 4, "trainer.max_steps": 5,
        "data.path": "elsewhere", "model.residual": "HC", "trainer.precision": "bf16-pure", "data.seed": 5,
        "trainer.callbacks": ["AngularDistance"],
        "model.optimizer.lr_factors": {"routing": 0.1}, "model.optimizer.betas": [0.9, 0.99],
        "trainer.accumulate_grad_batches": 2, "model.shape.d_ff": 64,
    }.items(),
)  # fmt: skip
def test_another_setting_is_another_name(key: str, value: Any) -> None:
    assert names(study()) != names(study(set={key: value}))


def test_settings_of_classes_count_but_not_their_defaults() -> None:
    """So that a new option does not rename what was run before."""
    callback = {"class_path": "AngularDistance"}
    plain, spelt, other = (
        names(study(set={"trainer.callbacks": [{**callback, "init_args": given}]}))
        for given in ({}, {"every": 1, "fractions": []}, {"every": 2})
    )
    assert plain == spelt != other
    assert names(study(set={"model.residual": "HC"})) == names(
        study(set={"model.residual": "HC", "model.residual.streams": 4, "model.residual.preset": "paper"})
    )


def test_cells_with_the_same_settings_are_one_run() -> None:
    made = study(axes={"a": {"one": {}, "two": {"model.residual": "PreLN"}}})
    plans = planned.plan(made.cells)
    assert len(plans) == 2 and plans[0].name == plans[1].name
    assert "2 cells share 1 runs" in results.dry(made, plans, Path("runs"), record.Rates())


# What is said before any runs


@pytest.mark.parametrize(
    "max_steps, total_steps, budget",
    [
        (7, None, Budget()),
        (7, 9, Budget(tokens=1e5)),
        (-1, 9, Budget()),
        (-1, None, Budget(tokens=12_345)),
        (-1, 50, Budget(tokens_per_parameter=2.5)),
        (-1, None, Budget(flops=3e9)),
        (-1, None, Budget(tokens=1)),
    ],
)
def test_the_length_of_a_run_is_what_the_module_makes_of_it(
    max_steps: int, total_steps: int | None, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {f"model.budget.{name}": value for name, value in vars(budget).items() if value is not None}
    made = study(
        set={"trainer.max_steps": max_steps, "model.schedule.total_steps": total_steps, "trainer.devices": 3,
             "trainer.accumulate_grad_batches": 2, "model.residual": "HC", **keys}
    )  # fmt: skip
    (run,) = planned.plan(made.cells)
    data = SimpleNamespace(batch_size=2, block_size=32)
    trainer = SimpleNamespace(datamodule=data, accumulate_grad_batches=2, world_size=3, max_steps=max_steps)
    monkeypatch.setattr(LanguageModel, "trainer", property(lambda self: trainer))
    model = LanguageModel(run.shape, run.strategy, schedule=Schedule(total_steps=total_steps), budget=budget)
    plan = model.resolve_plan()
    assert run.steps == plan.max_steps and run.tokens == plan.max_steps * (plan.tokens_per_step or 0)


def test_a_dry_run_tells_what_each_run_costs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("made.yaml").write_text(yaml.safe_dump(
        {"configs": ["base.yaml"], "axes": AXES, "rows": [{"rate": 0.001}], "seeds": [0, 1], "flops_per_second": 1e6}
    ))  # fmt: skip
    assert main(["made.yaml", "--dry", "--commands"]) == 0
    printed = capsys.readouterr().out.splitlines()
    head, line = printed[0].split(), next(line.split() for line in printed if line.startswith("hc_l3"))
    said = dict(
        zip(
            [*head[:1], *sorted(AXES), "seed", "params", "steps", "tokens", "PFLOP", "hours", "status"],
            line,
            strict=True,
        )
    )
    shape = ShapeSpec(3, 32, 4, vocab_size=64, max_seq_len=32)
    decoder = cost.on_meta(shape, residuals.HC())
    flops = cost.training_flops(decoder, 32) * 6 * 64
    assert said["design"] == "streams" and said["depth"] == "3" and said["status"] == "missing"
    assert said["params"] == f"{cost.parameters(decoder)['total'] / 1e6:.3f}"
    assert said["steps"] == "6" and said["PFLOP"] == f"{flops / 1e15:.3g}"
    assert said["hours"] == f"{flops / 1e6 / 3600:.3g}"
    summary = next(line for line in printed if line.startswith("all: "))
    assert summary.startswith("all: 8 runs, ") and "hours at 1e+06 FLOP/s per run, as the study states" in printed[-1]
    commands = [shlex.split(line) for line in printed if line.startswith("depthlit fit")]
    assert len(commands) == 8 and all(f"--trainer.default_root_dir=runs/made/{line[0]}" for line in commands)
    assert not Path("runs").exists()


def test_only_some_cells(capsys: pytest.CaptureFixture[str]) -> None:
    Path("made.yaml").write_text(yaml.safe_dump({"configs": ["base.yaml"], "axes": AXES, "seeds": [0, 1]}))
    assert main(["made.yaml", "--dry", "--only", "depth=3", "rate=0.001", "rate=0.004", "seed=1"]) == 0
    assert "all: 4 runs" in capsys.readouterr().out
    for words, complaint in (
        (["--only", "depth"], "'depth' is not of the form AXIS=LABEL"),
        (["--only", "depth=4"], "no cell has depth=4; there are: 2, 3"),
        (["--only", "width=4"], "no cell has width=4"),
        (["--run", "nobody"], "the study has no run nobody"),
        (["--parallel", "0"], "--parallel must be at least 1"),
    ):
        assert main(["made.yaml", "--dry", *words]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["mad.yaml"]) == 2
    assert "mad.yaml: no such file, and no packaged study of this name" in capsys.readouterr().err


# Runs matched by time


def test_runs_matched_by_time_get_the_tokens_of_their_measured_speed() -> None:
    axes = {"depth": {"model.shape.n_layer": [2, 3]}}
    speed = study(axes=axes, set={"trainer.max_steps": 12}, seeds=[0])
    plans = planned.plan(speed.cells)
    results.write_study(speed, plans, Path("speed"))
    for run, rate in zip(plans, (1000.0, 500.0), strict=True):
        place = Path("speed") / run.name
        place.mkdir()
        lines = [f"{i + 1},{x}" for i, x in enumerate((1.0, rate, rate * 1.2, rate * 0.9))]
        (place / METRICS).write_text("\n".join(["step,throughput/tokens_per_sec", *lines]) + "\n")
    matched = study(axes=axes, seeds=[0, 1], hours={"each": 0.5, "measured": "speed"})
    runs = planned.plan(matched.cells, matched.hours)
    assert [run.tokens for run in runs] == [64 * round(tokens / 64) for tokens in (1.8e6, 1.8e6, 9e5, 9e5)]
    assert runs[0].arguments[-2:] == ("--model.budget.tokens=1800000.0", "--trainer.max_steps=-1")
    other = study(axes=axes, set={"data.batch_size": 4}, hours={"each": 0.5, "measured": "speed"})
    runs = planned.plan(other.cells, other.hours)
    assert [run.steps for run in runs] == [None, None]
    assert "2 of unknown length" in results.dry(other, runs, Path("runs"), record.Rates(1.0))
