"""What is installed: the same from a clone and from a wheel, and enough to train from an empty folder."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ANSWERS_TO = {"yaml": "pyyaml", "PIL": "pillow", "lm_eval": "lm-eval"}
"""Import names that are not the name of the package."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built in a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("depthlit", "callbacks", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_packages_and_the_configs_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted: set[str] = set()
    for package in ("depthlit", "callbacks"):
        files = (file.relative_to(ROOT) for file in (ROOT / package).rglob("*") if file.is_file())
        wanted |= {file.as_posix() for file in files if "__pycache__" not in file.parts}
    wanted |= {f"depthlit/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "configs").rglob("*.yaml")}
    assert names == wanted
    assert {"callbacks/__init__.py", "depthlit/configs/quickstart.yaml", "depthlit/py.typed"} <= names


def test_every_package_of_the_tree_is_listed() -> None:
    found = {file.parent.relative_to(ROOT).as_posix().replace("/", ".")
             for top in ("depthlit", "callbacks") for file in (ROOT / top).rglob("__init__.py")}  # fmt: skip
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"depthlit.configs"}


def names_of(requirements: list[str]) -> set[str]:
    """Names of the packages in a list of requirements."""
    return {re.split(r"[^\w-]", line)[0].lower() for line in requirements}


def test_what_is_imported_is_declared() -> None:
    """Every import at the head of a module is the standard library, our own, a declared dependency, or belongs to the
    extra that the module's docstring asks for."""
    extras = PROJECT["project"]["optional-dependencies"]
    for top in ("depthlit", "callbacks"):
        for file in (ROOT / top).rglob("*.py"):
            tree = ast.parse(file.read_text())
            known = {"depthlit", "callbacks", *sys.stdlib_module_names, *names_of(PROJECT["project"]["dependencies"])}
            for extra in re.findall(r"depthlit\[(\w+)\]", ast.get_docstring(tree) or ""):
                known |= names_of(extras[extra])
            for node in tree.body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in (name.split(".")[0] for name in names):
                    assert ANSWERS_TO.get(name, name) in known, f"{file}: {name}"


def test_versions_agree() -> None:
    from depthlit import __version__

    assert PROJECT["project"]["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changes or f"## {__version__}" in changes


def test_a_wheel_in_an_empty_folder_runs_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has this one's libraries, but neither the clone nor its editable install."""
    home, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the environment's own
    environment = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "DEPTHLIT_CACHE": str(tmp_path / "cache")}

    where = subprocess.run(
        [python, "-c", "import depthlit, callbacks; print(depthlit.__file__, callbacks.__file__)"],
        cwd=work, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert all(path.startswith(str(site)) for path in where.stdout.split())
    command = [home / "bin" / "depthlit", "fit", "--config", "quickstart", "--trainer.max_steps", "2",
               "--trainer.limit_val_batches", "2", "--model.shape", "tiny-L2"]  # fmt: skip
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (work / "runs" / "quickstart" / "checkpoints" / "last.ckpt").exists()
    assert "unigram entropy" in done.stdout


@pytest.mark.slow
def test_the_first_command_on_a_fresh_machine(tmp_path: Path) -> None:
    """The README's first command, in a copy of this tree and an environment with nothing in it, to the end: the loss
    must end at least 1.2 nats below the unigram entropy. It is meant to take less than 8 minutes on 2 quiet cores."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = re.findall(r"(?m)^pip install .*$", (ROOT / "README.md").read_text())[0]
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "runs")
    shutil.copytree(ROOT, clone, ignore=ignored)
    venv.create(tmp_path / "environment", with_pip=True)
    environment = {key: x for key, x in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment["PATH"] = f"{tmp_path / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment["DEPTHLIT_CACHE"] = str(tmp_path / "cache")
    begin = time.monotonic()
    done = subprocess.run(["bash", "-ec", command], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{command}: {time.monotonic() - begin:.0f} s")
    found = re.search(
        r"val/loss ([\d.]+), ([\d.]+) nats below the unigram entropy of the corpus, ([\d.]+)", done.stdout
    )
    assert found and float(found[2]) >= 1.2, done.stdout
    board = EventAccumulator(str(clone / "runs" / "quickstart"))
    board.Reload()
    assert board.Scalars("val/loss")[-1].value == pytest.approx(float(found[1]), abs=1e-4)
    assert {"train/loss", "val/ppl", "optim/lr", "optim/grad_norm", "progress/tokens"} <= set(board.Tags()["scalars"])
