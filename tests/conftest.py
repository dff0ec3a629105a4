"""One thread, since a second one makes every test on tensors this small several times slower; short windows of depth,
so that toys of a few layers have several."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import pytest
import torch
import yaml
from command import Command, run_here, small_corpus

from depthlit.residuals import bank

torch.set_num_threads(1)
bank.WINDOW = 3


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("small"))


@pytest.fixture
def depthlit(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command in this process, in an empty folder that holds tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    tiny = {
        "trainer": {"accelerator": "cpu", "max_steps": 4, "validate_every": 2, "default_root_dir": "run"},
        "model": {"shape": "tiny-L2", "residual": "PreLN", "schedule": {"total_steps": 8}},
        "data": {"path": str(corpus), "block_size": 16, "batch_size": 2},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    return lambda *arguments: run_here(list(arguments), monkeypatch, capsys)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of diagnostics out, which take longer than the tiny networks."""
    from diagnostics_asked import DIAGNOSTICS

    for cls in DIAGNOSTICS:
        monkeypatch.setattr(cls, "draw", lambda self, answer: None)
