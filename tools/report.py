"""Figures, tables and one page from run folders alone, without models: what the papers show, from your runs.

    python tools/report.py runs/wav-cpu --output report
    python tools/report.py runs/depthbench-400m runs/depthbench-backbone runs/hc --output report --pdf

FOLDER is a run folder, the folder of a sweep, or holds such. report/index.html is one file that reads offline; figures
are in report/figures/, tables as CSV and LaTeX in report/tables/. What cannot be read is listed, what is missing is a
labelled gap. The same command again replaces the report, and leaves other files in that folder alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from depthlit.errors import one_line
from depthlit.progress import duration
from depthlit.report.write import INDEX, Options, write


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="run folders, sweeps, or folders of them"
    )
    parser.add_argument("--output", type=Path, default=Path("report"), help="where the report goes (report)")
    parser.add_argument(
        "--baseline", default="", metavar="CLASS", help="strategy that others are measured against by depth"
    )
    parser.add_argument(
        "--pictures", type=int, default=Options.pictures, metavar="N",
        help="full figures of diagnostics in the page if there are at most N (%(default)s), else small ones",
    )  # fmt: skip
    parser.add_argument("--pdf", action="store_true", help="every figure as PDF too")
    options = parser.parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a diagnostic in your own file draws its figure
    began, console = time.monotonic(), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            tasks = {
                what: bar.add_task(what, total=None) for what in ("reading runs", "figures and tables", "the page")
            }
            found, made = write(
                options.folders, options.output, Options(options.pictures, options.pdf, options.baseline),
                lambda what, done, total: bar.update(tasks[what], completed=done, total=total),
            )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"report.py: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    counts = Counter(one.state for one in made)
    print(
        f"{len(found.runs)} runs, {len(found.broken)} folders or files left out; of {len(made)} figures and tables "
        f"{counts['made']} made, {counts['partly']} in part, {counts['missing']} missing; in "
        f"{duration(time.monotonic() - began)}\n{options.output / INDEX}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
