"""What a person gets wrong is answered with one line; what we got wrong keeps its traceback."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

DEBUG = "DEPTHLIT_DEBUG"


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one line to stderr and leave with this exit code."""
    rank = os.environ.get("LOCAL_RANK", "0")
    print(f"depthlit: error: {'' if rank == '0' else f'[rank {rank}] '}{one_line(message)}", file=sys.stderr)
    raise SystemExit(code)


def one_line(message: str) -> str:
    """The message with every run of white space made a single space."""
    return " ".join(message.split())


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """ "; did you mean X or Y?" for the known words nearest to a misspelt one, or ""."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(by_lower[name] for name in close)}?" if close else ""


def is_for_user(error: BaseException) -> bool:
    """Whether an error was raised on purpose, to tell the user of a mistake.

    True for what the system refuses (a missing file, a full disk), for a ValueError that depthlit, a callback or a file
    in the working directory raises itself, and for what Lightning raises about its own settings. Anything from deeper
    down is a defect and keeps its traceback, as does everything when the environment sets DEPTHLIT_DEBUG.
    """
    if os.environ.get(DEBUG):
        return False
    if (isinstance(error, OSError) and error.errno) or type(error).__name__ == "MisconfigurationException":
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    name = frames[-1][0].f_code.co_filename
    if name.startswith("<frozen "):  # the interpreter's own code, which lies in no folder
        return False
    raised_in = Path(name).resolve()
    if "site-packages" in raised_in.parts and "lightning" in raised_in.parts:
        return isinstance(error, ValueError | RuntimeError | ImportError)
    here = Path(__file__).resolve().parent
    ours = (here, here.parent / "callbacks")
    theirs = raised_in.is_relative_to(Path.cwd()) and "site-packages" not in raised_in.parts
    return isinstance(error, ValueError) and (theirs or any(raised_in.is_relative_to(folder) for folder in ours))
