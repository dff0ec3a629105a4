"""What diagnostics leave behind: files, logs and figures that speak, from a run, from `validate` and from Python."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from diagnostics_asked import DIAGNOSTICS, SMALL, Asked, all_of_them
from lightning.pytorch.callbacks import EarlyStopping
from models import known
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_toy import SHAPE, Toy, column, fit, model

from depthlit import plots
from depthlit.diagnostic import Answer
from depthlit.trainer import Trainer


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
