"""Checkpoints: killed while saving, kept, the best, in the background, on a full disk; and what a NaN leaves."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from training_toy import column, fit, last, same_run, weights

from depthlit import checkpoint_files, checkpoints
from depthlit.module import NonFinite


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
