"""A study as an array of SLURM jobs: a file for sbatch, in which each task is one run of the same sweep."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from depthlit import runs
from depthlit.study import record
from depthlit.study.experiment import Study
from depthlit.study.planned import Planned

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sweep.py"

BODY = """\
#!/bin/bash
# {title}
# {number} runs. Submit:  sbatch {file}
# A run that is stopped, or fails, is gone on with by submitting once more; finished ones end at once.
{options}
runs=(
{names}
)
cd {here}
exec {command} --run "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def write(study: Study, plans: Sequence[Planned], folder: Path, options: Sequence[str], parallel: int) -> str:
    """Write FOLDER/array.sbatch for the runs that are not finished.

    Args:
        study: whose runs they are.
        plans: the runs.
        folder: that holds the run folders.
        options: of sbatch, without dashes: `partition=gpu`, `time=24:00:00`. One task per device is what Lightning
            wants: `gpus-per-node=8 ntasks-per-node=8`.
        parallel: tasks at a time; 1 for no limit.

    Returns:
        What to do next, for a person.

    Raises:
        ValueError: an option is not of the form KEY=VALUE, or one that is set here.
    """
    left = list(dict.fromkeys(run.name for run in plans if not record.load(folder / run.name).finished))
    if not left:
        return "all runs are finished"
    file = folder / "array.sbatch"
    own = {
        "job-name": study.name,
        "array": f"0-{len(left) - 1}" + (f"%{parallel}" if parallel > 1 else ""),
        "output": str(folder / "slurm-%A_%a.out"),
        "signal": "B:TERM@60",
    }
    given = {}
    for option in options:
        key, equals, value = option.removeprefix("--").partition("=")
        if not equals or key == "array":
            raise ValueError(f"--slurm {option}: options are of the form KEY=VALUE; array is set here")
        given[key] = value
    command = [sys.executable, str(TOOL), str(study.file.resolve()), "--output", str(folder), "--launcher", "srun"]
    text = BODY.format(
        title=study.title,
        number=len(left),
        file=file,
        options="\n".join(f"#SBATCH --{key}={value}" for key, value in {**own, **given}.items()),
        names="\n".join(left),
        here=shlex.quote(os.getcwd()),
        command=shlex.join(command),
    )
    runs.write_text(file, text)
    return f"{len(left)} runs; submit them:  sbatch {file}"
