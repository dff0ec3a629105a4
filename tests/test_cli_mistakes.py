"""What the command line says to a person who got something wrong."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from command import Command

from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.parsing import Parser

MISTAKES = {
    "unknown strategy": (["--model.residual", "AttnRes"], 2, ["AttnRes", "PreLN", "DeepNorm"]),
    "misspelt strategy": (["--model.residual", "PreNL"], 2, ["did you mean PreLN?"]),
    "setting of a strategy": (["--model.residual.block_size", "8"], 2, ["PreLN has no setting block_size"]),
    "value of a setting": (["--model.residual", "HC", "--model.residual.streams", "four"], 2, ["HC", "streams", "int"]),
    "class path": (["--model.residual", "no.such.Strategy"], 2, ["no.such.Strategy", "No module named 'no'"]),
    "class path of your own": (["--model.residual", "half.Half"], 2, ["No module named 'half'; searched /"]),
    "class of another kind": (["--model.residual", "depthlit.shape.ShapeSpec"], 2, ["ShapeSpec is not a Residual"]),
    "optimizer": (["--model.optimizer.betas", "[2, 3]"], 1, ["optimizer.betas are [2.0, 3.0]"]),
    "folder is a file": (["--trainer.default_root_dir", "tiny.yaml"], 1, ["tiny.yaml cannot be a run folder"]),
    "unknown shape": (["--model.shape", "400m-L25"], 2, ["model.shape", "400m-L24"]),
    "width": (["--model.shape.d_model", "30"], 1, ["d_model 30 is not divisible by n_head 4"]),
    "vocabulary": (["--model.shape.vocab_size", "7"], 1, ["vocab_size is 7, the data has 27 ids", "vocab_multiple"]),
    "odd head": (["--model.shape.d_model", "36", "--model.shape.n_head", "12"], 1, ["odd size 3", "d_model 48"]),
    "misspelt key": (["--model.residul", "PreLN"], 2, ["no key model.residul", "did you mean model.residual"]),
    "abbreviated key": (["--trainer.max_step", "3"], 2, ["no key trainer.max_step", "did you mean trainer.max_steps"]),
    "type": (["--trainer.max_steps", "many"], 2, ["trainer.max_steps is many", "expected int"]),
    "no value": (["--trainer.max_steps"], 2, ["trainer.max_steps", "expected one argument"]),
    "stray word": (["tiny"], 2, ["tiny"]),
    "missing config": (["--config", "quickstat"], 2, ["quickstat", "did you mean quickstart"]),
    "missing file": (["--config", "configs/nothing.yaml"], 2, ["nothing.yaml", "no such file"]),
    "callback": (["--trainer.callbacks+=CausalScor"], 2, ["CausalScor", "did you mean CausalScore"]),
    "callback's setting": (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr", "x"], 2, ["monitor"]),
    "callback's number": (
        ["--trainer.callbacks+={class_path: LogitLens, init_args: {windows: 0}}"],
        1,
        ["windows is 0"],
    ),
    "seed": (["--seed_everything", "-1"], 1, ["seed_everything: -1 is not in bounds"]),
    "engine": (["--trainer.strategy", "dpp"], 1, ["dpp", "ddp"]),
    "checkpoint": (["--ckpt_path", "no.ckpt"], 1, ["no.ckpt", "no such checkpoint"]),
    "not a checkpoint": (["--ckpt_path", "tiny.yaml"], 1, ["tiny.yaml cannot be read as a checkpoint"]),
    "micro-batches": (["--trainer.val_check_interval", "3"], 1, ["trainer.validate_every"]),
    "no folder": (["--data.path", "nowhere"], 1, ["nowhere", "tools/prepare.py"]),
    "block": (
        ["--data.block_size", "100000", "--model.shape.max_seq_len", "100000"],
        1,
        ["blocks of 100000", "smaller block_size"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_one_line(depthlit: Command, mistake: str) -> None:
    arguments, code, fragments = MISTAKES[mistake]
    done = depthlit("fit", "--config", "tiny.yaml", *arguments)
    said = done.complaint()
    assert done.code == code
    assert all(fragment in said for fragment in fragments), said
    assert len(said) < 900


FILES = {
    "model:\n  residul: PreLN\n": ["no key model.residul (bad.yaml:2)", "did you mean model.residual?"],
    "trainer:\n  max_step: 3\n": ["no key trainer.max_step (bad.yaml:2)", "did you mean trainer.max_steps"],
    "modle:\n  init_seed: 1\n": ["no key modle", "(bad.yaml:", "did you mean model"],
    "model:\n  residual: Pre\n": ["no residual strategy Pre (bad.yaml:2)", "known: "],
    "model:\n  residual:\n    class_path: LNS\n    init_args: {scal: 3}\n": ["LNS has no setting scal (bad.yaml:4)"],
    "model:\n  shape: {n_layr: 3}\n": ["n_layr (bad.yaml:2)", "did you mean model.shape.n_layer"],
    "model: {shape: 400m}\n": ["model.shape (bad.yaml:1): no shape is named '400m'"],
    "model:\n  init_seed: x\n": ["model.init_seed is x (bad.yaml:2); expected int"],
    "trainer:\n  callbacks: [CausalScor]\n": ["no class CausalScor (bad.yaml:2)", "CausalScore"],
    "model: [\n": ["bad.yaml:2: not YAML"],
    "text\n": ["bad.yaml: a config is a mapping"],
}


@pytest.mark.parametrize("strategy", residuals.__all__)
def test_the_type_of_every_setting_is_known(strategy: str) -> None:
    """What jsonargparse cannot resolve it would accept unseen."""
    parser = Parser(exit_on_error=False)
    parser.add_argument("--residual", type=ResidualStrategy)
    page = io.StringIO()
    with contextlib.redirect_stdout(page), pytest.raises(SystemExit):
        parser.parse_args([f"--residual.help={strategy}"])
    assert strategy in page.getvalue() and "Unvalidated" not in page.getvalue()


@pytest.mark.parametrize("text", FILES)
def test_a_mistake_in_a_file_is_shown_with_its_line(depthlit: Command, text: str) -> None:
    Path("bad.yaml").write_text(text)
    done = depthlit("fit", "--config", "tiny.yaml", "--config", "bad.yaml")
    said = done.complaint()
    assert done.code == 2
    assert all(fragment in said for fragment in FILES[text]), said


def test_what_is_missing_is_named(depthlit: Command) -> None:
    said = depthlit("fit").complaint()
    assert "model.residual" in said and "--config quickstart" in said


def test_a_folder_that_is_no_corpus(depthlit: Command, corpus: Path) -> None:
    Path("empty").mkdir()
    assert "manifest.json" in depthlit("fit", "--config", "tiny.yaml", "--data.path", "empty").complaint()
    shutil.copytree(corpus, "torn")
    shutil.rmtree("torn/train")
    said = depthlit("fit", "--config", "tiny.yaml", "--data.path", "torn").complaint()
    assert "torn/train" in said and "prepare" in said


def test_a_token_beyond_the_vocabulary(depthlit: Command, corpus: Path) -> None:
    shutil.copytree(corpus, "odd")
    manifest = json.loads(Path("odd/manifest.json").read_text())
    Path("odd/manifest.json").write_text(json.dumps({**manifest, "vocab_size": 5}))
    said = depthlit("fit", "--config", "tiny.yaml", "--data.path", "odd").complaint()
    assert "token id" in said and "5" in said


def test_gpus_that_are_not_there(depthlit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = depthlit("fit", "--config", "tiny.yaml", "--trainer.accelerator", "gpu").complaint()
    assert said.startswith("trainer.accelerator is gpu, and torch finds no GPU") and "accelerator cpu" in said
    hoped = ["--trainer.accelerator", "auto", "--trainer.precision"]
    for precision, told in (("32-true", 0), ("bf16-mixed", 1)):
        done = depthlit("fit", "--config", "tiny.yaml", *hoped, precision, "--trainer.default_root_dir", precision)
        assert done.code == 0 and done.err.count("torch finds no GPU here: this will run on the CPU") == told


def test_more_processes_than_devices(depthlit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun launches them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = depthlit("fit", "--config", "tiny.yaml").complaint()
    assert said.startswith("2 processes were launched on this machine, and trainer.devices comes to 1")
    assert "--trainer.devices 2" in said and not Path("run").exists()


def test_deepspeed_is_asked_for_where_it_is_not_installed(depthlit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", False)
    said = depthlit("fit", "--config", "tiny.yaml", "--trainer.strategy", "deepspeed_stage_2").complaint()
    assert "pip install" in said and "deepspeed" in said


def test_a_traceback_on_request(depthlit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHLIT_DEBUG", "1")
    with pytest.raises(ValueError, match="not divisible"):
        depthlit("fit", "--config", "tiny.yaml", "--model.shape.d_model", "30")


def test_a_defect_keeps_its_traceback(depthlit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr("depthlit.module.LanguageModel.training_step", broken)
    with pytest.raises(RuntimeError, match="inconsistent"):
        depthlit("fit", "--config", "tiny.yaml")
