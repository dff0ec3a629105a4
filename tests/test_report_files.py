"""The files of a report: what it replaces, what it leaves alone, where it refuses, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import report_toy as toy

ROOT = Path(__file__).resolve().parent.parent


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    run = toy.run(tmp_path / "run", diagnostics=())
    output = toy.made_of([run], tmp_path / "report", pdf=True)[0]
    assert list(output.glob("figures/*")) == []
    (output / "figures" / "fig02_aspect-9.svg").touch()
    others = [output / "notes.md", output / "figures" / "mine-1.svg", output / "tables" / "notes" / "a.txt",
              toy.run(output / "kept-run", diagnostics=()) / "env.json"]  # fmt: skip
    for path in others[:3]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    toy.made_of([run, output], output)
    assert not (output / "figures" / "fig02_aspect-9.svg").exists()
    assert all(path.read_text() == "mine" for path in others[:3]) and others[3].is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "run"]
    assert not list(output.glob(".*"))
    toy.made_of([run], tmp_path / "deep" / "empty")


def refused_run(folder: Path) -> Path:
    return toy.run(folder, diagnostics=())


def refused_page(folder: Path) -> Path:
    folder.mkdir()
    (folder / "index.html").write_bytes(b"<title>mine \xff</title>")
    return folder


def refused_figures(folder: Path) -> Path:
    (folder / "figures").mkdir(parents=True)
    return folder


def refused_file(folder: Path) -> Path:
    folder.touch()
    return folder


@pytest.mark.parametrize("make", [refused_run, refused_page, refused_figures, refused_file])
def test_what_is_no_report_is_left_as_it_is(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    run = toy.run(tmp_path / "run", diagnostics=())
    output = make(tmp_path / "output")
    before = sorted(output.rglob("*"))
    with pytest.raises(ValueError, match="output exists and is no report; name another --output"):
        toy.made_of([run], output)
    assert sorted(output.rglob("*")) == before


@pytest.mark.parametrize("inputs", [".", "figures", "figures/run"])
def test_runs_are_not_read_from_where_the_report_writes(tmp_path: Path, inputs: str) -> None:
    output = toy.made_of([toy.run(tmp_path / "run", diagnostics=())], tmp_path / "report")[0]
    run = toy.run(output / "figures" / "run", diagnostics=())
    with pytest.raises(ValueError, match=r"lies in .*figures, which the report fills"):
        toy.made_of([output / inputs], output)
    assert (run / "env.json").is_file()


def test_a_link_to_the_output_is_followed(tmp_path: Path) -> None:
    run = toy.run(tmp_path / "run", diagnostics=())
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for _ in range(2):
        toy.made_of([run], tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "index.html").is_file()


def test_what_fails_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy.run(tmp_path / "run", diagnostics=())
    output = toy.made_of([run], tmp_path / "report")[0]
    before = (output / "index.html").read_bytes()

    def fails(*parts: object) -> str:
        raise RuntimeError("planted")

    monkeypatch.setattr("depthlit.report.page.page", fails)
    with pytest.raises(RuntimeError, match="planted"):
        toy.made_of([run], output)
    assert (output / "index.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "run"]


def test_figures_come_as_pdf_too(tmp_path: Path) -> None:
    runs = toy.aspect(tmp_path / "runs", seeds=(0,), designs=("PreLN",), diagnostics=())
    output = toy.made_of([runs], tmp_path / "report", pdf=True)[0]
    assert (output / "figures" / "fig02_aspect-1.pdf").read_bytes().startswith(b"%PDF")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    main = import_module("report").main
    run = toy.run(tmp_path / "runs" / "run", diagnostics=())
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--output", "made"]) == 0
    said = capsys.readouterr()
    assert "1 runs, 0 folders or files left out" in said.out and "made/index.html" in said.out
    assert main(["nowhere"]) == 2
    assert capsys.readouterr().err == (
        "report.py: error: nowhere is no folder; name run folders, or folders that hold some\n"
    )
    assert run.is_dir() and not (tmp_path / "report").exists()
