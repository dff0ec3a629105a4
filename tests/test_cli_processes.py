"""The command line in processes of its own: what it imports, Ctrl-C, two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command import Command, figures, finish, start

from depthlit import runs


def test_a_cpu_run_does_not_import_deepspeed(depthlit: Command, tmp_path: Path) -> None:
    code = """if True:
        import sys
        from depthlit.cli import run
        sys.argv = ["depthlit", "fit", "--config", "tiny.yaml", "--trainer.max_steps", "1"]
        run()
        assert "deepspeed" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(depthlit: Command, tmp_path: Path) -> None:
    process = start(["fit", "--config", "tiny.yaml", "--trainer.max_steps", "100000"], tmp_path)
    last, deadline = Path("run/checkpoints/last.ckpt"), time.monotonic() + 120
    while not last.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.code != 0 and "Traceback" not in done.err
    assert "stopped; the same command goes on from run/checkpoints/last.ckpt, step_" in done.err
    step = runs.read_checkpoint(last)["global_step"]
    assert step >= 2
    on = depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", str(step + 2))
    assert on.code == 0 and f"(step {step})" in on.out


def test_two_ranks_see_the_named_config(depthlit: Command, tmp_path: Path) -> None:
    arguments = ["fit", "--config", "tiny.yaml", "--config", "residual/layerscale", "--trainer.devices", "2",
                 "--trainer.strategy", "ddp"]  # fmt: skip
    done = finish(start(arguments, tmp_path))
    assert done.code == 0, done.err
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert saved["model"]["residual"]["class_path"].endswith("LayerScale")
    assert json.loads(Path("run/env.json").read_text())["ranks"] == 2
    assert list(figures("run")) == [1, 2, 3, 4]


def test_ranks_that_read_ahead_and_those_that_cannot_are_one_process(depthlit: Command, tmp_path: Path) -> None:
    """Thirty-two readers, so that whole windows of the usual length are mixed ahead on ranks with whole weights."""
    deep = ["fit", "--config", "tiny.yaml", "--model.residual", "WAV", "--model.shape.n_layer", "16"]
    ranks = ["--data.batch_size", "1", "--trainer.devices", "2"]
    losses = []
    for engine in ([], [*ranks, "--trainer.strategy", "ddp"], [*ranks, "--trainer.strategy", "fsdp2"]):
        folder = f"run{len(losses)}"
        done = finish(start([*deep, *engine, "--trainer.default_root_dir", folder], tmp_path))
        assert done.code == 0, done.err
        losses.append([row["train/loss"] for row in figures(folder).values()])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[2] == pytest.approx(losses[0], abs=1e-5)
