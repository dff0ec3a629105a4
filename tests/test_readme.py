"""What the README shows is true: its commands run, its code runs, its tables are whole."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import report_toy
import torch
from command import run_here
from test_configs import parse_arguments

import callbacks
from depthlit import Decoder, ShapeSpec, config_files, residuals

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["--model.shape", "tiny-L2", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "1"]
"""Laid over a command so that it takes seconds."""


@dataclass
class Example:
    """A fenced block."""

    language: str
    file: str
    text: str


EXAMPLES = [Example(*found) for found in re.findall(r"(?ms)^```(\w+)(?: file=(\S+))?\n(.*?)^```$", README)]
COMMANDS = [
    shlex.split(command)
    for example in EXAMPLES
    if example.language == "bash"
    for line in example.text.splitlines()
    for command in line.split(" && ")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the files that the README writes, importable as from the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for example in EXAMPLES:
        if example.file:
            Path(example.file).write_text(example.text)
    return tmp_path


def test_every_block_says_what_it_is() -> None:
    assert {example.language for example in EXAMPLES} == {"bash", "python", "yaml"}
    assert README.count("```") == 2 * len(EXAMPLES)


def test_two_commands_do_all_the_set_up() -> None:
    first, second = [e.text.strip() for e in EXAMPLES if e.language == "bash"][:2]
    assert first == "pip install -e . && depthlit fit --config quickstart"
    assert second == "pip install -e '.[test]' && pytest"
    assert re.search(rf"(?m)^\(?{re.escape(second)}\)?$", (ROOT / ".ci" / "run").read_text())


def test_the_python_runs(folder: Path) -> None:
    for example in EXAMPLES:
        if example.language == "python" and not example.file:
            exec(compile(example.text, "README.md", "exec"), {"__name__": "__main__"})


def test_the_yaml_is_a_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for example in EXAMPLES:
        if example.language == "yaml":
            Path("example.yaml").write_text(example.text)
            parse_arguments(["fit", "--config", "example.yaml"], monkeypatch)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "depthlit"], ids=" ".join)
def test_a_command_parses(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("runs/quickstart")  # as the first command leaves it
    for checkpoint in (run / "checkpoints" / "last.ckpt", Path("runs/whole.ckpt")):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.touch()
    (run / "config.yaml").write_text(config_files.packaged()["quickstart"].read_text())
    monkeypatch.setattr(sys, "argv", command)
    words = [word for word in command[1:] if word != "--print_config"]
    parse_arguments(words, monkeypatch)


def test_the_commands_of_a_first_hour_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quickstart, another design, one of your own, a question to the trained model; smaller, but as shown."""
    done = 0
    for _, *words in (c for c in COMMANDS if c[0] == "depthlit"):
        if {"quickstart", "validate"} & set(words):
            small = SMALL if words[0] == "fit" else SMALL[-2:]
            result = run_here([*words, *small], monkeypatch, capsys) if "data/corpus" not in words else None
            assert result is None or result.code == 0, (words, result.err)
            done += result is not None
    assert done >= 5
    assert Path("runs/quickstart/analysis/step_0000001/CausalScore.png").is_file()


def test_text_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("corpus.jsonl").write_text("".join(f'{{"text": "line {i} of many, {i * 7919 % 1000}"}}\n' for i in range(900)))
    (prepare,) = [c for c in COMMANDS if c[:2] == ["python", "tools/prepare.py"]]
    monkeypatch.setattr(sys, "argv", prepare[1:])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "tools" / "prepare.py"), run_name="__main__")
        sys.exit(0)
    assert left.value.code in (0, None) and Path("data/corpus/manifest.json").is_file()
    (train,) = [c for c in COMMANDS if "data/corpus" in c and c[0] == "depthlit"]
    assert run_here([*train[1:], *SMALL], monkeypatch, capsys).code == 0


def test_the_other_tools_run(folder: Path) -> None:
    report_toy.aspect(folder / "runs" / "wav-cpu", seeds=(0, 1), designs=("PreLN", "HC"))  # as a sweep leaves it
    others = [c for c in COMMANDS if c[0] == "python" and "tools/prepare.py" not in c]
    assert len(others) >= 4
    for _, script, *words in others:
        arguments = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
        if script == "tools/sweep.py" and "--dry" not in arguments:
            arguments.append("--dry")
        if script == "tools/convert.py":  # what it converts is made in its own tests
            arguments.append("--help")
        done = subprocess.run([sys.executable, ROOT / script, *arguments], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, (script, done.stderr)


def test_the_table_of_designs_is_whole() -> None:
    section = README.split("## Residual designs")[1].split("\n### ")[0]
    assert sorted(re.findall(r"(?m)^\| `(\w+)` \|", section)) == sorted(residuals.__all__)


def test_the_table_of_diagnostics_is_whole() -> None:
    section = README.split("## Diagnostics")[1].split("\n## ")[0]
    assert sorted(re.findall(r"(?m)^\| `(\w+)` \|", section)) == sorted(callbacks.__all__)


def test_a_diagnostic_of_ones_own(folder: Path) -> None:
    from length import StateLength  # type: ignore[import-not-found]

    shape = ShapeSpec(3, 32, n_head=4, vocab_size=61)
    decoder = Decoder(shape, getattr(residuals, residuals.BASELINE)(), seed=0)
    asked = StateLength()
    answer = asked.ask(decoder, torch.randint(0, 61, (2, 9)))
    assert answer.values["length"].shape == (4,) and answer.numbers["growth"] > 0 and asked.draw(answer)


def test_what_is_named_is_there() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"\]\(([^)#]+)\)", text)
        named += re.findall(r"`((?:depthlit|callbacks|configs|tools|tests)/[\w/.]*)`", text)
        missing = [name for name in named if not (ROOT / name).exists()]
        assert len(named) > 3 and not missing, (page, missing)
