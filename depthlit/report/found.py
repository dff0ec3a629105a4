"""Run folders read, and a list of what could not be read.

A folder given is a run folder, the folder of a sweep (with study.json), or holds such. Nothing in them is written, and
nothing of them is run: JSON, YAML without tags, CSV, and arrays without pickles.
"""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from depthlit import runs
from depthlit.answer import Answer
from depthlit.loggers import METRICS, rows_of
from depthlit.shape import ShapeSpec
from depthlit.study.experiment import SEED_KEYS

STUDY, ENV = "study.json", "env.json"
LOOSE = "runs without a study"

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values of one figure of metrics.csv, where it has one."""


@dataclass(frozen=True)
class Broken:
    """What was left out.

    Args:
        path: of the folder or file.
        reason: why, in one line.
    """

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder, read.

    Args:
        folder: where it lies.
        study: name of its study; "" if it belongs to none.
        labels: axis -> label, where a study gave it some.
        seed: of its weights.
        seeds: all of SEED_KEYS, which tell it from others of its cell.
        strategy: class name of the residual strategy.
        options: its settings.
        shape: of the model.
        settings: dotted key -> value of the configuration, without shape, strategy, seeds and callbacks.
        data: fingerprint of what it was trained on; "" where nothing tells.
        parameters: of the whole model, or of the Pre-LN model of this shape where nobody counted.
        flops: of the whole training; NaN where unknown.
        planned: optimizer steps; None where nothing says how many.
        step: the last one that was logged or kept as a checkpoint.
        complete: whether its sweep says that it is finished.
        curves: metric -> steps and values.
        answers: name of a diagnostic -> its last answer.
        error: last line of a failed attempt.
        trigram: held-out cross-entropy of trigrams of the corpus; NaN where nobody counted them.
    """

    folder: Path
    study: str
    labels: Mapping[str, str]
    seed: int
    seeds: tuple[Any, ...]
    strategy: str
    options: Mapping[str, Any]
    shape: ShapeSpec
    settings: Mapping[str, Any]
    data: str
    parameters: int
    flops: float
    planned: int | None
    step: int
    complete: bool
    curves: Mapping[str, Curve]
    answers: Mapping[str, Path]
    error: str = ""
    trigram: float = math.nan

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.name

    def last(self, metric: str) -> float:
        """The last value of a metric; NaN if it has none."""
        return float(self.curves[metric][1][-1]) if metric in self.curves else math.nan

    @property
    def rate(self) -> float:
        """The peak learning rate, as it was logged."""
        curve = self.curves.get("optim/lr")
        return float(np.nanmax(curve[1])) if curve else math.nan

    @property
    def status(self) -> str:
        """finished, diverged, failed or unfinished. Only finished runs are averaged."""
        if "val/loss" in self.curves and not math.isfinite(self.last("val/loss")):
            return "diverged"
        if self.complete or (self.step >= self.planned if self.planned else "val/loss" in self.curves):
            return "finished"
        return "failed" if self.error else "unfinished"

    def answer(self, name: str) -> Answer | None:
        """The last answer of a diagnostic, read now; None if there is none that holds figures."""
        answer = Answer.load(self.answers[name]) if name in self.answers else None
        return answer if answer is not None and (answer.values or answer.numbers) else None


@dataclass
class Found:
    """What lies in the folders given.

    Args:
        runs: those that could be read, finished or not.
        broken: folders and files that were left out.
        missing: runs that a study wants and that are not there.
    """

    runs: list[Run] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A folder to read as a run, with what its study says about it."""

    folder: Path
    study: str = ""
    cell: Mapping[str, Any] = field(default_factory=dict)


def find(folders: Sequence[Path], advance: Callable[[int, int], None] = lambda done, total: None) -> Found:
    """Read all runs in these folders.

    Args:
        folders: run folders, folders of sweeps, or folders of such.
        advance: told after each run how many are read, and how many there are.

    Raises:
        ValueError: a folder does not exist, or there is nothing that looks like a run in any.
    """
    found, places, seen = Found(), {}, set[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; name run folders, or folders that hold some")
        for place in _places(folder, found, seen):
            key = place.folder.resolve()
            if key not in places or place.cell:  # a run named alone and by its sweep is one run
                places[key] = place
    if not places and not found.broken:
        raise ValueError(f"no run folders in {', '.join(map(str, folders))}; a run folder holds config.yaml and {ENV}")
    for i, place in enumerate(places.values()):
        try:
            found.runs.append(read(place, found.broken))
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.broken.append(Broken(place.folder, _reason(error)))
        advance(i + 1, len(places))
    return found


def _places(folder: Path, found: Found, seen: set[Path]) -> Iterator[Place]:
    """Run folders at and below a folder, in the order of their names; each is looked into once, links may go round."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    record = folder / STUDY
    if record.is_file():
        try:
            study = json.loads(record.read_text(encoding="utf-8"))
            counted = _trigrams(folder / "results.csv")
            cells = {str(cell["run"]): {**cell, **counted.get(str(cell["run"]), {})} for cell in study["cells"]}
            name = str(study["study"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.broken.append(Broken(record, f"{_reason(error)}; its runs are read as runs without a study"))
        else:
            yield from _of_study(folder, name, cells, found)
            return
    if looks_like_a_run(folder):
        yield Place(folder)
        return
    try:
        children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        found.broken.append(Broken(folder, _reason(error)))
        return
    for child in children:
        yield from _places(child, found, seen)


def _of_study(folder: Path, name: str, cells: Mapping[str, Any], found: Found) -> Iterator[Place]:
    for run, cell in cells.items():
        if looks_like_a_run(folder / run):
            yield Place(folder / run, name, cell)
        else:
            found.missing.append(f"{name}: {run}")
    for child in sorted(folder.iterdir()):
        if child.name not in cells and child.is_dir() and looks_like_a_run(child):
            found.broken.append(Broken(child, f"not a run of {name} any more: {STUDY} does not name it"))


def looks_like_a_run(folder: Path) -> bool:
    """Whether a folder holds a file that only runs have."""
    return any((folder / name).exists() for name in ("config.yaml", ENV, METRICS))


def read(place: Place, broken: list[Broken]) -> Run:
    """Read one run folder; answers of diagnostics that cannot be read are added to `broken`.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not whole.
    """
    folder, cell = place.folder, place.cell
    facts = _json(folder / ENV)
    config = runs.config_of(folder)
    if config is None:
        raise ValueError("config.yaml is missing")
    settings = dict(_flat(_yaml(config)))
    if not (folder / METRICS).is_file():
        raise ValueError(f"{METRICS} is missing")
    model = _of(facts, "model", ENV)
    wiring = _of(model, "residual", ENV)
    shape = ShapeSpec(**_of(model, "shape", ENV))
    curves = _curves(folder / METRICS)
    counted = curves.get("cost/parameters_total")
    known = [cell.get("parameters"), facts.get("parameters"), counted and counted[1][-1], shape.parameters()]
    steps = settings.get("trainer.max_steps")
    seeds = _of(facts, "seeds", ENV)
    step = max([_saved(folder), *(int(steps[-1]) for steps, _ in curves.values())])
    record = _json(folder / "sweep.json") if (folder / "sweep.json").is_file() else {}
    return Run(
        folder=folder,
        study=place.study,
        labels={str(axis): str(label) for axis, label in (cell.get("labels") or {}).items()},
        seed=int(_of(seeds, "model.init_seed", ENV)),
        seeds=tuple(seeds.get(key) for key in SEED_KEYS),
        strategy=str(_of(wiring, "class_path", ENV)).rpartition(".")[2],
        options=dict(wiring.get("init_args") or {}),
        shape=shape,
        settings={key: value for key, value in settings.items() if not key.startswith(UNCOMPARED)},
        data=str(facts.get("data") or ""),
        parameters=int(next(filter(None, known))),
        flops=float(cell.get("flops") or math.nan),
        planned=cell.get("steps") or (steps if isinstance(steps, int) and steps > 0 else None),
        step=step,
        complete=record.get("finished") is True,
        curves=curves,
        answers=_answers(folder, step, broken),
        error=str(record.get("error", "")),
        trigram=float(cell.get("trigram", math.nan)),
    )


UNCOMPARED = (
    *SEED_KEYS, "model.shape", "model.residual", "trainer.callbacks", "trainer.default_root_dir", "trainer.logger",
    "trainer.enable_progress_bar", "trainer.validate_every", "trainer.save_every", "trainer.keep_checkpoints",
    "trainer.log_every_n_steps", "data.cache_dir", "data.num_workers", "ckpt_path", "weights_only",
)  # fmt: skip
"""Settings, or beginnings of their keys, in which runs may differ and still be compared."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    return _mapping(path, json.loads, ValueError)


def _yaml(path: Path) -> dict[str, Any]:
    return _mapping(path, lambda text: yaml.load(text, Loader=_Loader), yaml.YAMLError)


def _mapping(path: Path, parse: Callable[[str], Any], problem: type[Exception]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, problem) as error:
        raise ValueError(f"{path.name} is not whole: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no mapping")
    return content


def _of(content: Mapping[str, Any], key: str, file: str) -> Any:
    if not isinstance(content, Mapping) or key not in content:
        raise ValueError(f"{file} does not name {key!r}: written by another version, or not whole")
    return content[key]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings; lists stay whole."""
    for key, value in tree.items():
        at = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, at)
        else:
            yield at, value


def _curves(path: Path) -> dict[str, Curve]:
    """Every metric of a metrics file with the steps at which it was logged."""
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for row in rows_of(path):
        step = int(row["step"])
        for metric, text in row.items():
            if metric != "step":
                steps.setdefault(metric, []).append(step)
                values.setdefault(metric, []).append(float(text))
    return {metric: (np.array(steps[metric]), np.array(values[metric])) for metric in steps}


def _saved(folder: Path) -> int:
    """Step of the last checkpoint; 0 without one."""
    checkpoint = runs.last_checkpoint(folder)
    digits = "" if checkpoint is None else checkpoint.resolve().stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _answers(folder: Path, last: int, broken: list[Broken]) -> dict[str, Path]:
    """The last answer of each diagnostic that can be read; what lies beyond the last step is of a stretch given up."""
    found: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.glob("analysis/step_*/*.json")):
        try:
            step, name = int(path.parent.name.removeprefix("step_")), Answer.load(path).name
            if step > last:
                raise ValueError(f"of step {step:,}, behind the last step of its run, {last:,}: of a stretch given up")
            found[name] = max(found.get(name, (step, path)), (step, path))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            broken.append(Broken(path, _reason(error)))
    return {name: path for name, (_, path) in found.items()}


def _trigrams(path: Path) -> dict[str, dict[str, float]]:
    """Run -> its trigram cross-entropy, from results.csv of a sweep, where that is there."""
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {row["run"]: {"trigram": float(row["trigram"])} for row in rows if row.get("trigram")}


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        return f"{text} is missing in it: written by another version, or not whole"
    if isinstance(error, json.JSONDecodeError):
        return f"not whole: {text}"
    return text
