"""Who is at work on a run: a file that the system keeps locked for as long as the sweep or the run itself lives.

The lock goes with the open file, which a run inherits from its sweep. So a run whose sweep was killed is still taken,
and a run whose processes are all dead is free at once, with nothing to clear away and no process id that could have
been given to another process. What the file says (process, host, since when) is for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Claim:
    """A claim that is held. It ends when `release` was called and every process that inherited `fd` is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def say(self, **facts: Any) -> None:
        """Write who holds it."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(),
                           "since": datetime.now(UTC).isoformat(timespec="seconds"), **facts}).encode()  # fmt: skip
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text + b"\n", 0)

    def release(self) -> None:
        """Let go of it; a run that inherited it holds on."""
        os.close(self.fd)


def claim(path: Path) -> Claim | None:
    """Take a claim, or None if somebody holds it.

    Args:
        path: of its file, which is made and never removed.

    Raises:
        ValueError: the file system cannot lock files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        raise ValueError(f"{path} cannot be locked ({error.strerror}); take --output on another file system") from error
    held = Claim(fd)
    held.say()
    return held


def holder(path: Path) -> str:
    """Who wrote into a claim last, as "pid 123 on host"; "" if nobody can be read."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return f"pid {facts['pid']} on {facts['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
