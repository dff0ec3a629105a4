"""A stand-in for `python -m depthlit fit` that starts in milliseconds, so that sweeps can be killed many times.

It leaves what a run leaves, goes on from its last checkpoint, and its loss depends on every step and setting. Written
as a package `depthlit` into a working directory, where `python -m` finds it before the installed one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = r"""
import json, os, signal, sys, time, zlib
from pathlib import Path

words = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:] if "=" in word)
folder, steps = Path(words.pop("trainer.default_root_dir")), int(words.get("trainer.max_steps", 6))
rate = float(words.get("model.optimizer.lr", 0))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves without an error, like Lightning
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(f"{os.getpid()}\n")
if rate == 13:
    sys.exit("depthlit: error: thirteen is not a learning rate")
checkpoints = folder / "checkpoints"
last = checkpoints / "last.ckpt"
step, state = json.loads(last.read_text()) if last.exists() else (0, zlib.crc32(repr(sorted(words.items())).encode()))
metrics = folder / "metrics.csv"
kept = metrics.read_text().splitlines()[1 : step + 1] if metrics.exists() else []
metrics.write_text("\n".join(["step,train/loss,val/loss,throughput/tokens_per_sec", *kept]) + "\n")
while step < steps:
    time.sleep(float(os.environ.get("TOY_SECONDS", "0.01")))
    step += 1
    state = (state * 6364136223846793005 + step) % 2**64
    with open(metrics, "a") as file:
        file.write(f"{step},{state / 2**64},{state / 2**65},{1000 + step}\n")
    checkpoints.mkdir(exist_ok=True)
    (checkpoints / "partial").write_text(json.dumps([step, state]))
    (checkpoints / "partial").rename(checkpoints / f"step_{step:07d}.ckpt")
    if (checkpoints / "link").is_symlink():
        (checkpoints / "link").unlink()
    (checkpoints / "link").symlink_to(f"step_{step:07d}.ckpt")
    (checkpoints / "link").rename(last)
    if rate == 7 and step == 1 and not (folder / "tripped").exists():
        (folder / "tripped").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def install(folder: Path) -> None:
    """Put the stand-in into a working directory."""
    (folder / "depthlit").mkdir()
    (folder / "depthlit" / "__init__.py").touch()
    (folder / "depthlit" / "__main__.py").write_text(SOURCE)


def forked(work: Callable[[], int]) -> int:
    """Do something in a process of its own that has all modules loaded already; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def exit_code(pid: int, timeout: float = 120) -> int:
    """Wait for a process; its exit code, negative for a signal."""
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} still ran after {timeout} s")


def until(true: Callable[[], bool], timeout: float = 60) -> None:
    """Wait for something to become true."""
    limit = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
