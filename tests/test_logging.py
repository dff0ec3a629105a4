"""What a run logs and says, where, and at which steps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_toy import SHAPE, TAGS, T, Toy, column, events, fit, last, model

from depthlit import loop
from depthlit.loggers import MetricsFile, Place
from depthlit.residuals import PreLN
from depthlit.trainer import Trainer


def test_validate_logs_at_the_checkpoint_s_step_and_beside_a_run_s_curves(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fit(run, max_steps=8)
    value = column(run, "val/loss")[8]
    for root, folder, file in ((run, run / "validate", "metrics.validate.csv"), (other, other, "metrics.csv")):
        trainer = Trainer(accelerator="cpu", default_root_dir=str(root), enable_progress_bar=False)
        for _ in range(2):
            trainer.validate(model(), datamodule=Toy(), ckpt_path=last(run), verbose=False)
        assert column(root, "val/loss", file) == {8: pytest.approx(value, rel=1e-6)}
        found = EventAccumulator(str(folder))
        found.Reload()
        assert {event.step for event in found.Scalars("val/loss")} == {8}
    assert list(events(run)["val/loss"]) == [4, 8] == list(column(run, "val/loss"))


def test_the_metrics_file(tmp_path: Path) -> None:
    place = Place(tmp_path, SimpleNamespace(state=SimpleNamespace(fn=None)))
    file, path = MetricsFile(place), tmp_path / "metrics.csv"
    file.log_metrics({"a": 1.0}, 1)
    file.log_metrics({"a": 0.1 + 0.2, "epoch": 0}, 2)
    assert path.read_text() == "step,a\n1,1.0\n2,0.30000000000000004\n"
    file.log_metrics({"b": 5}, 2)
    file.log_metrics({"b": 6}, 2)
    file.log_metrics({"a": 3}, 3)
    assert path.read_text() == "step,a,b\n1,1.0,\n2,0.30000000000000004,6.0\n3,3.0,\n"
    file.log_metrics({"b": 7}, 1)
    assert path.read_text() == "step,a,b\n1,1.0,7.0\n2,0.30000000000000004,6.0\n3,3.0,\n"
    path.write_text(path.read_text() + "4,1")  # cut short by a crash
    again = MetricsFile(place)
    again.go_on_from(2)
    again.log_metrics({"a": 9}, 3)
    assert path.read_text() == "step,a,b\n1,1.0,7.0\n2,0.30000000000000004,6.0\n3,9.0,\n"


def test_nothing_is_logged_by_a_sanity_check(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4, num_sanity_val_steps=2)
    assert {min(steps) for steps in events(tmp_path).values()} == {1, 4}
    assert list(column(tmp_path, "val/loss")) == [4]


def test_a_figure_of_one_s_own_stands_on_the_same_axis(tmp_path: Path) -> None:
    class Own(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            pl_module.log("own/train", float(trainer.global_step))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("own/validation", float(trainer.global_step))

    fit(tmp_path, callbacks=[Own()], max_steps=8)
    fit(tmp_path, callbacks=[Own()], max_steps=12, ckpt_path=last(tmp_path))
    assert column(tmp_path, "own/train") == {s: s for s in range(1, 13)} == events(tmp_path)["own/train"]
    assert column(tmp_path, "own/validation") == {4: 4, 8: 8, 12: 12}


def test_settings_reach_tensorboard_s_hparams(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    fit(tmp_path, max_steps=2)
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    content = board.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    shown = metadata.parse_session_start_info_plugin_data(content).hparams
    assert shown["shape/n_layer"].number_value == SHAPE.n_layer
    assert shown["residual/class_path"].string_value.endswith("PreLN")


def test_the_clock_leaves_validation_and_saving_out(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            time.sleep(0.5)

    begin = time.perf_counter()
    trainer, _ = fit(tmp_path, callbacks=[Slow()], max_steps=8, validate_every=2, log_every_n_steps=8)
    wall = time.perf_counter() - begin
    assert trainer.clock.seconds < wall - 4 * 0.5
    speed = column(tmp_path, "throughput/tokens_per_sec")[8]
    assert speed == pytest.approx(8 * 2 * T / trainer.clock.seconds, rel=1e-6)


def test_the_share_of_a_known_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has a thousand times the speed at which the toy trained."""
    flops = 3 * SHAPE.forward_flops(T) / T
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        assert loop.ceiling(SimpleNamespace(device=torch.device("cuda"), shape=SHAPE, residual=PreLN()), T) == (
            pytest.approx(989e12 / flops)
        )
        assert loop.ceiling(model(), T) == 0, "a CPU has no known peak"
    monkeypatch.setattr(loop, "ceiling", lambda model, tokens: 1e6 * tokens)
    fit(tmp_path, max_steps=3)
    shares, speeds = column(tmp_path, "throughput/mfu"), column(tmp_path, TAGS[-1])
    assert shares == pytest.approx({step: speed / (1e6 * T) for step, speed in speeds.items()}) and len(shares) == 3


def test_summary_and_quiet_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, max_steps=4, enable_progress_bar=True)
    told = capsys.readouterr().out
    for line in (
        f"parameters         {SHAPE.parameters():,}",
        f"  embedding, head  {SHAPE.embedding_and_head():,}",
        f"  backbone         {SHAPE.backbone():,}",
        "  residual extra   0",
        "shape              2 layers, width 16, 2 heads, feed-forward 48, vocabulary 16",
        "tokens             64 (",
        "weight decay       0.1 on embedding, head, matrix",
        "precision          32-true: weights and residual stream in float32",
    ):
        assert line in told
    assert "schedule           4 steps; learning rate 0.01 after 2 of warm-up, cosine to 0.001 at step 24" in told
    lines = [line for line in told.splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 1/4  loss 2.") and "tokens/s" in lines[0] and lines[0].endswith(" left")
    assert lines[-1].startswith("step 4  val/loss 2.") and len(lines) == 3, "first, last and the validation"


def test_a_bar_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.progress_bar_callback._on_terminal = True

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            bar = trainer.progress_bar_callback.progress
            assert bar.tasks[0].completed == trainer.global_step == 4 and bar.tasks[0].total == 4
            assert bar.tasks[0].description == "validating"

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            assert "tokens/s" in trainer.progress_bar_callback.progress.tasks[0].description

    trainer, _ = fit(tmp_path, max_steps=4, enable_progress_bar=True, callbacks=[Terminal()])
    told = capsys.readouterr().out
    assert "step 4  val/loss 2." in told and "step 1/4  loss" not in told
    assert trainer.progress_bar_callback.progress is None, "the terminal is left as it was"


def test_keys_that_count_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"val_check_interval counts .* use trainer\.validate_every"):
        Trainer(val_check_interval=5)
    with pytest.raises(ValueError, match=r"limit_train_batches counts .* use trainer\.max_steps"):
        Trainer(limit_train_batches=5)
    with pytest.raises(ValueError, match=r"check_val_every_n_epoch counts .* use validate_every"):
        Trainer(check_val_every_n_epoch=3)
    with pytest.raises(ValueError, match="validate_every is -1"):
        Trainer(validate_every=-1)
    with pytest.raises(ValueError, match="keep_checkpoints is 0"):
        Trainer(keep_checkpoints=0)


def test_fast_dev_run_leaves_no_trace(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, fast_dev_run=True, accumulate_grad_batches=2, max_steps=-1)
    assert trainer.global_step == 1 and not list(tmp_path.iterdir())
