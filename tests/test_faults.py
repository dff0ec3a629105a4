"""What may befall one of several ranks: none hangs, nothing is lost but the steps since the last checkpoint."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from training_toy import Done, column, fit, script

pytestmark = pytest.mark.slow
PATIENCE = 60
"""Seconds in which all ranks must have ended."""


def struck(root: Path, engine: str, what: str, rank: int) -> Done:
    """Train 12 steps on two ranks; in the sixth something befalls one of them. The last checkpoint is of step 4."""
    done = script(root, timeout=240, **two(engine), fault=[what, 6, rank])
    assert time.time() - (root / "fault").stat().st_mtime < PATIENCE
    assert done.code != 0, done.said
    return done


def two(engine: str) -> dict[str, object]:
    return {"devices": 2, "strategy": engine, "data": {"batch_size": 2}}


def newest(root: Path) -> str:
    return (root / "checkpoints" / "last.ckpt").resolve().name


def goes_on(root: Path, engine: str, other: Path) -> None:
    """Gone on with, the run is the one that nothing befell."""
    done = script(root, timeout=240, ckpt_path=str(root / "checkpoints" / "last.ckpt"), **two(engine))
    assert done.code == 0, done.said
    fit(other, data={"batch_size": 4})
    assert not list((root / "checkpoints").glob(".*"))
    for tag in ("train/loss", "val/loss"):
        assert column(root, tag) == pytest.approx(column(other, tag), abs=1e-5)


@pytest.mark.parametrize("engine, rank", [("ddp", 0), ("ddp", 1), ("fsdp2", 1), ("zero2", 1)])
def test_a_rank_is_killed(engine: str, rank: int, tmp_path: Path) -> None:
    struck(tmp_path / "run", engine, "SIGKILL", rank)
    assert newest(tmp_path / "run") == "step_0000004.ckpt"
    goes_on(tmp_path / "run", engine, tmp_path / "other")


@pytest.mark.parametrize("engine, rank", [("ddp", 0), ("fsdp2", 1), ("zero3", 1)])
def test_a_rank_raises(engine: str, rank: int, tmp_path: Path) -> None:
    done = struck(tmp_path, engine, "raises", rank)
    assert "ZeroDivisionError: planted" in done.said and newest(tmp_path) == "step_0000004.ckpt"


@pytest.mark.parametrize("engine, rank", [("ddp", 0), ("fsdp2", 1), ("zero2", 1)])
def test_a_rank_s_disk_is_full(engine: str, rank: int, tmp_path: Path) -> None:
    done = struck(tmp_path / "run", engine, "full", rank)
    reason = "File too large|is the disk full"
    assert re.search(rf"step 8: no checkpoint could be written \(rank {rank}: .*({reason})", done.said), done.said
    assert newest(tmp_path / "run") == "step_0000004.ckpt"
    goes_on(tmp_path / "run", engine, tmp_path / "other")


@pytest.mark.parametrize("engine, name, rank", [("ddp", "SIGINT", 0), ("fsdp2", "SIGTERM", 1), ("zero2", "SIGUSR1", 1)])
def test_a_rank_is_asked_to_leave(engine: str, name: str, rank: int, tmp_path: Path) -> None:
    """All finish that step and save it, once."""
    done = struck(tmp_path / "run", engine, name, rank)
    assert done.code == 128 + signal.Signals[name]
    assert done.said.count(f"{name} behind step 6: stopped; the same command goes on from") == 1
    assert newest(tmp_path / "run") == "step_0000006.ckpt"
    goes_on(tmp_path / "run", engine, tmp_path / "other")
