"""Diagnostics beside training: they change nothing, come when they should, and leave files that speak."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from models import known, label
from rich.progress import Progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from training_toy import SHAPE, Toy, column, fit, model

import callbacks
from depthlit import plots, residuals
from depthlit.connection import ResidualStrategy
from depthlit.diagnostic import Answer, Batch, Diagnostic, Mean, NotApplicable, Share, Subject
from depthlit.interventions import rerouted
from depthlit.shape import ShapeSpec
from depthlit.trainer import Trainer
from depthlit.untouched import progress

HERE = Path(__file__).parent
DIAGNOSTICS = [
    cls
    for cls in map(vars(callbacks).get, callbacks.__all__)
    if issubclass(cls, Diagnostic) and cls.metric is Diagnostic.metric
]
"""All that ask about windows of validation text, by discovery."""
SMALL: dict[str, Any] = {"windows": 4, "length": 6, "batch_size": 3}


def all_of_them(**options: Any) -> list[Any]:
    return [cls(**{**SMALL, **options}) for cls in DIAGNOSTICS]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out, which take longer than the tiny networks."""
    for cls in DIAGNOSTICS:
        monkeypatch.setattr(cls, "draw", lambda self, answer: None)


class Asked(Diagnostic):
    """At which steps the question came."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**SMALL, **options})
        self.steps_asked: list[int] = []
        self.trainer_of: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.trainer_of = trainer

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        step = self.trainer_of.global_step
        if not self.steps_asked or self.steps_asked[-1] != step:
            self.steps_asked.append(step)
        return {"one": 1.0}


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


# ------------------------------------------------------------------------------------------------ what is left behind


def test_files_logs_and_figures(tmp_path: Path) -> None:
    stop = EarlyStopping("depth/AngularDistance/mean_step", patience=100)
    trainer, _ = fit(tmp_path, max_steps=4, validate_every=2, callbacks=[*all_of_them(), stop])
    assert not list(tmp_path.rglob("*.partial"))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "images": 0}).Reload()
    for cls in DIAGNOSTICS:
        name = cls.__name__
        for step in (2, 4):
            folder = tmp_path / "analysis" / f"step_{step:07d}"
            content = json.loads((folder / f"{name}.json").read_text(), parse_constant=pytest.fail)
            assert content["step"] == step and content["version"] == 1 and len(content["definition"]) > 200
            assert (
                content["windows"]["count"] == 4
                and content["windows"]["length"] == 6
                and content["windows"]["tokens"] > 5
            )
            assert content["options"]["windows"] == 4 and content["model"]["strategy"] == "PreLN"
            assert "arXiv" in content["definition"] or name in ("RoutingTelemetry",)
            answer = Answer.load(folder / f"{name}.json")
            assert bool(answer.values) != bool(answer.notes)
            assert (folder / f"{name}.png").exists() == bool(answer.values)
            turns = 2 if answer.values else 1
            assert answer.cost["block_evaluations"] == turns * cls(**SMALL).steps(tuple(range(SHAPE.n_layer)))
            for key, value in answer.numbers.items():
                logged = {e.step: e.value for e in events.Scalars(f"depth/{name}/{key}")}
                assert logged[step] == pytest.approx(value, rel=1e-6, nan_ok=True)
                assert column(tmp_path, f"depth/{name}/{key}")[step] == pytest.approx(value, nan_ok=True)
        if answer.values:
            assert [e.step for e in events.Images(f"depth/{name}")] == [2, 4]
    assert "depth/CausalScore/R_causal" in trainer.callback_metrics
    assert "matplotlib.pyplot" not in sys.modules or __import__("matplotlib.pyplot").pyplot.get_fignums() == []


def test_figures_are_redrawn_without_the_model(tmp_path: Path) -> None:
    """In a fresh process, from the files alone: the same picture, byte for byte; and on another scale another."""
    fit(tmp_path, max_steps=2, validate_every=2, callbacks=all_of_them())
    folder = tmp_path / "analysis" / "step_0000002"
    pictures = {p: p.read_bytes() for p in folder.glob("*.png")}
    assert len(pictures) >= 6
    for p in pictures:
        p.unlink()
    files = [str(p.with_suffix(".json")) for p in pictures]
    done = subprocess.run([sys.executable, "-m", "depthlit.plots", *files], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(str(p) for p in pictures)
    for p, content in pictures.items():
        assert p.read_bytes() == content, p.name
    angles = folder / "AngularDistance.json"
    assert (
        plots.redraw(angles, scale=(0.0, 0.9), output=tmp_path / "x.png").read_bytes()
        != pictures[angles.with_suffix(".png")]
    )
    assert plots.shared([angles, angles])[0].read_bytes()
    answer = Answer.load(angles)
    answer.diagnostic = "no_such_file.Anything"
    with pytest.raises(ValueError, match="cannot be imported"):
        plots.redraw(answer.save(tmp_path / "elsewhere"))


def test_validate_gives_the_numbers_of_the_run(tmp_path: Path, undrawn: None) -> None:
    """`validate` on the checkpoint of step 4, with Lightning at step 0: the same files as the run made at step 4."""
    fit(tmp_path, max_steps=6, validate_every=2, keep_checkpoints=None, callbacks=all_of_them(),
        settings={"residual": known()[0]})  # fmt: skip
    folder = tmp_path / "analysis" / "step_0000004"
    before = {p.stem: Answer.load(p) for p in folder.glob("*.json")}
    for p in folder.iterdir():
        p.unlink()
    checkpoint = next((tmp_path / "checkpoints").glob("*4.ckpt"))
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, callbacks=all_of_them(every=0)
    )
    trainer.validate(model(residual=known()[0]), datamodule=Toy(), ckpt_path=checkpoint, verbose=False)
    assert {p.stem for p in folder.glob("*.json")} == set(before) == {cls.__name__ for cls in DIAGNOSTICS}
    for name, answer in before.items():
        again = Answer.load(folder / f"{name}.json")
        assert again.numbers == pytest.approx(answer.numbers, rel=1e-6, nan_ok=True) and again.step == 4
        for key, value in answer.values.items():
            np.testing.assert_allclose(again.values[key], value, rtol=1e-5, atol=1e-7)


def test_numbers_from_python_are_those_of_the_run(tmp_path: Path, undrawn: None) -> None:
    _, made = fit(tmp_path, max_steps=2, validate_every=2, callbacks=all_of_them())
    rows = Toy().val
    batch = {"tokens": rows.tokens[:4, :6], "targets": rows.targets[:4, :6]}
    for cls in DIAGNOSTICS:
        answer = cls(**SMALL).ask(made, batch)
        saved = Answer.load(tmp_path / "analysis" / "step_0000002" / f"{cls.__name__}.json")
        assert saved.numbers == pytest.approx(answer.numbers, rel=1e-5, nan_ok=True)


USERS_FILE = '''
"""How long the state is at every depth."""
import torch
from depthlit import plots, residuals
from depthlit.diagnostic import Diagnostic


class StateLength(Diagnostic):
    """|z_l|, the mean over tokens.

    Args:
        power: of the length.
    """

    draws = "length"

    def __init__(self, power: float = 1.0, **schedule):
        super().__init__(**schedule)
        self.power = power

    def measure(self, subject, batch):
        length = torch.stack([z.norm(dim=-1).mean() ** self.power for z in subject.states(batch)])
        return {"length": length, "growth": length[-1] / length[0]}

    def draw(self, answer):
        figure, axes = plots.blank(answer.title)
        plots.lines(axes, {"": answer.values["length"]}, "length of the state", "layer", "|z|", scale=self.scale)
        return figure
'''


def test_a_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty lines get windows, schedule, logs, files and a figure that can be drawn again."""
    (tmp_path / "state_length.py").write_text(USERS_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    from state_length import StateLength  # type: ignore[import-not-found]

    fit(
        tmp_path,
        max_steps=4,
        validate_every=2,
        callbacks=[StateLength(power=2.0, **SMALL), StateLength(name="plain", **SMALL)],
    )
    folder = tmp_path / "analysis" / "step_0000004"
    two, one = Answer.load(folder / "StateLength.json"), Answer.load(folder / "plain.json")
    assert two.options["power"] == 2.0 and "mean over tokens" in two.definition and "power" not in two.definition
    assert two.values["length"].shape == (SHAPE.n_layer + 1,) and one.numbers["growth"] > 0
    assert list(column(tmp_path, "depth/plain/growth")) == [2, 4]
    picture = (folder / "StateLength.png").read_bytes()
    assert plots.redraw(folder / "StateLength.json").read_bytes() == picture


def test_two_of_one_name(tmp_path: Path) -> None:
    """Alike: one of them is enough, as when a config is laid over that of a run which has it. Unlike: refused."""
    assert len([c for c in Trainer(callbacks=[Asked(), Asked()]).callbacks if isinstance(c, Asked)]) == 1  # type: ignore[attr-defined]
    assert len([c for c in Trainer(callbacks=[Asked(), Asked(name="b")]).callbacks if isinstance(c, Asked)]) == 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="two diagnostics are called Asked and differ: give one another `name`"):
        Trainer(callbacks=[Asked(), Asked(seed=1)])


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


# ------------------------------------------------------------------------------------------------ killed


def run_script(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, str(HERE / "diagnostics_toy.py"), str(root), *words],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


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
