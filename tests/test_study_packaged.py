"""The studies that come with the package: they parse, their models are built, each has a twin for a CPU."""

from __future__ import annotations

import pytest

from depthlit.config_files import study_files
from depthlit.study import experiment, planned
from depthlit.study.experiment import Study

STUDIES = study_files()


def covering(cells: tuple[experiment.Cell, ...]) -> list[experiment.Cell]:
    """A few cells in which every label occurs."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for cell in cells:
        if not set(cell.labels.items()) <= seen:
            chosen.append(cell)
            seen |= set(cell.labels.items())
    return chosen


def builds(cells: list[experiment.Cell], made: Study) -> None:
    """The command line takes these cells, and their models are built."""
    for run in planned.plan(cells, made.hours):
        assert run.parameters > 1e5 and run.block_size <= run.shape.max_seq_len
        assert run.steps is not None or made.hours is not None


@pytest.mark.parametrize("name", STUDIES)
def test_a_packaged_study_parses_and_its_models_are_built(name: str) -> None:
    made = experiment.read(STUDIES[name])
    builds(covering(made.cells), made)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_of_a_packaged_study_is_built(name: str) -> None:
    made = experiment.read(STUDIES[name])
    builds(list(made.cells), made)


@pytest.mark.parametrize("name", STUDIES)
def test_a_packaged_study_opens_with_what_it_is(name: str) -> None:
    lines = [line for line in STUDIES[name].read_text().splitlines() if line.startswith("#")]
    head = "\n".join(lines)
    assert STUDIES[name].read_text().startswith("# ") and "@" not in head
    assert f"python tools/sweep.py {name}" in head
    assert "\n# Time: " in head and "\n# Expect: " in head and (" hour" in head or " minute" in head)


def test_every_study_has_a_twin_for_a_cpu() -> None:
    large = {name for name in STUDIES if not name.endswith("-cpu")}
    assert large == {name.removesuffix("-cpu") for name in STUDIES if name.endswith("-cpu")} and len(large) >= 13
    for name in large:
        twin, own = (experiment.read(STUDIES[n]) for n in (f"{name}-cpu", name))
        assert (
            twin.title
            and own.title
            and {"configs: [quickstart]"} <= set(STUDIES[f"{name}-cpu"].read_text().splitlines())
        )


def test_the_main_study_has_the_papers_ten_designs_and_seven_shapes() -> None:
    made = experiment.read(STUDIES["depthbench-400m"])
    plans = {(run.cell.labels["design"], run.cell.labels["shape"]): run for run in planned.plan(covering(made.cells))}
    assert len(made.axes["design"]) == 10 and len(made.axes["shape"]) == 7 and len(made.cells) == 10 * 5 + 4 * 2
    run = plans["preln", "400m-L16"]
    assert run.steps == 7600 and run.tokens == 7600 * 512 * 2048
    assert run.settings["trainer.devices"] == 8 and "model.optimizer.lr" not in run.settings
    rates = {design: run.strategy.learning_rate(run.shape) for (design, _), run in plans.items()}
    assert {rates[design] for design in rates if design not in ("lns", "deepnorm")} == {2e-3}
    assert (rates["lns"], rates["deepnorm"]) == (1e-2, 1e-3)
