"""The page in a real browser, and a report of two hundred runs."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import report_toy as toy
import yaml

from depthlit.report.write import write

pytestmark = pytest.mark.slow
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH (apt-get install chromium)")
DARK, LIGHT = "0", "1"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = toy.aspect(folder / "aspect", seeds=(0, 1))
    toy.run(folder / "loose" / "half", "HC", steps=20, diagnostics=())
    (toy.run(folder / "loose" / "bad", diagnostics=()) / "env.json").write_text("{")
    write([runs, folder / "loose"], folder / "report")
    return folder / "report" / "index.html"


def ask(page: Path, state: str, folder: Path, *words: str) -> str:
    """What the browser prints, with nothing it could reach outside."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
               "--virtual-time-budget=3000", "--proxy-server=127.0.0.1:9", *words, f"file://{page}{state}"]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def shown(dom: str) -> list[str]:
    """Runs that are not hidden."""
    found = re.findall(r'<details class="run"([^>]*)>', dom)
    assert found
    return [re.search(r'id="run-([^"]*)"', one)[1] for one in found if " hidden" not in one]  # type: ignore[index]


@needs_browser
def test_filters(page: Path, tmp_path: Path) -> None:
    dom = ask(page, "", tmp_path, "--dump-dom")
    assert len(shown(dom)) == 13 and "13 of 13 runs" in dom and '<form id="filters">' in dom
    assert set(shown(ask(page, "#design=HC", tmp_path, "--dump-dom"))) == {
        "hc_l4_s0", "hc_l4_s1", "hc_l8_s0", "hc_l8_s1", "half"
    }  # fmt: skip
    assert set(shown(ask(page, "#design=HC&shape=L8+d46", tmp_path, "--dump-dom"))) == {"hc_l8_s0", "hc_l8_s1"}
    assert shown(ask(page, "#status=unfinished", tmp_path, "--dump-dom")) == ["half"]
    assert set(shown(ask(page, "#words=ATTNRES", tmp_path, "--dump-dom"))) == {
        f"blockattnres_l{L}_s{seed}" for L in (4, 8) for seed in (0, 1)
    }  # fmt: skip
    dom = ask(page, "#study=aspect&words=nothing", tmp_path, "--dump-dom")
    assert shown(dom) == [] and "0 of 13 runs" in dom


@needs_browser
def test_a_run_opens_from_its_address(page: Path, tmp_path: Path) -> None:
    dom = ask(page, "#open=hc_l8_s1", tmp_path, "--dump-dom")
    assert re.search(r'<details class="run" id="run-hc_l8_s1"[^>]* open=""', dom)


@needs_browser
@pytest.mark.parametrize(("scheme", "bright"), [(LIGHT, True), (DARK, False)])
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_is_light_or_dark_as_the_reader_prefers(
    page: Path, tmp_path: Path, scheme: str, bright: bool, width: int
) -> None:
    picture = tmp_path / "shot.png"
    ask(page, "", tmp_path / "profile", f"--screenshot={picture}", f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={scheme}")  # fmt: skip
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, 900)
    from PIL import Image

    corner = Image.open(picture).convert("RGB").getpixel((2, 2))
    assert isinstance(corner, tuple) and (min(corner) > 230 if bright else max(corner) < 40)


def test_two_hundred_runs_and_broken_ones_among_them(tmp_path: Path) -> None:
    """All of them are on the page, which stays small enough to open; how fast is measured elsewhere."""
    runs = toy.many(tmp_path / "many")
    for name, spoil in (("truncated", "env.json"), ("gone", "metrics.csv"), ("old", "config.yaml")):
        bad = toy.run(tmp_path / name, diagnostics=())
        (bad / spoil).write_text(yaml.safe_dump(["no", "mapping"])) if spoil != "metrics.csv" else (
            bad / spoil
        ).unlink()
    found, made = write([tmp_path], tmp_path / "report")
    assert len(found.runs) == len(list(runs.glob("*/env.json"))) == 200
    assert {one.path.name for one in found.broken} == {"truncated", "gone", "old"}
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count('<details class="run"') == 200
    assert len(page) < 25_000_000
    assert {"fig05_angles", "fig06_late_pairs", "fig14_causal_maps", "fig16_angular_maps"} <= {
        one.entry.name for one in made if one.state == "made"
    }  # fmt: skip
