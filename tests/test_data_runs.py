"""Whole runs of the command line on prepared data: killed, resumed, on two processes."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_data import prepared, write_jsonl

from depthlit.data.corpus import open_corpus
from depthlit.data.prepare import Preparation, prepare

ROOT = Path(__file__).parent.parent
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(*command: str) -> subprocess.Popen[str]:
    """A command in a session of its own, so that all of it can be killed."""
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=ALONE, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 300) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-3000:]
    return output


def fit(corpus: Path, folder: Path, *options: str, subcommand: str = "fit") -> tuple[str, ...]:
    return (
        "-m", "depthlit", subcommand, "--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(folder),
        "--trainer.enable_progress_bar", "false", "--data.path", str(corpus), "--data.block_size", "16",
        "--model.residual", "PreLN", "--model.shape.n_layer", "2",
        "--model.shape.d_model", "32", "--model.shape.n_head", "2", *options,
    )  # fmt: skip


@pytest.mark.slow
def test_prepare_survives_being_killed(tmp_path: Path) -> None:
    """Killed at twenty random moments: the folder is refused until it is whole, and then it is the right one."""
    texts = [f"document {i} " * (50 + i % 900) for i in range(6000)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    settings = Preparation([str(source)], "chars", val_fraction=0.1)

    def begin(out: Path, mark: int) -> subprocess.Popen[str]:
        """A preparation that has got past its imports."""
        process = start("tools/prepare.py", "--input", str(source), "--tokenizer", "chars", "--output", str(out),
                        "--val_fraction", "0.1", "--num_workers", "2")  # fmt: skip
        while process.poll() is None and changed(out / ".parts" / "mark") == mark:
            time.sleep(0.02)
        return process

    process, begun = begin(tmp_path / "whole", 0), time.monotonic()
    finish(process)
    length, whole = time.monotonic() - begun, open_corpus(str(tmp_path / "whole"))
    rng, halves, out, mark = random.Random(0), 0, tmp_path / "out", 0
    for _ in range(20):
        process = begin(out, mark)
        mark = changed(out / ".parts" / "mark")
        try:
            process.communicate(timeout=rng.uniform(0, length))
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # the workers must notice by themselves
            process.communicate()
            halves += bool(list((out / ".parts").glob("0*.json")))
        if (out / "manifest.json").exists():
            corpus = open_corpus(str(out))
            assert corpus.fingerprint == whole.fingerprint
            for split in ("train", "val"):
                corpus.check(split)
            shutil.rmtree(out)
            mark = 0
        else:
            with pytest.raises(ValueError, match=r"never finished|no such folder"):
                open_corpus(str(out))
    assert prepare(settings, out, 2, quiet=True)["fingerprint"] == whole.fingerprint
    assert halves >= 3, "hardly any kill fell into the work itself"


def changed(path: Path) -> int:
    """When a file was last written; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def losses(folder: Path) -> dict[int, str]:
    """train/loss by step, as written."""
    with open(folder / "metrics.csv") as file:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")}


@pytest.mark.slow
def test_fit_survives_being_killed(tmp_path: Path) -> None:
    """Killed at up to twenty random moments of training: the losses are those of the unbroken run, bit for bit."""
    corpus = prepared(tmp_path / "data", [f"document {i}: " + "word " * (i % 13) for i in range(400)], val_fraction=0.2)
    options = ("--trainer.max_steps", "1500", "--trainer.save_every", "20", "--trainer.validate_every", "150",
               "--trainer.log_every_n_steps", "1", "--data.num_workers", "1", "--data.batch_size", "4")  # fmt: skip
    finish(start(*fit(corpus, tmp_path / "whole", *options)), timeout=600)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 1500
    rng, broken, kills = random.Random(1), tmp_path / "broken", 0
    while kills < 20:
        process, before = start(*fit(corpus, broken, *options)), written(broken)
        while process.poll() is None and written(broken) == before:
            time.sleep(0.05)  # until it trains
        try:
            output, _ = process.communicate(timeout=rng.uniform(0, 3))
            assert process.returncode == 0, output[-3000:]
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
    else:
        finish(start(*fit(corpus, broken, *options)), timeout=600)
    assert kills >= 3 and losses(broken) == whole


def written(folder: Path) -> int:
    """Size of the file of figures, which grows while a run trains."""
    return (folder / "metrics.csv").stat().st_size if (folder / "metrics.csv").is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("documents", [37, 3])
def test_two_processes_validate_like_one(documents: int, tmp_path: Path) -> None:
    """Blocks that do not divide by ranks and batches: every run ends, and val/loss is the same."""
    corpus = prepared(tmp_path / "data", [f"document {i} " * 5 for i in range(documents * 3)], val_fraction=0.3)
    finish(start(*fit(corpus, tmp_path / "run", "--trainer.max_steps", "1", "--data.batch_size", "1")))
    results = {}
    for name, options in {
        "one": ("--trainer.devices", "1", "--data.batch_size", "1"),
        "two": ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "3"),
    }.items():
        checkpoint = ("--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
        output = finish(start(*fit(corpus, tmp_path / name, *options, *checkpoint, subcommand="validate")))
        results[name] = validation_loss(tmp_path / name, output)
    assert results["one"] == pytest.approx(results["two"], rel=1e-6)


def validation_loss(folder: Path, output: str) -> float:
    for path in (folder / "metrics.csv", *folder.rglob("metrics*.csv")):
        if path.is_file():
            with open(path) as file:
                rows = [row["val/loss"] for row in csv.DictReader(file) if row.get("val/loss")]
            if rows:
                return float(rows[-1])
    raise AssertionError(f"no val/loss in {sorted(folder.rglob('*'))}; {output}")


@pytest.mark.slow
def test_a_rank_without_data_stops_all_with_one_message(tmp_path: Path) -> None:
    corpus = prepared(tmp_path / "data", ["a few words and no more than these"] * 2, val_fraction=0)
    process = start(*fit(corpus, tmp_path / "run", "--trainer.devices", "2", "--trainer.strategy", "ddp",
                         "--data.batch_size", "8", "--trainer.max_steps", "1"))  # fmt: skip
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"{corpus}/train holds 4 blocks of 16 tokens, 16 needed (2 x 8 blocks per step)" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_corpus_without_a_held_out_part_trains(tmp_path: Path) -> None:
    corpus = prepared(tmp_path / "data", [f"document {i} " * 5 for i in range(60)], val_fraction=0)
    finish(start(*fit(corpus, tmp_path / "run", "--trainer.max_steps", "3")))
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert list(manifest["splits"]) == ["train"]
