"""The command line for tests: in this process where that will do, else as a process of its own."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from depthlit import cli
from depthlit.data.prepare import Preparation, prepare


@dataclass
class Result:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def complaint(self) -> str:
        """The one line about a mistake; fails if there is another or a traceback."""
        assert self.code != 0, f"no error:\n{self.out}"
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("depthlit: error: ")]
        assert len(lines) == 1 and self.err.rstrip().endswith(lines[0]), self.err
        return lines[0].removeprefix("depthlit: error: ")


Command = Callable[..., Result]


def run_here(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Result:
    """`depthlit ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["depthlit", *arguments])
    capsys.readouterr()
    code = 0
    try:
        cli.run()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def start(arguments: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """`depthlit ARGUMENTS` as a process, and leader of a session, of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "depthlit", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> Result:
    """Wait; past the time limit kill the whole session, for a stuck rank ignores SIGTERM."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return Result(process.returncode, out, err)


def small_corpus(folder: Path) -> Path:
    """A prepared corpus of a few thousand characters."""
    source = folder / "source.jsonl"
    source.write_text(
        "".join(f'{{"text": "the {i}th of many lines, each {i * 7919 % 1000} long"}}\n' for i in range(300))
    )
    prepare(Preparation([str(source)], "chars", val_fraction=0.1), folder / "corpus", quiet=True)
    return folder / "corpus"


def figures(run: str) -> dict[int, dict[str, float]]:
    """metrics.csv of a run: step -> figures."""
    rows: dict[int, dict[str, float]] = {}
    with open(Path(run) / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(int(row["step"]), {}).update({key: float(x) for key, x in row.items() if x})
    return rows
