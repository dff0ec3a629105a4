"""A machine taken away: signals between and within optimizer steps, SLURM's requeue, one and two processes."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from training_toy import column, fit

from depthlit.preemption import Preempted, Preemption

ROOT = Path(__file__).parents[1]


class Signal(Callback):
    """Sends this process a signal in the middle of a micro-batch."""

    def __init__(self, number: int, batch: int) -> None:
        self.number, self.batch = number, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def stand_in(folder: Path, name: str, content: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{content}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    "number, accumulate, batch, step",
    [(signal.SIGTERM, 1, 5, 6), (signal.SIGINT, 3, 16, 6), (signal.SIGTERM, 1, 7, 8)],
)
def test_it_leaves_behind_the_step_and_goes_on_bit_by_bit(tmp_path, number, accumulate, batch, step):
    """Step 8 has a validation, which runs before the process leaves."""
    options = {"accumulate_grad_batches": accumulate}
    fit(tmp_path / "whole", **options)
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as left:
        fit(tmp_path / "broken", callbacks=[Signal(number, batch)], **options)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) == before, "handlers are put back"
    last = tmp_path / "broken" / "checkpoints" / "last.ckpt"
    assert last.resolve().name == f"step_{step:07d}.ckpt"
    fit(tmp_path / "broken", ckpt_path=str(last), **options)
    for name in ("train/loss", "val/loss"):
        assert column(tmp_path / "broken", name) == column(tmp_path / "whole", name)


def test_one_asked_to_leave_while_validating_leaves_behind_it(tmp_path):
    class Validating(Callback):
        def on_validation_epoch_start(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        fit(tmp_path, callbacks=[Validating()])
    assert list(column(tmp_path, "val/loss")) == [4] == [max(column(tmp_path, "train/loss"))]
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().name == "step_0000004.ckpt"


def test_a_second_ctrl_c_leaves_at_once(capfd):
    """In a child, since it ends the process."""
    child = os.fork()
    if not child:
        preemption = Preemption()
        for _ in range(2):
            preemption._note(signal.SIGINT, None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert capfd.readouterr().err.count("Ctrl-C once more leaves at once") == 1


def test_usr1_under_slurm_requeues_once(tmp_path, monkeypatch, capfd):
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/calls')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with pytest.raises(Preempted) as left:
        fit(tmp_path / "run", callbacks=[Signal(signal.SIGUSR1, 4)])
    assert left.value.code == 0
    assert (tmp_path / "calls").read_text() == "requeue 41\n"
    said = "SIGUSR1 behind step 5: stopped; job 41, requeued, goes on from "
    assert said in capfd.readouterr().err


def test_a_requeue_that_is_refused_is_told(tmp_path, monkeypatch, capfd):
    stand_in(tmp_path, "scontrol", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with pytest.raises(Preempted) as left:
        fit(tmp_path / "run", callbacks=[Signal(signal.SIGUSR1, 4)])
    assert left.value.code == 128 + signal.SIGUSR1
    said = capfd.readouterr().err
    assert "job 41 could not be requeued" in said and "the same command goes on from" in said


def test_usr1_elsewhere_just_saves(tmp_path, capfd):
    with pytest.raises(Preempted):
        fit(tmp_path / "run", callbacks=[Signal(signal.SIGUSR1, 4)])
    said = f"SIGUSR1 behind step 5: stopped; the same command goes on from {tmp_path}/run/checkpoints/last.ckpt, step_"
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_the_job_file_with_a_stand_in_for_the_scheduler(tmp_path):
    """Signal, save, requeue, and the same losses as an unbroken run; srun and scontrol are scripts of a few lines."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    slurm = "export SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NAME=depthlit"
    stand_in(bin_, "srun", f'{slurm}\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"')
    stand_in(bin_, "scontrol", f'echo "$@" >> {tmp_path}/calls')
    stand_in(bin_, "depthlit", f'exec {sys.executable} -m depthlit "$@"')
    env = {
        **os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1", "DEPTHLIT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip

    def command(run: str) -> list[str]:
        return [
            "bash", str(ROOT / "tools/slurm/fit.sbatch"), "--config", "quickstart", "--model.shape", "tiny-L2",
            "--trainer.max_steps", "60", "--trainer.validate_every", "30", "--data.block_size", "32",
            "--data.batch_size", "2", "--trainer.default_root_dir", str(tmp_path / run),
        ]  # fmt: skip

    subprocess.run(command("whole"), env=env, check=True, timeout=300, capture_output=True)
    process = subprocess.Popen(
        command("broken"), env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        metrics = tmp_path / "broken" / "metrics.csv"
        until = time.monotonic() + 240
        while not (metrics.is_file() and metrics.read_text().count("\n") > 4) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if (tmp_path / "calls").is_file():  # else it was quicker than the signal, and there is nothing to go on with
        assert (tmp_path / "calls").read_text() == "requeue 7\n" and b"job 7, requeued," in output
        subprocess.run(command("broken"), env=env, check=True, timeout=300, capture_output=True)
    assert column(tmp_path / "broken", "train/loss") == column(tmp_path / "whole", "train/loss")
