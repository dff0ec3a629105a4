"""tools/results.py: the tables of a results.csv against arithmetic done here."""

from __future__ import annotations

import csv
import math
import re
import runpy
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate

TOOL = Path(__file__).resolve().parents[1] / "tools" / "results.py"
main = runpy.run_path(str(TOOL))["main"]
HEAD = ["run", "design", "depth", "corpus", "seed", "status", "step", "train/loss", "val/loss", "trigram"]
Losses = dict[tuple[str, str], list[float]]


def write(file: Path, losses: Losses, corpus: str = "pydoc") -> Path:
    """One finished run for each loss; NaN is a run that did not end."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(HEAD)
        for (design, depth), values in losses.items():
            for seed, loss in enumerate(values):
                ended = not math.isnan(loss)
                row = [f"{design}{depth}{seed}", design, depth, corpus, seed, "finished" if ended else "failed", 9, 1]
                writer.writerow([*row, *((loss, 2.5) if ended else ("", ""))])
    return file


def density(t: float, freedom: float) -> float:
    """Student's."""
    size = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return float(size * (1 + t * t / freedom) ** (-(freedom + 1) / 2))


def welch(a: list[float], b: list[float]) -> float:
    """p of Welch's test, two-sided, by integrating Student's density."""
    u, v = (float(np.var(x, ddof=1)) / len(x) for x in (a, b))
    t = abs(np.mean(a) - np.mean(b)) / math.sqrt(u + v)
    freedom = (u + v) ** 2 / (u * u / (len(a) - 1) + v * v / (len(b) - 1))
    return 2 * float(integrate.quad(density, t, math.inf, args=(freedom,))[0])


@pytest.fixture
def losses() -> Losses:
    rng = np.random.default_rng(0)
    centre = {"A": 2.0, "B": 2.3, "C": 2.001}
    return {(design, depth): [float(x) for x in centre[design] + 1e-3 * rng.normal(size=2)]
            for design in "ABC" for depth in ("12", "24")}  # fmt: skip


def test_means_and_tests_are_those_of_the_formulas(
    tmp_path: Path, losses: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path / "results.csv", losses))]) == 0
    out = capsys.readouterr().out
    a, b = losses["B", "24"]
    half = 12.7062047 * abs(a - b) / 2  # t(0.975, 1) s / sqrt(2)
    assert f"{(a + b) / 2:.3f} ± {half:.3f} ({a:.3f}, {b:.3f})" in out
    pairs = [(x, y, depth) for depth in ("12", "24") for x, y in combinations("ABC", 2)]
    p = [welch(losses[x, depth], losses[y, depth]) for x, y, depth in pairs]
    order, least, raised = sorted(range(len(p)), key=p.__getitem__), 0.0, dict[int, float]()
    for rank, i in enumerate(order):
        raised[i] = least = max(least, min(1.0, (len(p) - rank) * p[i]))
    apart = {pairs[i] for i in raised if raised[i] < 0.05}
    assert 0 < len(apart) < len(pairs) and f"6 of 6 pairs could be tested, {len(apart)} are separated" in out
    for x, y, depth in pairs:
        line = re.search(rf"^{depth}\s+{x} - {y}\s.*", out, re.MULTILINE)
        assert bool(line) == ((x, y, depth) in apart)
        if line:
            found = float(line[0].split()[-2])
            assert found == pytest.approx(raised[pairs.index((x, y, depth))], abs=6e-4)
            assert line[0].endswith("lower" if np.mean(losses[x, depth]) < np.mean(losses[y, depth]) else "higher")
    assert "0 runs above the trigram cross-entropy, 2.500" in out


def test_what_did_not_finish_is_told(tmp_path: Path, losses: Losses, capsys: pytest.CaptureFixture[str]) -> None:
    losses["A", "12"] = [math.nan, 2.6]
    losses["B", "12"] = [math.nan, math.nan]
    assert main([str(write(tmp_path / "results.csv", losses))]) == 0
    out = capsys.readouterr().out
    assert "2.600, 1 of 2 not finished" in out and "-, 2 of 2 not finished" in out
    assert "3 of 4 pairs could be tested" in out and "1 runs above the trigram" in out


def test_each_setting_of_the_other_axes_has_a_table(
    tmp_path: Path, losses: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "results.csv", losses)
    other = write(tmp_path / "other.csv", {key: [math.nan] for key in losses}, "tales").read_text().splitlines()
    file.write_text("\n".join([*file.read_text().splitlines(), *other[1:]]))
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    assert out.index("corpus pydoc") < out.index("| design") < out.index("corpus tales") < out.index("no finished runs")
    assert main([str(file), "--rows", "depth", "--columns", "corpus"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in ("design A", "design B", "design C")]


def test_a_mistake_is_one_line(tmp_path: Path, losses: Losses, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "results.csv", losses)
    (tmp_path / "wrong.csv").write_text("a,b\n")
    for arguments, line in (
        ([str(tmp_path / "absent.csv")], "is no results.csv of a sweep"),
        ([str(tmp_path / "wrong.csv")], "is no results.csv of a sweep"),
        ([str(file), "--rows", "width"], "has no axis width; there are design, depth, corpus"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert line in err and err.count("\n") == 1
