"""The course of a run: cadence, resume, kills, NaN, what is logged where, several processes."""

from __future__ import annotations

import errno
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from training_toy import SHAPE, Rows, T, Toy, column, fit, model, script

from depthlit import checkpoint_files, checkpoints, loop, residuals
from depthlit.loggers import MetricsFile, Place
from depthlit.loop import ENDLESS, Endless
from depthlit.module import LanguageModel, NonFinite
from depthlit.optim import OptimizerSettings, Schedule
from depthlit.residuals import PreLN
from depthlit.trainer import Trainer

EXACT_TAGS = ("train/loss", "optim/lr", "optim/grad_norm", "progress/tokens", "val/loss", "val/ppl")
TAGS = (*EXACT_TAGS, "throughput/tokens_per_sec")


def events(root: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of a run's event files; fails if a step comes twice or steps go back."""
    board = EventAccumulator(str(root), size_guidance={"scalars": 0})
    board.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in board.Tags()["scalars"]:
        steps = [event.step for event in board.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag}: steps {steps}"
        found[tag] = {event.step: event.value for event in board.Scalars(tag)}
    return found


def last(root: Path) -> str:
    return str(root / "checkpoints" / "last.ckpt")


def weights(m: LanguageModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in m.decoder.parameters()])


def same_run(a: Path, b: Path) -> None:
    """All figures but the speed, bit by bit and at the same steps, in both kinds of files."""
    boards = events(a), events(b)
    assert set(boards[0]) == set(boards[1]) == set(TAGS)
    for tag in EXACT_TAGS:
        assert column(a, tag) == column(b, tag), tag
        assert boards[0][tag] == boards[1][tag], tag
        assert boards[0][tag] == pytest.approx(column(a, tag), rel=1e-6), tag
    assert list(column(a, TAGS[-1])) == list(column(b, TAGS[-1]))


class Log(Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []
        self.tokens: list[int] = []
        self.gradients_left = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.step_closed:
            self.tokens.append(pl_module.tokens_seen)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(trainer.global_step)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_validation_follows_every_fourth_optimizer_step(accumulate: int, tmp_path: Path) -> None:
    """With 10 micro-batches in an epoch, so that accumulations cross its end."""
    log = Log()
    fit(tmp_path, callbacks=[log], accumulate_grad_batches=accumulate, validate_every=4, max_steps=12)
    assert log.validated == [4, 8, 12]
    assert log.tokens == [2 * T * accumulate * (i + 1) for i in range(12)], "no step is cut short"
    for found in (events(tmp_path)["val/loss"], column(tmp_path, "val/loss")):
        assert list(found) == [4, 8, 12]
    assert list(column(tmp_path, "train/loss")) == list(events(tmp_path)["train/loss"]) == list(range(1, 13))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "best.ckpt", "last.ckpt", "step_0000004.ckpt", "step_0000008.ckpt", "step_0000012.ckpt",
    ]  # fmt: skip


def test_the_last_step_is_validated_and_saved_too(tmp_path: Path) -> None:
    log = Log()
    fit(tmp_path, callbacks=[log], max_steps=6, validate_every=4, accumulate_grad_batches=2)
    assert log.validated == [4, 6]
    assert torch.load(last(tmp_path), weights_only=True)["global_step"] == 6


def test_no_validation(tmp_path: Path) -> None:
    log = Log()
    fit(tmp_path, callbacks=[log], max_steps=5, validate_every=0, save_every=2)
    assert log.validated == [] and "val/loss" not in events(tmp_path)
    steps = [torch.load(p, weights_only=True)["global_step"] for p in sorted((tmp_path / "checkpoints").glob("step*"))]
    assert steps == [2, 4, 5]


def test_figures_can_be_logged_less_often(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=10, log_every_n_steps=3, validate_every=5)
    assert list(column(tmp_path, "train/loss")) == [3, 6, 9]
    assert list(column(tmp_path, "val/loss")) == [5, 10]


# Resume


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"settings": {"noisy": True}, "accumulate_grad_batches": 2},
        {"save_every": 3},
        {"precision": "bf16-mixed", "log_every_n_steps": 2},
    ],
    ids=["plain", "accumulation", "random", "saved apart", "bf16"],
)
def test_two_halves_are_the_whole_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """Data order (epochs of 10 micro-batches are crossed), random numbers, rates, moments, figures: all of it."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    _, expected = fit(whole, max_steps=24, **options)
    fit(halves, max_steps=12, **options)
    _, found = fit(halves, ckpt_path=last(halves), max_steps=18, **options)
    _, found = fit(halves, ckpt_path=last(halves), max_steps=24, **options)
    assert torch.equal(weights(expected), weights(found))
    if "save_every" in options:  # stopping at 18 validates there, which the whole run does not
        assert column(whole, "train/loss") == column(halves, "train/loss")
        return
    for tag in ("val/loss", "val/ppl"):
        assert {step: x for step, x in column(halves, tag).items() if step % 4 == 0} == column(whole, tag)
    for tag in EXACT_TAGS[:4]:
        assert column(whole, tag) == column(halves, tag), tag
        assert events(whole)[tag] == events(halves)[tag]


@pytest.mark.parametrize("name", sorted(residuals.__all__))
def test_every_strategy_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"settings": {"residual": getattr(residuals, name)()}, "validate_every": 0}
    _, expected = fit(tmp_path / "whole", max_steps=6, logger=False, **options)
    fit(tmp_path / "halves", max_steps=3, **options)
    _, found = fit(tmp_path / "halves", ckpt_path=last(tmp_path / "halves"), max_steps=6, **options)
    assert torch.equal(weights(expected), weights(found))


def test_random_numbers_reach_the_toy_s_loss(tmp_path: Path) -> None:
    """Otherwise the case `random` above would show nothing."""
    _, plain = fit(tmp_path / "a", max_steps=4)
    _, noisy = fit(tmp_path / "b", max_steps=4, settings={"noisy": True})
    assert not torch.equal(weights(plain), weights(noisy))


def test_how_often_one_looks_changes_nothing(tmp_path: Path) -> None:
    class Draws(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            torch.rand(3)

    ends = [
        fit(tmp_path / str(every), settings={"noisy": True}, callbacks=[Draws()], validate_every=every)[1]
        for every in (0, 1, 5)
    ]
    assert torch.equal(weights(ends[0]), weights(ends[1])) and torch.equal(weights(ends[0]), weights(ends[2]))


def test_killed_and_started_again_is_the_unbroken_run(tmp_path: Path) -> None:
    """kill -9 in step 7, then again inside the validation of step 8; each time the run goes on from its checkpoint."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"accumulate_grad_batches": 3}
    fit(whole, max_steps=12, **options)
    assert script(broken, kill=["train", 7], **options).code == -signal.SIGKILL
    assert torch.load(last(broken), weights_only=True)["global_step"] == 4
    assert script(broken, kill=["validation", 8], ckpt_path=last(broken), **options).code == -signal.SIGKILL
    assert torch.load(last(broken), weights_only=True)["global_step"] == 4
    fit(broken, max_steps=12, ckpt_path=last(broken), **options)
    same_run(whole, broken)


def test_a_finished_run_started_again_stays_as_it_is(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    before = (tmp_path / "metrics.csv").read_bytes()
    trainer, _ = fit(tmp_path, max_steps=4, ckpt_path=last(tmp_path))
    assert trainer.global_step == 4 and (tmp_path / "metrics.csv").read_bytes() == before
    assert list(events(tmp_path)["train/loss"]) == [1, 2, 3, 4]


def test_going_on_from_an_older_checkpoint_drops_what_came_after(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    fit(whole, max_steps=12)
    fit(tmp_path / "run", max_steps=12, settings={"optimizer": OptimizerSettings(lr=1e-3)})
    fit(tmp_path / "run", max_steps=8, ckpt_path=str(tmp_path / "run" / "checkpoints" / "step_0000004.ckpt"))
    for found in (column(tmp_path / "run", "train/loss"), events(tmp_path / "run")["train/loss"]):
        assert list(found) == list(range(1, 9))
    assert torch.load(last(tmp_path / "run"), weights_only=True)["global_step"] == 8


def test_settings_given_now_win_over_the_checkpoint_s(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    chosen = OptimizerSettings(lr=3e-4, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-7)
    settings = {"optimizer": chosen, "schedule": Schedule(total_steps=100)}
    trainer, m = fit(tmp_path, ckpt_path=last(tmp_path), max_steps=8, settings=settings)
    assert column(tmp_path, "optim/lr")[8] == pytest.approx(3e-4 * 8 / 10)
    for group, kept in zip(trainer.optimizers[0].param_groups, m._groups, strict=True):
        decay = 0.3 if kept["role"] in chosen.decayed_roles else 0
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-7, decay)


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    with pytest.raises(ValueError, match="holds a run already; go on with ckpt_path="):
        fit(tmp_path, max_steps=4)


# Checkpoints


def test_a_kill_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("commit", "link"):
        root = tmp_path / name
        fit(root, max_steps=4)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, name, lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(
                ValueError, match=r"step 8: no checkpoint could be written .*disk full.*last.ckpt, step_0000004"
            ):
                fit(root, max_steps=8, ckpt_path=last(root))
        assert torch.load(last(root), weights_only=True)["global_step"] == 4
        fit(root, max_steps=8, ckpt_path=last(root))
        assert torch.load(last(root), weights_only=True)["global_step"] == 8
        assert not list((root / "checkpoints").glob(".*"))


def links(root: Path) -> dict[str, str]:
    return {p.stem: p.resolve().stem for p in (root / "checkpoints").iterdir() if p.is_symlink()}


@pytest.mark.parametrize(("keep", "left"), [(2, [8, 12]), (None, [4, 8, 12])])
def test_the_newest_are_kept(keep: int | None, left: list[int], tmp_path: Path) -> None:
    fit(tmp_path, max_steps=12, keep_checkpoints=keep, keep_best=False)
    assert sorted(int(p.stem[5:]) for p in (tmp_path / "checkpoints").glob("step_*")) == left
    assert links(tmp_path) == {"last": "step_0000012"}


@pytest.mark.parametrize("background", [False, True])
def test_the_best_is_kept_too_and_known_when_going_on(background: bool, tmp_path: Path) -> None:
    class Told(Callback):  # in place of the toy's own loss, which has a will of its own
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 1.5, 12: 0.5}
            pl_module.log("val/loss", losses[trainer.global_step])

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.on_validation_epoch_end = lambda: None

    options = {"validate_every": 2, "keep_checkpoints": 1, "save_in_background": background}
    fit(tmp_path, max_steps=6, callbacks=[Told()], **options)
    assert links(tmp_path) == {"last": "step_0000006", "best": "step_0000004"}
    fit(tmp_path, max_steps=10, callbacks=[Told()], ckpt_path=last(tmp_path), **options)
    assert links(tmp_path) == {"last": "step_0000010", "best": "step_0000004"}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4
    fit(tmp_path, max_steps=12, callbacks=[Told()], ckpt_path=last(tmp_path), **options)
    assert links(tmp_path) == {"last": "step_0000012", "best": "step_0000012"}


def test_in_the_background_the_same_is_written(tmp_path: Path) -> None:
    """Though weights move on meanwhile: the thread is held up until the next step has been taken."""
    fit(tmp_path / "now", max_steps=6, validate_every=3)
    moved = threading.Event()

    class Move(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if trainer.global_step == 4:
                moved.set()

    with pytest.MonkeyPatch.context() as patched:
        write = checkpoint_files.write
        patched.setattr(checkpoint_files, "write", lambda *both: moved.wait(60) and write(*both))
        fit(tmp_path / "later", max_steps=6, validate_every=3, save_in_background=True, callbacks=[Move()])
    for step in (3, 6):
        name = f"checkpoints/step_{step:07d}.ckpt"
        a, b = (torch.load(tmp_path / root / name, weights_only=True) for root in ("now", "later"))
        torch.testing.assert_close(a["state_dict"], b["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(a["optimizer_states"], b["optimizer_states"], rtol=0, atol=0)


@pytest.mark.parametrize(("background", "told"), [(False, 8), (True, 12)])
def test_a_full_disk_is_told_in_one_line(background: bool, told: int, tmp_path: Path) -> None:
    """Below the second checkpoint's feet; in the background it comes out when the third is due."""
    fit(tmp_path, max_steps=4)
    whole = (tmp_path / "checkpoints" / "step_0000004.ckpt").read_bytes()
    with pytest.MonkeyPatch.context() as patched:

        def full(content: dict[str, Any], path: Path) -> None:
            path.write_bytes(b"the first")
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(checkpoint_files, "write", full)
        with pytest.raises(ValueError, match=rf"step {told}: .*No space left on device.*step_0000004.ckpt, is whole"):
            fit(tmp_path, max_steps=16, ckpt_path=last(tmp_path), save_in_background=background)
    assert Path(last(tmp_path)).read_bytes() == whole
    assert not list((tmp_path / "checkpoints").glob(".*"))
    fit(tmp_path, max_steps=16, ckpt_path=last(tmp_path))
    fit(tmp_path / "unbroken", max_steps=16)
    assert column(tmp_path, "train/loss") == column(tmp_path / "unbroken", "train/loss")


# NaN


def test_a_nan_stops_before_the_update_with_step_and_batch_named(tmp_path: Path) -> None:
    poison = {"poisoned": (17, 0)}
    where = r"step 6: the loss is nan \(batch 17 of rank 0\); stopped before the update, \S*last.ckpt is good; model"
    with pytest.raises(NonFinite, match=where):
        fit(tmp_path, accumulate_grad_batches=3, settings=poison)
    content = torch.load(last(tmp_path), weights_only=True)
    assert content["global_step"] == 4 and all(x.isfinite().all() for x in content["state_dict"].values())
    _, m = fit(tmp_path, ckpt_path=last(tmp_path), accumulate_grad_batches=3)
    assert weights(m).isfinite().all()
    fit(tmp_path / "clean", accumulate_grad_batches=3)
    same_run(tmp_path, tmp_path / "clean")


def test_a_nan_before_the_first_checkpoint_calls_none_good(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match=r"stopped before the update; model\.nonfinite skip"):
        fit(tmp_path, settings={"poisoned": (1, 0)})


def test_a_nan_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before: dict[int, torch.Tensor] = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            before[trainer.global_step] = weights(pl_module)

    _, m = fit(tmp_path, settings={"poisoned": (5, 0), "nonfinite": "skip"}, callbacks=[Keep()], max_steps=8)
    assert "step 6: the loss is nan (batch 5 of rank 0); step skipped" in capsys.readouterr().err
    assert torch.equal(before[6], before[5]), "no weight moves, none decays"
    assert not torch.equal(before[7], before[6]) and weights(m).isfinite().all()
    assert column(tmp_path, "optim/skipped_steps") == {6: 1, 7: 1, 8: 1}
    assert m.skipped_steps == 1 and torch.load(last(tmp_path), weights_only=True)["skipped_steps"] == 1


def test_a_gradient_that_is_not_finite_counts_too(tmp_path: Path) -> None:
    class Spoil(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 2:
                pl_module.decoder.head.weight.grad[0, 0] = float("inf")

    with pytest.raises(NonFinite, match=r"step 3: the gradient norm is (inf|nan) \(batches 2 to 2\)"):
        fit(tmp_path, callbacks=[Spoil()], max_steps=8)


# What is logged


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


# The endless stream


def test_a_stream_crosses_epochs_and_counts_whole_windows() -> None:
    rows = Rows(10, 0)
    stream = Endless(DataLoader(rows, 2), window=3)
    assert len(stream) == ENDLESS
    batches = [batch for _, batch in zip(range(15), stream, strict=False)]
    for i, batch in enumerate(batches):
        first = 2 * i % 10
        assert torch.equal(batch["tokens"], rows.tokens[first : first + 2])
    for i in range(0, 15, 3):
        counted = sum((batch["targets"] >= 0).sum() for batch in batches[i : i + 3])
        assert [batch["counted"] for batch in batches[i : i + 3]] == [counted] * 3


@pytest.mark.parametrize("at", [3, 4, 5, 9])
def test_a_stream_goes_on_where_it_was(at: int) -> None:
    loader = DataLoader(Rows(10, 0), 2)
    first, second = Endless(loader), Endless(loader)
    whole = [batch["tokens"] for _, batch in zip(range(14), Endless(loader), strict=False)]
    for _ in zip(range(at), first, strict=False):
        pass
    second.load_state_dict(first.state_dict())
    found = [batch["tokens"] for _, batch in zip(range(14 - at), second, strict=False)]
    assert torch.equal(torch.stack(found), torch.stack(whole[at:]))


def test_a_stream_is_saved_between_steps_only() -> None:
    stream = Endless(DataLoader(Rows(10, 0), 2), window=2)
    reader = iter(stream)
    next(reader)
    with pytest.raises(RuntimeError, match="between optimizer steps"):
        stream.state_dict()
    next(reader)
    assert stream.state_dict()["served"] == 2


def test_an_empty_loader_is_told() -> None:
    with pytest.raises(ValueError, match="loader is empty"):
        next(iter(Endless([])))


# Several processes


def test_two_processes_are_one(tmp_path: Path) -> None:
    """DDP with uneven masks, accumulation and clipping, against one process with twice the micro-batch."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": 8}
    one, two = tmp_path / "one", tmp_path / "two"
    fit(one, data={"batch_size": 4}, **options)
    done = script(two, data={"batch_size": 2}, devices=2, strategy="ddp", **options)
    assert done.code == 0, done.said
    for tag in EXACT_TAGS:
        assert column(two, tag) == pytest.approx(column(one, tag), rel=1e-6), tag
    a, b = (torch.load(last(root), weights_only=True)["state_dict"] for root in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "fsdp2", "fsdp2 in one file", "zero1", "zero2", "zero3"])
def test_engines_are_one_process_also_when_killed_and_gone_on_with(engine: str, tmp_path: Path) -> None:
    """Same losses, gradient norms and rates as one process, through an accumulation, clipping and a kill in step 7."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": 8}
    one, two = tmp_path / "one", tmp_path / "two"
    fit(one, data={"batch_size": 4}, **options)
    shards = {"data": {"batch_size": 2}, "devices": 2, "strategy": engine, **options}
    assert script(two, kill=["train", 7], **shards).code != 0
    done = script(two, ckpt_path=last(two), **shards)
    assert done.code == 0, done.said
    for tag in EXACT_TAGS:
        assert column(two, tag) == pytest.approx(column(one, tag), rel=2e-6), tag


@pytest.mark.slow
def test_an_engine_that_would_train_on_the_same_data_twice_is_refused(tmp_path: Path) -> None:
    done = script(tmp_path, timeout=90, devices=2, strategy="lightning's own")
    assert done.code != 0 and "tensor_parallel_size is 2" in done.said


@pytest.mark.slow
def test_a_nan_on_one_rank_stops_all(tmp_path: Path) -> None:
    settings = {"poisoned": (5, 1)}
    done = script(tmp_path, timeout=90, data={"batch_size": 2}, devices=2, strategy="ddp", settings=settings)
    assert done.code != 0 and "step 6: the loss is nan (batch 5 of rank 1)" in done.said
    assert torch.load(last(tmp_path), weights_only=True)["global_step"] == 4
