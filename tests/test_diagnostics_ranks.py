"""Diagnostics that are killed, and on several processes: the numbers of one, and no hang when one rank fails."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnostics_asked import DIAGNOSTICS, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_toy import column

from depthlit.diagnostic import Answer


def test_killed_inside_a_diagnostic(tmp_path: Path) -> None:
    """kill -9 in the diagnostics of step 8; the resumed run has that step's answers exactly once, as if unbroken."""
    assert run_script(tmp_path / "whole", "{}").returncode == 0
    assert run_script(tmp_path / "broken", json.dumps({"kill": 8})).returncode == -signal.SIGKILL
    broken = tmp_path / "broken" / "analysis" / "step_0000008"
    assert (broken / "AngularDistance.json").exists() and not (broken / "CausalScore.json").exists()
    again = run_script(tmp_path / "broken", json.dumps({"ckpt_path": str(tmp_path / "broken/checkpoints/last.ckpt")}))
    assert again.returncode == 0, again.stderr
    for kind in ("AngularDistance", "CausalScore"):
        files = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob(f"{kind}.*"))
        assert files == sorted(p.relative_to(tmp_path / "broken") for p in (tmp_path / "broken").rglob(f"{kind}.*"))
        for path in files:
            if path.suffix == ".json":
                one, other = Answer.load(tmp_path / "whole" / path), Answer.load(tmp_path / "broken" / path)
                assert one.numbers == other.numbers
                assert all(np.array_equal(one.values[k], other.values[k], equal_nan=True) for k in one.values)
    for name in ("depth/CausalScore/R_causal", "depth/AngularDistance/mean_step", "train/loss"):
        assert column(tmp_path / "broken", name) == column(tmp_path / "whole", name)
    events = EventAccumulator(str(tmp_path / "broken"), size_guidance={"scalars": 0}).Reload()
    steps = [e.step for e in events.Scalars("depth/AngularDistance/mean_step")]
    assert steps == [4, 8, 12] and not list((tmp_path / "broken").rglob("*.partial"))


# ------------------------------------------------------------------------------------------------ several processes

TWO = {"devices": 2, "strategy": "fsdp2"}


def judged_by_one_and_by_two(root: Path, asked: list[str], **options: Any) -> None:
    """Trained by one process, judged by it, and again by two under FSDP2: the answers agree."""
    one = run_script(root, json.dumps({"max_steps": 4, **options}))
    assert one.returncode == 0, one.stderr[-3000:]
    folder = root / "analysis" / "step_0000004"
    before = {name: Answer.load(folder / f"{name}.json") for name in asked}
    for p in folder.iterdir():
        p.unlink()
    checkpoint = str(root / "checkpoints" / "last.ckpt")
    two = run_script(root, json.dumps({**options, "validate": checkpoint, **TWO}))
    assert two.returncode == 0, two.stderr[-3000:]
    for name in asked:
        again = Answer.load(folder / f"{name}.json")
        assert again.notes == before[name].notes and set(again.values) == set(before[name].values)
        assert again.numbers == pytest.approx(before[name].numbers, rel=1e-5, abs=1e-5, nan_ok=True)
        for key, value in before[name].values.items():
            np.testing.assert_allclose(again.values[key], value, rtol=1e-5, atol=1e-5, err_msg=f"{name}/{key}")


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["PreLN", "HC", "FullAttnRes", "BlockAttnRes", "MoDA"])
def test_two_sharded_processes_give_the_numbers_of_one(residual: str, tmp_path: Path) -> None:
    names = [cls.__name__ for cls in DIAGNOSTICS]
    judged_by_one_and_by_two(tmp_path, names, names=names, residual=residual)


@pytest.mark.parametrize("residual", ["PreLN", pytest.param("BlockAttnRes", marks=pytest.mark.slow)])
def test_two_sharded_processes_score_evaluation_sets_like_one(residual: str, tmp_path: Path) -> None:
    questions = [
        {"question": f"{a} + 1?", "answerKey": "B",
         "choices": {"text": [str(a), str(a + 1), "none"], "label": list("ABC")}}
        for a in range(5)
    ]  # fmt: skip
    answers = [{"question": f"{a}?", "answer": "no" * a} for a in range(1, 6)]
    for name, rows in (("arc", questions), ("gsm8k", answers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = {
        "ArcEasy": {"path": str(tmp_path / "arc.jsonl"), "tokenizer": "bytes", "tokens_per_batch": 100},
        "DomainNLL": {
            "tasks": ["gsm8k"], "paths": {"gsm8k": str(tmp_path / "gsm8k.jsonl")}, "tokenizer": "bytes",
            "tokens_per_batch": 60,
        },
    }  # fmt: skip
    judged_by_one_and_by_two(
        tmp_path, list(evaluations), names=[], evaluations=evaluations, residual=residual,
        shape={"vocab_size": 257, "max_seq_len": 64},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "zero2", "zero3"])
def test_two_processes_train_as_if_nothing_were_asked(strategy: str, tmp_path: Path) -> None:
    names = [cls.__name__ for cls in DIAGNOSTICS]
    for root, asked in (("without", []), ("with", names)):
        options = {"names": asked, "max_steps": 4, "validate_every": 1, "devices": 2, "strategy": strategy}
        done = run_script(tmp_path / root, json.dumps(options))
        assert done.returncode == 0, done.stderr[-3000:]
    assert column(tmp_path / "with", "train/loss") == column(tmp_path / "without", "train/loss")
    for name in names:  # none was left out
        assert (tmp_path / "with" / "analysis" / "step_0000004" / f"{name}.json").exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_that_fails_between_collectives_is_left_out(strategy: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, json.dumps({"fails": "outside", "devices": 2, "strategy": strategy, "max_steps": 4}))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Fails failed at step 4 and was left out: rank 1: ZeroDivisionError: planted" in done.stderr
    assert list(column(tmp_path, "train/loss")) == [1, 2, 3, 4]
    assert (tmp_path / "analysis/step_0000004/CausalScore.json").exists()


@pytest.mark.slow
def test_a_rank_that_fails_inside_a_collective_stops_all(tmp_path: Path) -> None:
    done = run_script(tmp_path, json.dumps({"fails": "inside", "max_steps": 4, **TWO}))
    assert done.returncode != 0 and time.time() - float((tmp_path / "failed").read_text()) < 60
    assert "rank 1: ZeroDivisionError: planted (another rank waits in a collective: stopping all)" in done.stderr
