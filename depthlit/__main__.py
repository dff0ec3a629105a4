"""The command `depthlit`. Help and version answer before torch or Lightning are imported, which takes seconds."""

from __future__ import annotations

import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

from depthlit import __version__
from depthlit.config_files import packaged, study_files
from depthlit.errors import fail, nearest
from depthlit.shape import NAMED

SUBCOMMANDS = {
    "fit": "train a model; a run folder that holds a checkpoint of the same architecture is continued",
    "validate": "loss and diagnostics of a checkpoint on the validation split",
    "test": "the same on the test split",
    "predict": "the loss of every token of the validation split, as a file in the run folder",
}

HELP = """\
usage: depthlit SUBCOMMAND --config CONFIG [--config CONFIG ...] [--KEY VALUE ...]

Find out whether a deeper network computes more: residual designs, shapes and depth diagnostics on one backbone.

subcommands:
{subcommands}

common options:
  --config CONFIG                 a YAML file or the name of a packaged one; of several, later ones win key by key
  --model.residual NAME           a residual strategy (below), or the class path of your own
  --model.residual.FIELD VALUE    one of its settings
  --model.shape NAME              a shape of the paper, such as 400m-L24; or field by field: --model.shape.n_layer 8
  --trainer.max_steps N           optimizer steps
  --trainer.default_root_dir DIR  the run folder
  --ckpt_path FILE                another checkpoint than the run folder's last.ckpt
  --fresh                         refuse a run folder that is not empty (fit)
  --print_config                  print the configuration that results, and stop
  -h, --help                      this page; behind a subcommand: every key it has
  --version                       print the version

residual strategies:
{strategies}

shapes:
{shapes}

diagnostics, for --trainer.callbacks+=NAME:
{diagnostics}

packaged configs:
{configs}

studies, for tools/sweep.py:
{studies}

start here: depthlit fit --config quickstart
"""


def strategies() -> list[str]:
    """Names of the strategies in depthlit/residuals/, read from the files' text: importing them would import torch."""
    files = sorted((Path(__file__).parent / "residuals").glob("*.py"))
    return sorted(
        name for file in files for name in re.findall(r"(?m)^class (\w+)\([^)]*\bResidualStrategy\)", file.read_text())
    )


def diagnostics() -> list[str]:
    """Names of the callbacks in callbacks/, likewise."""
    folder = Path(find_spec("callbacks").submodule_search_locations[0])  # type: ignore[union-attr, index]
    return sorted(
        name for file in folder.glob("*.py") for name in re.findall(r"(?m)^class ([A-Z]\w+)\(", file.read_text())
    )


def help_page() -> str:
    """The page that `depthlit --help` prints."""

    def listed(names: list[str]) -> str:
        return textwrap.fill(", ".join(names), 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)

    subcommands = "\n".join(f"  {name:<10}{what}" for name, what in SUBCOMMANDS.items())
    return HELP.format(
        subcommands=subcommands, strategies=listed(strategies()), shapes=listed(list(NAMED)),
        diagnostics=listed(diagnostics()), configs=listed(list(packaged())), studies=listed(list(study_files())),
    )  # fmt: skip


def main() -> None:
    """Entry point of the console script and of `python -m depthlit`."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first in ("-h", "--help"):
        print(help_page(), end="")
    elif first == "--version":
        print(f"depthlit {__version__}")
    elif first not in SUBCOMMANDS:
        fail(f"there is no subcommand {first!r}{nearest(first, SUBCOMMANDS)}; known: {', '.join(SUBCOMMANDS)}", code=2)
    else:
        from depthlit.cli import run

        run()


if __name__ == "__main__":
    main()
