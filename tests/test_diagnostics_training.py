"""Diagnostics beside training: they change nothing, come when they should, and leave files that speak."""

import random
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from diagnostics_asked import DIAGNOSTICS, SMALL, Asked, all_of_them
from models import known, label
from rich.progress import Progress
from torch import Tensor
from training_toy import Toy, column, fit, model

import callbacks
from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, NotApplicable, Share, Subject
from depthlit.interventions import rerouted
from depthlit.shape import ShapeSpec
from depthlit.trainer import Trainer
from depthlit.untouched import progress


class Rude(Diagnostic):
    """Draws random numbers, switches modes, and looks at what it is given."""

    seen: list[Any]

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        assert not subject.decoder.blocks[1].attn.training and not torch.is_grad_enabled()
        assert not batch["tokens"].is_inference() and not subject.logits(batch).is_inference()
        subject.decoder.blocks[0].train()
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self.seen = [*getattr(self, "seen", []), numbers]
        return {"draw": numbers[2]}


# ------------------------------------------------------------------------------------------------ side effects


@pytest.mark.parametrize("strategy", known(), ids=label)
def test_training_is_bit_for_bit_the_same(strategy: ResidualStrategy, tmp_path: Path, undrawn: None) -> None:
    """All diagnostics after every step, against none: losses, weights and random numbers of training agree exactly."""
    settings = {"residual": strategy, "noisy": True}
    plain, bare = fit(tmp_path / "without", settings=dict(settings), max_steps=2, validate_every=1)
    asked = [*all_of_them(), Rude(**SMALL)]
    watched, looked_at = fit(tmp_path / "with", settings=dict(settings), max_steps=2, validate_every=1, callbacks=asked)
    assert column(tmp_path / "with", "train/loss") == column(tmp_path / "without", "train/loss")
    assert column(tmp_path / "with", "val/loss") == column(tmp_path / "without", "val/loss")
    for (name, a), b in zip(bare.named_parameters(), looked_at.parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(plain.optimizers[0].state.values(), watched.optimizers[0].state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    for cls in DIAGNOSTICS:
        steps = sorted(
            int(p.parent.name.removeprefix("step_")) for p in (tmp_path / "with").rglob(f"{cls.__name__}.json")
        )
        assert steps == [1, 2]


def test_modes_generators_gradients_and_hooks_are_put_back(tmp_path: Path, undrawn: None) -> None:
    class Watch(pl.Callback):
        """Compare before and behind the diagnostics, which run between these two hooks."""

        def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            module.decoder.blocks[1].attn.train()  # an odd mode, to be put back
            self.before = self.state(module)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            assert self.state(module) == self.before

        def state(self, module: Any) -> Any:
            hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in module.modules()]
            draws = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().sum().item())
            grads = [None if p.grad is None else p.grad.data_ptr() for p in module.parameters()]
            return hooks, draws, grads, module.decoder.order, module.decoder.path, module.decoder.headless

    rude = Rude(**SMALL)
    fit(tmp_path, max_steps=2, validate_every=1, callbacks=[Watch(), *all_of_them(), rude])
    assert rude.seen[0] == rude.seen[2] != rude.seen[1], "each question finds the same random numbers"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-pure"])
@pytest.mark.parametrize("residual", ["PreLN", "HC", "BlockAttnRes"])
def test_in_half_precision(precision: str, residual: str, tmp_path: Path, undrawn: None) -> None:
    """Everything is answered, finite, and the last point of the lens is exactly 0 under autocasting too."""
    settings = {"residual": getattr(residuals, residual)(), "shape": ShapeSpec(3, 16, n_head=2, vocab_size=16)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*failed at step.*")
        fit(tmp_path, max_steps=2, validate_every=2, precision=precision, callbacks=all_of_them(), settings=settings)
    found = {p.stem: Answer.load(p) for p in (tmp_path / "analysis" / "step_0000002").glob("*.json")}
    assert set(found) == {cls.__name__ for cls in DIAGNOSTICS}
    for answer in found.values():
        assert answer.notes or (answer.numbers and all(np.isfinite(list(answer.numbers.values()))))
    assert found["LogitLens"].values["kl"][-1] == 0 and (found["LogitLens"].values["kl"] >= 0).all()


def test_a_bar_with_the_time_left() -> None:
    """In the bar of the trainer, if it has one, and gone afterwards."""
    bar = Progress(disable=True)

    class Shown:
        _bar, is_enabled = bar, True

    class Trainer:
        progress_bar_callback, is_global_zero = Shown(), True

    with progress(Trainer(), "CausalScore", 8) as advance:  # type: ignore[arg-type]
        for _ in range(3):
            advance()
        (task,) = bar.tasks
        assert (task.completed, task.total) == (3, 8) and re.fullmatch(r"CausalScore, \d+ s left", task.description)
    assert not bar.tasks
    Trainer.progress_bar_callback = None  # type: ignore[assignment]
    with progress(Trainer(), "CausalScore", 8) as advance:  # type: ignore[arg-type]
        advance()


def test_nothing_is_asked_in_the_sanity_check(tmp_path: Path) -> None:
    asked = Asked()
    fit(tmp_path, max_steps=2, validate_every=2, num_sanity_val_steps=2, callbacks=[asked])
    assert asked.steps_asked == [2]
    assert [p.name for p in (tmp_path / "analysis").iterdir()] == ["step_0000002"]


# ------------------------------------------------------------------------------------------------ when


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [2, 4, 6, 8, 10, 11]),
        ({"every": 2}, [4, 8, 11]),
        ({"every": 2, "at_end": False}, [4, 8, 11]),  # the sixth validation is that of the last step
        ({"every": 4, "at_end": False}, [8]),
        ({"every": 0}, [11]),
        ({"every": 0, "fractions": [0.1, 0.5, 1.0], "at_end": False}, [2, 6, 11]),
        ({"every": 0, "fractions": [0.01, 0.02], "at_end": False}, [2]),
    ],
)
def test_schedule(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    asked = Asked(**options)
    fit(tmp_path, max_steps=11, validate_every=2, callbacks=[asked])
    assert asked.steps_asked == steps


def test_the_end_may_lie_between_two_validations(tmp_path: Path) -> None:
    """Under Lightning's own trainer the last step need not be validated."""
    asked = Asked(every=0)
    trainer = pl.Trainer(
        max_steps=3, val_check_interval=2, check_val_every_n_epoch=None, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model(), datamodule=Toy())
    trainer = pl.Trainer(
        max_steps=3, val_check_interval=2, check_val_every_n_epoch=None, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[asked],
    )  # fmt: skip
    trainer.fit(model(), datamodule=Toy())
    assert asked.steps_asked == [3] and (tmp_path / "analysis" / "step_0000003" / "Asked.json").exists()


def test_the_schedule_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole, first, second = Asked(every=3, at_end=False), Asked(every=3, at_end=False), Asked(every=3, at_end=False)
    fit(tmp_path / "whole", max_steps=12, validate_every=2, callbacks=[whole])
    fit(tmp_path / "parts", max_steps=4, validate_every=2, callbacks=[first])
    fit(
        tmp_path / "parts",
        str(tmp_path / "parts/checkpoints/last.ckpt"),
        max_steps=12,
        validate_every=2,
        callbacks=[second],
    )
    assert whole.steps_asked == first.steps_asked + second.steps_asked == [6, 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": -1}, "every is -1"),
        ({"windows": 0}, "windows is 0"),
        ({"fractions": [0.5, 1.5]}, "each must be above 0 and at most 1"),
        ({"scale": [1, 0]}, r"scale is \[1, 0\]; it must be"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Asked(**options)


def test_bad_questions_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PreLN has no skip rule 'jump'; known: pass, silent"):
        fit(tmp_path, callbacks=[callbacks.CausalScore(skip="jump", **SMALL)])

    class Short(Toy):
        def windows(self, count: int, length: int, seed: int = 0) -> dict[str, Tensor]:
            raise ValueError("holds 3 windows of 6 tokens, 4 needed")

    trainer = Trainer(max_steps=2, default_root_dir=tmp_path / "b", accelerator="cpu", enable_progress_bar=False,
                      callbacks=[Asked()])  # fmt: skip
    with pytest.raises(ValueError, match="4 needed"):
        trainer.fit(model(), datamodule=Short())
    assert trainer.global_step == 0


# ------------------------------------------------------------------------------------------------ errors


class Breaks(Diagnostic):
    """Fails at one step, in the middle of a forward."""

    def __init__(self, step: int = 2, **options: Any) -> None:
        super().__init__(**{**SMALL, **options})
        self.step, self.now = step, 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.now = trainer.global_step

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        def see(*call: Any) -> None:
            if self.now == self.step:
                raise ZeroDivisionError("in the middle")

        with rerouted(subject.decoder, (1, 0)):
            subject.watch(batch, see)
        return {"fine": 1.0}


def test_an_error_is_reported_and_training_goes_on(tmp_path: Path, undrawn: None) -> None:
    fit(tmp_path / "without", max_steps=6, validate_every=2)
    with pytest.warns(
        UserWarning, match="Breaks failed at step 2 and was left out: rank 0: ZeroDivisionError: in the middle"
    ):
        _, made = fit(tmp_path / "with", max_steps=6, validate_every=2, callbacks=[Breaks(), *all_of_them()])
    assert column(tmp_path / "with", "train/loss") == column(tmp_path / "without", "train/loss")
    assert list(column(tmp_path / "with", "depth/Breaks/fine")) == [4, 6]
    assert made.decoder.order == (0, 1) and not made.decoder.headless
    assert not [m for m in made.decoder.modules() if m._forward_pre_hooks]


def test_an_error_may_stop(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Breaks failed at step 4"):
        fit(tmp_path, max_steps=6, validate_every=2, callbacks=[Breaks(step=4, on_error="stop")])


def test_an_error_while_drawing_is_no_reason_to_stop(tmp_path: Path) -> None:
    class Scribble(Asked):
        def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
            return {"row": torch.ones(3)}

        def draw(self, answer: Answer) -> Any:
            raise OSError("no ink")

    with pytest.warns(UserWarning, match="Scribble failed at step 2 .* no ink"):
        trainer, _ = fit(tmp_path, max_steps=2, validate_every=2, callbacks=[Scribble()])
    assert trainer.global_step == 2


def test_no_answer_is_an_answer(tmp_path: Path) -> None:
    class Hopeless(Asked):
        def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
            raise NotApplicable("not for you")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*")
        fit(tmp_path, max_steps=2, validate_every=2, callbacks=[Hopeless()])
    answer = Answer.load(tmp_path / "analysis/step_0000002/Hopeless.json")
    assert answer.notes == ["not for you"] and not answer.values and not answer.numbers


def test_sums_are_divided_once(tmp_path: Path) -> None:
    """Batches of unlike size and masks: a mean over tokens is that over all of them; a plain one weighs windows."""

    class Sums(Asked):
        def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
            counted = subject.counted(batch)
            return {
                "tokens": Mean(subject.nll(batch).sum(), counted.sum()),
                "plain": batch["tokens"].double().mean(),
                "rows": torch.tensor(len(counted)),
            }

        def together(self, subject: Subject, share: Share) -> dict[str, Any]:
            return {"counted": share.tokens}

    _, made = fit(tmp_path, max_steps=1, validate_every=1, callbacks=[Sums()])
    numbers = Answer.load(tmp_path / "analysis/step_0000001/Sums.json").numbers
    rows = Toy().val
    tokens, targets = rows.tokens[:4, :6], rows.targets[:4, :6]
    with torch.no_grad():
        nll = made(tokens, targets)
    assert numbers["tokens"] == pytest.approx(float(nll.sum() / (targets >= 0).sum()), rel=1e-6)
    assert numbers["plain"] == pytest.approx(float(tokens.double().mean()))
    assert numbers["counted"] == int((targets >= 0).sum())
