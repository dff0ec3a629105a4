"""Sweeps: interrupted at any moment they end with the table of the unbroken one, share work, and retry what fails."""

from __future__ import annotations

import csv
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sweep_toy
import yaml
from command import small_corpus
from rich.console import Console
from sweep_toy import alive, exit_code, forked, until

from depthlit.study import experiment, planned, record, settings
from depthlit.study.claims import claim, holder
from depthlit.study.shown import Shown

TOOL = Path(__file__).resolve().parents[1] / "tools" / "sweep.py"
main = runpy.run_path(str(TOOL))["main"]

BASE = """\
trainer: {accelerator: cpu, max_steps: 6}
model:
  shape: {n_layer: 2, d_model: 32, n_head: 4, vocab_size: 64, max_seq_len: 32}
  residual: PreLN
data: {path: "s3://nowhere/text", block_size: 32, batch_size: 2}
"""


@pytest.fixture(autouse=True)
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory in which `python -m depthlit` is the stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    sweep_toy.install(tmp_path)
    Path("base.yaml").write_text(BASE)
    write_study()
    settings.parser()  # before any fork
    yield
    for pid in begun():  # what a failing test may have left
        if alive(pid):
            os.killpg(pid, signal.SIGKILL)


def write_study(rates: list[float] = [1.0, 2.0, 3.0], **content: Any) -> None:  # noqa: B006 (not changed)
    Path("study.yaml").write_text(
        yaml.safe_dump({"configs": ["base.yaml"], "axes": {"rate": {"model.optimizer.lr": rates}}, **content})
    )


def begun(folder: str = "*") -> list[int]:
    """Ids of the processes of all runs so far."""
    return [int(line) for file in Path().glob(f"{folder}/*/starts") for line in file.read_text().split()]


def table(folder: str) -> str:
    return (Path(folder) / "results.csv").read_text()


def rows(folder: str) -> dict[str, dict[str, str]]:
    """Lines of results.csv by the label of the only axis."""
    return {row["rate"]: row for row in csv.DictReader(StringIO(table(folder)))}


def test_every_run_is_made_once_and_a_new_row_is_all_that_is_made_later(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study.yaml", "--output", "out"]) == 0
    printed = capsys.readouterr().out
    found = rows("out")
    assert [row["status"] for row in found.values()] == ["finished"] * 3
    assert {row["step"] for row in found.values()} == {"6"} and len({row["val/loss"] for row in found.values()}) == 3
    for row in found.values():
        metrics = list(csv.DictReader((Path("out") / row["run"] / "metrics.csv").open()))
        assert row["val/loss"] == metrics[-1]["val/loss"] and row["run"] in printed
        log = (Path("out") / row["run"] / "log.txt").read_text()
        assert log.startswith("# attempt 1, ") and f"--trainer.default_root_dir=out/{row['run']}" in log
    assert len(begun("out")) == 3
    assert main(["study.yaml", "--output", "out"]) == 0
    assert len(begun("out")) == 3
    write_study([1.0, 2.0, 3.0, 4.0])
    assert main(["study.yaml", "--output", "out"]) == 0
    assert len(begun("out")) == 4 and {rate: rows("out")[rate] for rate in found} == found


def test_what_was_finished_in_another_folder_is_not_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study.yaml", "--output", "whole"]) == 0
    assert main(["study.yaml", "--output", "first", "--only", "rate=2.0"]) == 0
    assert main(["study.yaml", "--output", "second", "--known", "first/results.csv"]) == 0
    assert len(begun("second")) == 2 and not (Path("second") / rows("first")["2.0"]["run"]).exists()
    assert table("second") == table("whole")
    Path("other.csv").write_text("a,b\n1,2\n")
    for other in ("other.csv", "nowhere.csv"):
        assert main(["study.yaml", "--output", "third", "--known", other]) == 2
        assert f"{other} is no results.csv" in capsys.readouterr().err


def test_study_json_says_which_run_is_which() -> None:
    write_study(seeds=[0, 3])
    assert main(["study.yaml", "--output", "out", "--only", "rate=2.0"]) == 0
    content = json.loads(Path("out/study.json").read_text())
    assert content["study"] == "study" and content["axes"] == {"rate": ["1.0", "2.0", "3.0"]}
    cells = content["cells"]
    assert [(cell["labels"]["rate"], cell["seed"]) for cell in cells] == [
        (rate, seed) for rate in ("1.0", "2.0", "3.0") for seed in (0, 3)
    ]
    there = {file.parent.name for file in Path("out").glob("*/sweep.json")}
    assert there == {cell["run"] for cell in cells if cell["labels"]["rate"] == "2.0"}
    last = cells[-1]
    assert last["steps"] == 6 and last["tokens"] == 6 * 64 and last["settings"]["model.optimizer.lr"] == 3
    assert last["command"][:2] == ["depthlit", "fit"] and "--model.init_seed=3" in last["command"]
    assert last["parameters"] > 0 and last["flops"] > 0
    assert [row["status"] for row in csv.DictReader(StringIO(table("out")))] == [
        "missing", "missing", "finished", "finished", "missing", "missing",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_five_times_at_random_it_ends_with_the_table_of_the_unbroken_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the sweep, of a run, or of both, at any moment."""
    write_study([1.0, 2.0, 3.0, 4.0], set={"trainer.max_steps": 12})
    assert main(["study.yaml", "--output", "unbroken", "--parallel", "4"]) == 0
    monkeypatch.setenv("TOY_SECONDS", "0.2")  # a run takes longer than any wait below: the first kill hits one
    rng = random.Random(seed)
    for time_ in range(5):
        pid = forked(lambda: main(["study.yaml", "--output", "broken", "--parallel", "2", "--retries", "9"]))
        victims = rng.choice(["sweep", "run", "both"]) if time_ else "both"
        if not time_:
            until(lambda: bool(begun("broken")))
        time.sleep(rng.uniform(0.05, 0.6))
        runs = [pid for pid in begun("broken") if alive(pid)]
        if victims != "sweep":
            for run in runs:
                os.killpg(run, signal.SIGKILL)
        if victims == "run":
            time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    monkeypatch.setenv("TOY_SECONDS", "0")
    assert main(["study.yaml", "--output", "broken", "--parallel", "2"]) == 0
    assert table("broken") == table("unbroken")
    assert len(begun("broken")) > 4


def test_two_sweeps_at_once_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    write_study([float(i) for i in range(1, 7)])
    monkeypatch.setenv("TOY_SECONDS", "0.05")
    pids = [forked(lambda: main(["study.yaml", "--output", "out"])) for _ in range(2)]
    assert [exit_code(pid) for pid in pids] == [0, 0]
    assert [row["status"] for row in rows("out").values()] == ["finished"] * 6
    starts = {file.parent.name: file.read_text().split() for file in Path("out").glob("*/starts")}
    assert all(len(pids) == 1 for pids in starts.values()) and len(starts) == 6
    parents = {json.loads((Path("out/claims") / f"{name}.lock").read_text())["pid"] for name in starts}
    assert parents == set(pids)  # each did some


def test_a_run_whose_sweep_was_killed_is_waited_for_and_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    write_study([1.0])
    monkeypatch.setenv("TOY_SECONDS", "0.5")
    pid = forked(lambda: main(["study.yaml", "--output", "out"]))
    until(lambda: bool(begun("out")))
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)
    (run,) = begun("out")
    assert alive(run)
    assert main(["study.yaml", "--output", "out"]) == 0
    assert begun("out") == [run] and rows("out")["1.0"]["status"] == "finished"


def test_a_run_is_taken_over_when_the_other_sweep_and_the_run_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    write_study([1.0])
    monkeypatch.setenv("TOY_SECONDS", "0.5")
    first, second = (forked(lambda: main(["study.yaml", "--output", "out"])) for _ in range(2))
    until(lambda: any(Path("out").glob("*/checkpoints/last.ckpt")))
    owner = json.loads(next(Path("out/claims").iterdir()).read_text())["pid"]
    other = second if owner == first else first
    os.kill(owner, signal.SIGKILL)
    os.killpg(begun("out")[0], signal.SIGKILL)
    exit_code(owner)
    assert exit_code(other) == 0
    assert len(begun("out")) == 2 and rows("out")["1.0"]["status"] == "finished"


def test_a_failing_run_is_tried_again_and_reported_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Rate 13 always fails; rate 7 dies of a signal once, after its first checkpoint."""
    write_study([13.0, 7.0, 1.0])
    assert main(["study.yaml", "--output", "out", "--retries", "2"]) == 1
    printed = capsys.readouterr().out
    found = rows("out")
    assert {rate: row["status"] for rate, row in found.items()} == {
        "13.0": "failed", "7.0": "finished", "1.0": "finished"
    }  # fmt: skip
    known = {rate: record.load(Path("out") / row["run"]) for rate, row in found.items()}
    assert [len(known[rate].attempts) for rate in ("13.0", "7.0", "1.0")] == [3, 2, 1]
    assert known["13.0"].error == "exit code 1: thirteen is not a learning rate"
    assert known["7.0"].attempts[0].code == -signal.SIGKILL and known["7.0"].attempts[1].from_step == 1
    assert printed.count(" retrying preln") == 3 and "thirteen is not a learning rate" in printed
    assert main(["study.yaml", "--output", "out", "--retries", "0"]) == 1  # a new sitting tries once more
    assert len(record.load(Path("out") / found["13.0"]["run"]).attempts) == 4


def test_attempts_that_get_further_do_not_count_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    write_study([1.0], set={"trainer.max_steps": 8})
    monkeypatch.setenv("TOY_SECONDS", "0.4")
    pid = forked(lambda: main(["study.yaml", "--output", "out", "--retries", "0"]))
    for attempt in range(3):
        until(lambda n=attempt: len(begun("out")) == n + 1)  # type: ignore[misc]
        place = next(Path("out").glob("preln*"))
        step = planned.step_of(place)
        until(lambda p=place, s=step: planned.step_of(p) > s)  # type: ignore[misc]
        os.killpg(begun("out")[-1], signal.SIGKILL)
    assert exit_code(pid) == 0
    assert rows("out")["1.0"]["status"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_cleanly(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process stays, and a run that leaves without an error is not taken for finished."""
    monkeypatch.setenv("TOY_SECONDS", "0.3")
    pid = forked(lambda: main(["study.yaml", "--output", "out", "--parallel", "2"]))
    until(lambda: len(list(Path("out").glob("*/checkpoints/last.ckpt"))) == 2)
    os.kill(pid, number)
    assert exit_code(pid) == 130
    assert not any(alive(run) for run in begun("out"))
    assert sorted(row["status"] for row in rows("out").values()) == ["missing", "unfinished", "unfinished"]
    for place in Path("out").glob("preln*"):
        (attempt,) = record.load(place).attempts
        assert attempt.stopped and attempt.code == 0 and attempt.to_step is not None and attempt.to_step >= 1
    monkeypatch.setenv("TOY_SECONDS", "0.01")
    assert main(["study.yaml", "--output", "out"]) == 0
    assert [row["status"] for row in rows("out").values()] == ["finished"] * 3


def test_a_claim_lasts_as_long_as_its_sweep_or_its_run() -> None:
    held = claim(Path("claims/run.lock"))
    assert held is not None and claim(Path("claims/run.lock")) is None
    assert holder(Path("claims/run.lock")).startswith(f"pid {os.getpid()} on ")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held.fd])
    held.release()
    assert claim(Path("claims/run.lock")) is None
    child.kill()
    child.wait()
    again = claim(Path("claims/run.lock"))
    assert again is not None
    again.release()


def test_damaged_records_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study.yaml", "--output", "out"]) == 0
    before = table("out")
    for place in Path("out").glob("preln*"):
        (place / "sweep.json").write_text('{"finished": tr')
    assert main(["study.yaml", "--output", "out"]) == 0
    assert table("out") == before and len(begun("out")) == 3  # their checkpoints tell that they are finished


def test_an_array_of_slurm_jobs_makes_the_same_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The job file run by bash, with an `srun` that only notes that it was there."""
    write_study([1.0, 2.0])
    assert main(["study.yaml", "--output", "here"]) == 0
    assert main(["study.yaml", "--output", "there", "--slurm", "partition=gpu", "time=10:00", "--parallel", "4"]) == 0
    assert "2 runs; submit them:  sbatch there/array.sbatch" in capsys.readouterr().out
    file = Path("there/array.sbatch")
    text = file.read_text()
    assert "#SBATCH --array=0-1%4" in text and "#SBATCH --partition=gpu" in text and "#SBATCH --time=10:00" in text
    Path("bin").mkdir()
    srun = Path("bin/srun")
    srun.write_text('#!/bin/sh\necho "$@" >> "$SRUN_LOG"\nexec "$@"\n')
    srun.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{srun.parent.absolute()}:{os.environ['PATH']}",
        "SRUN_LOG": str(Path("log").absolute()),
    }
    job = subprocess.run(["bash", str(file)], env={**environment, "SLURM_ARRAY_TASK_ID": "1"}, timeout=240)
    assert job.returncode == 0 and len(begun("there")) == 1 and len(Path("log").read_text().splitlines()) == 1
    assert rows("there")["2.0"] == rows("here")["2.0"] and rows("there")["1.0"]["status"] == "missing"
    assert main(["study.yaml", "--output", "there"]) == 0
    assert table("there") == table("here") and len(begun("there")) == 2
    assert main(["study.yaml", "--output", "there", "--slurm"]) == 0
    assert "all runs are finished" in capsys.readouterr().out
    assert main(["study.yaml", "--output", "new", "--slurm", "array=3"]) == 2
    assert "options are of the form KEY=VALUE; array is set here" in capsys.readouterr().err


def test_a_terminal_shows_runs_at_work_and_the_time_left() -> None:
    made = experiment.read(Path("study.yaml"))
    plans = planned.plan(made.cells)
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    rates = record.Rates(sum(run.flops or 0 for run in plans) / 3600)  # an hour for all
    with Shown(plans, Path("out"), rates, 2, console) as shown:
        shown.event(plans[0].name, "running")
        shown.event(plans[1].name, "failed", "exit code 1: thirteen")
        shown.tick([])
        assert shown.summary([]) == "0 of 3 finished, 1 failed, 1 running; about 20m00s left"
    text = screen.getvalue()
    assert plans[0].name in text and "exit code 1: thirteen" in text and plans[2].name not in text


def test_estimates_are_measured_as_soon_as_a_run_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study.yaml", "--output", "out", "--only", "rate=1.0"]) == 0
    made = experiment.read(Path("study.yaml"))
    plans = planned.plan(made.cells)
    known = record.load(Path("out") / plans[0].name)
    known.attempts[0].seconds = 50.0
    record.save(Path("out") / plans[0].name, known)
    rates = record.Rates(1.0).learn(plans, Path("out"))
    assert rates.measured and rates.of(plans[2]) == pytest.approx((plans[0].flops or 0) / 50)
    capsys.readouterr()
    assert main(["study.yaml", "--output", "out", "--dry"]) == 0
    printed = capsys.readouterr().out
    assert "measured in finished runs" in printed and f"{100 / 3600:.3g} hours" in printed


def test_with_the_real_command_line_an_interrupted_sweep_ends_like_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of six steps; in the second folder sweep and run are killed behind the first checkpoint."""
    corpus, real = small_corpus(tmp_path), tmp_path / "real"
    real.mkdir()
    monkeypatch.chdir(real)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (real / "base.yaml").write_text(
        BASE.replace("max_steps: 6", "max_steps: 6, validate_every: 2, limit_val_batches: 2").replace(
            "s3://nowhere/text", str(corpus)
        )
    )
    Path("study.yaml").write_text(
        yaml.safe_dump(
            {"configs": ["base.yaml"], "axes": {"design": {"model.residual": ["PreLN", "HC"]}}, "seeds": [3]}
        )
    )
    assert main(["study.yaml", "--output", "unbroken"]) == 0
    pid = forked(lambda: main(["study.yaml", "--output", "broken"]))
    until(lambda: any(Path("broken").glob("*/checkpoints/last.ckpt")), timeout=180)
    group = json.loads(next(Path("broken/claims").glob("preln*")).read_text())["run"]
    os.kill(pid, signal.SIGKILL)
    os.killpg(group, signal.SIGKILL)
    exit_code(pid)
    assert main(["study.yaml", "--output", "broken"]) == 0
    assert table("broken") == table("unbroken")
    lines = list(csv.DictReader(StringIO(table("broken"))))
    assert [line["status"] for line in lines] == ["finished", "finished"]
    assert all(0 < float(line["val/loss"]) < 6 and 0 < float(line["trigram"]) < 6 for line in lines)
    resumed = record.load(Path("broken") / lines[0]["run"])
    assert len(resumed.attempts) == 2 and resumed.attempts[1].from_step >= 2


def test_runs_whose_data_are_missing_are_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    Path("base.yaml").write_text(BASE.replace("s3://nowhere/text", "data/absent"))
    assert main(["study.yaml", "--output", "out", "--dry"]) == 0
    warned = capsys.readouterr()
    assert (
        "3 of 3 runs to be made lack their data: data/absent: no such folder" in warned.err and "3 runs" in warned.out
    )
    assert main(["study.yaml", "--output", "out"]) == 2
    assert "3 of 3 runs to be made lack their data" in capsys.readouterr().err and not begun()


def test_what_is_finished_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study.yaml", "--output", "out"]) == 0
    made = begun()
    known = Path("out/results.csv").rename("known.csv")
    assert main(["study.yaml", "--output", "other", "--known", str(known)]) == 0 and begun() == made
    assert "all 3 runs are finished in known.csv" in capsys.readouterr().out
