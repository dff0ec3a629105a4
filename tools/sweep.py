"""Make all runs of a study, on this machine or as an array of SLURM jobs. The same command again goes on.

    python tools/sweep.py configs/studies/wav-cpu.yaml --dry
    python tools/sweep.py wav-cpu --parallel 2
    python tools/sweep.py wav-cpu --only corpus=pydoc depth=12 depth=24
    python tools/sweep.py wav-cpu --known configs/studies/results/wav-cpu.csv
    python tools/sweep.py wav --slurm partition=gpu gpus-per-node=8 ntasks-per-node=8 time=24:00:00

Finished runs are skipped, interrupted ones continued, failed ones tried again; several sweeps at once share the work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import Progress

from depthlit.errors import one_line
from depthlit.study import experiment, job, planned, record, results, sweep
from depthlit.study.shown import Shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("study", help="a study file, or the name of one in configs/studies/")
    parser.add_argument("--output", type=Path, help="folder of the run folders; runs/STUDY if left out")
    parser.add_argument("--dry", action="store_true", help="print what would be run, and what it costs")
    parser.add_argument("--commands", action="store_true", help="with --dry: also the command of every run left")
    parser.add_argument("--only", nargs="+", default=[], metavar="AXIS=LABEL", help="these cells; seed=0 works too")
    parser.add_argument("--run", metavar="NAME", help="this run alone")
    parser.add_argument(
        "--known", type=Path, metavar="CSV", help="results.csv of another folder: finished there is done"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="how often a failing run is tried again")
    parser.add_argument("--flops", type=float, help="FLOP/s of a run, for estimates; the study's if left out")
    parser.add_argument("--launcher", default="", help="words before each command, such as 'srun'")
    parser.add_argument("--slurm", nargs="*", metavar="KEY=VALUE", help="write a job file for sbatch, and stop")
    options = parser.parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a strategy or callback in your own file is known by its class path
    try:
        return make(options)
    except ValueError as error:
        print(f"sweep.py: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sweep.py: stopped; run the same command again to go on", file=sys.stderr)
        return 130


def make(options: argparse.Namespace) -> int:
    if options.parallel < 1 or options.retries < 0:
        raise ValueError("--parallel must be at least 1, and --retries not negative")
    study = experiment.read(experiment.find(options.study))
    folder = options.output or Path("runs") / study.name
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the study", total=len(study.cells))
        everything = planned.plan(study.cells, study.hours, lambda n: bar.update(task, completed=n))
    wanted = list(experiment.matching(study.cells, options.only))
    chosen = [run for run in everything if run.cell in wanted]
    if options.run:
        chosen = [run for run in everything if run.name == options.run]
        if not chosen:
            raise ValueError(f"the study has no run {options.run}; --dry lists them")
    known = results.known(options.known) if options.known else {}
    wished, chosen = len(chosen), [run for run in chosen if run.name not in known]
    if wished and not chosen:
        print(f"all {wished} runs are finished in {options.known}")
    rates = record.Rates(options.flops or study.flops_per_second).learn(everything, folder)
    left = [run for run in chosen if not record.load(folder / run.name).finished]
    for wrong, number in planned.without_data(left).items():
        if not options.dry and options.slurm is None:
            raise ValueError(f"{number} of {len(left)} runs to be made lack their data: {wrong} (or choose by --only)")
        print(f"sweep.py: {number} of {len(left)} runs to be made lack their data: {wrong}", file=sys.stderr)
    if options.dry:
        print(results.dry(study, chosen, folder, rates, options.commands))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    results.write_study(study, everything, folder)
    if options.slurm is not None:
        print(job.write(study, chosen, folder, options.slurm, options.parallel))
        return 0
    try:
        with Shown(chosen, folder, rates, options.parallel) as shown:
            done = sweep.sweep(chosen, folder, shown, options.parallel, options.retries, shlex.split(options.launcher))
    finally:
        lines = results.write_results(everything, folder, known)
    names = {run.name for run in chosen}
    if names:
        print(results.outcome([line for line in lines if line["run"] in names], folder))
    return 1 if "failed" in done.values() else 0


if __name__ == "__main__":
    sys.exit(main())
