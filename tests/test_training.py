"""The course of a run: cadence, resume, kills, the endless stream, several processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader
from training_toy import EXACT_TAGS, Log, Rows, T, column, events, fit, last, same_run, script, weights

from depthlit import residuals
from depthlit.loop import ENDLESS, Endless
from depthlit.optim import OptimizerSettings, Schedule


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
