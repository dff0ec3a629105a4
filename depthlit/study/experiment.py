"""A study file: base configs, axes, rows and seeds, and the cells that they come to.

    title: does the gain of a design grow with depth?
    configs: [quickstart]                          # laid over each other, as after --config
    set: {trainer.max_steps: 400}                  # keys are those of the command line
    axes:
      design: {configs: [residual/preln, residual/hc]}        # an axis over configs,
      lr: {model.optimizer.lr: [1.0e-3, 2.0e-3]}              # over the values of one key,
      depth:                                                  # or over bundles of settings, each with its label
        12: {model.shape: small-L12}
        24: {model.shape: small-L24, data.batch_size: 4}
    rows:                                          # which cells; every combination if left out
      - {depth: 12}                                # an axis that a row does not name is taken whole
      - {depth: 24, design: hc, seeds: [0, 1, 2]}
    overrides:
      - {where: {design: hc, depth: [24]}, set: {model.optimizer.lr: 5.0e-4}}
    seeds: [0, 1]
    flops_per_second: 3.0e+10                      # of a run on the intended machine, for estimates before any run
    hours: {each: 1.0, measured: runs/speed}       # instead of a budget: as many tokens as this time allows

Later settings win: base, axes, seed, overrides. A seed stands for seed_everything, model.init_seed and data.seed.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from depthlit.config_files import study_files
from depthlit.errors import nearest

SEED_KEYS = ("seed_everything", "model.init_seed", "data.seed")
KEYS = ("title", "configs", "set", "axes", "rows", "overrides", "seeds", "flops_per_second", "hours")


@dataclass(frozen=True)
class Settings:
    """What is laid over the command line at one place: configs, then keys.

    Args:
        configs: names or files, as after `--config`.
        keys: dotted key, as on the command line -> value.
    """

    configs: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> list[str]:
        """Arguments of `depthlit fit`; a key comes behind those that it lies below."""
        named = [word for config in self.configs for word in ("--config", config)]
        return [*named, *(f"--{key}={spelt(self.keys[key])}" for key in sorted(self.keys))]


@dataclass(frozen=True)
class Cell:
    """One run that is wanted.

    Args:
        labels: axis -> label, in the order of the file.
        seed: the seed; None where the study names none.
        base: arguments of `depthlit fit`, up to the seed.
        above: those behind it.
    """

    labels: Mapping[str, str]
    seed: int | None
    base: tuple[str, ...]
    above: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Of `depthlit fit`, without the run folder."""
        seeds = [] if self.seed is None else [f"--{key}={self.seed}" for key in SEED_KEYS]
        return [*self.base, *seeds, *self.above]


@dataclass(frozen=True)
class Hours:
    """Runs matched by time: each gets the tokens that it reads in so many hours at its measured speed.

    Args:
        each: hours of training.
        measured: folder of the sweep that measured tokens per second of each model.
    """

    each: float
    measured: str


@dataclass(frozen=True)
class Study:
    """A study file, read.

    Args:
        name: of the file, without ending.
        title: the question.
        axes: name -> label -> settings.
        cells: the runs wanted, without repetition.
        seeds: of rows that name none; empty for what configs say.
        flops_per_second: of one run on the intended machine.
        hours: when runs are matched by time.
        file: where it was read.
    """

    name: str
    title: str
    axes: Mapping[str, Mapping[str, Settings]]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    flops_per_second: float | None
    hours: Hours | None
    file: Path


def find(name: str) -> Path:
    """The file of a study: a path, or the name of one that comes with the package.

    Raises:
        ValueError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = study_files()
    plain = Path(name).name.removesuffix(".yaml")
    if plain not in known:
        hint = nearest(plain, known) or f"; packaged ones: {', '.join(known)}"
        raise ValueError(f"{name}: no such file, and no packaged study of this name{hint}")
    return known[plain]


def read(file: Path) -> Study:
    """Read a study and spell out its cells.

    Raises:
        ValueError: with the file and what is wrong in it.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=Strict)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{file}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not YAML: {error}") from error
    try:
        return from_mapping(content, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def from_mapping(content: Any, file: Path) -> Study:
    """A study of what its file says.

    Raises:
        ValueError: something in it is not as described at the head of this module.
    """
    _known(content, KEYS, "a study")
    axes = {str(name): axis(str(name), values) for name, values in (content.get("axes") or {}).items()}
    _disjoint(axes)
    base = _settings(content, "the base")
    overrides = []
    for override in content.get("overrides") or []:
        _known(override, ("where", "configs", "set"), "an override")
        where = {**(override.get("where") or {})}
        overrides.append((_chosen(where, axes, "an override"), _settings(override, "an override")))
    seeds = _seeds(content.get("seeds"))
    cells: dict[Hashable, Cell] = {}
    for row in content.get("rows") or [{}]:
        row = {**_mapping(row, "a row")}
        own = _seeds(row.pop("seeds", None)) or seeds
        chosen = _chosen(row, axes, "a row")
        for labels in product(*(chosen.get(name, axes[name]) for name in axes)):
            for seed in own or (None,):
                cell = _cell(dict(zip(axes, labels, strict=True)), seed, base, axes, overrides)
                cells.setdefault((labels, seed), cell)
    rate, hours = content.get("flops_per_second"), content.get("hours")
    if rate is not None and not (isinstance(rate, int | float) and rate > 0):
        raise ValueError(f"flops_per_second is {rate!r}, it must be a positive number such as 3.0e+10")
    if hours is not None:
        _known(hours, ("each", "measured"), "hours")
        if not (isinstance(hours.get("each"), int | float) and hours["each"] > 0 and hours.get("measured")):
            raise ValueError("hours needs `each`, a positive number, and `measured`, the folder of a sweep")
    return Study(
        file.stem, str(content.get("title") or file.stem), axes, tuple(cells.values()), seeds,
        None if rate is None else float(rate), Hours(**hours) if hours else None, file,
    )  # fmt: skip


def axis(name: str, values: Any) -> dict[str, Settings]:
    """Label -> settings of one axis, from any of its three spellings.

    Raises:
        ValueError: it is spelt in none of them.
    """
    values = _mapping(values, f"axis {name}")
    if not values:
        raise ValueError(f"axis {name} has no values")
    key, content = next(iter(values.items()))
    if len(values) == 1 and isinstance(content, list):
        if key == "configs":
            found = [(str(config).rpartition("/")[2].removesuffix(".yaml"), Settings((config,))) for config in content]
        else:
            found = [(spelt(value), Settings(keys={str(key): value})) for value in content]
    else:
        found = [(str(label), _bundle(settings, f"axis {name}, {label}")) for label, settings in values.items()]
    labels = [label for label, _ in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"axis {name} has {', '.join(twice)} twice")
    return dict(found)


def spelt(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str) if isinstance(value, list | dict | bool) or value is None else str(value)


def _cell(
    labels: dict[str, str],
    seed: int | None,
    base: Settings,
    axes: Mapping[str, Mapping[str, Settings]],
    overrides: list[tuple[dict[str, list[str]], Settings]],
) -> Cell:
    """Axes come in the order of their names, so that their order in the file is of no consequence."""
    own = [axes[name][labels[name]] for name in sorted(axes)]
    joined = Settings(
        tuple(config for settings in own for config in settings.configs),
        {key: value for settings in own for key, value in settings.keys.items()},
    )
    above = [settings for where, settings in overrides if all(labels[name] in wanted for name, wanted in where.items())]
    words = tuple([*base.words(), *joined.words()])
    return Cell(labels, seed, words, tuple(word for settings in above for word in settings.words()))


def _settings(content: Mapping[str, Any], what: str) -> Settings:
    return _bundle({"configs": content.get("configs"), **_mapping(content.get("set") or {}, f"`set` of {what}")}, what)


def _bundle(content: Any, what: str) -> Settings:
    """Configs and keys in one mapping."""
    keys = {str(key): value for key, value in _mapping(content or {}, what).items()}
    configs = keys.pop("configs", None) or []
    return Settings(tuple([configs] if isinstance(configs, str) else map(str, configs)), keys)


def _chosen(wanted: Mapping[str, Any], axes: Mapping[str, Mapping[str, Settings]], what: str) -> dict[str, list[str]]:
    """Axis -> labels, of those axes that are named."""
    _known(wanted, tuple(axes), what, "axis")
    chosen = {}
    for name, labels in wanted.items():
        chosen[name] = [spelt(label) for label in (labels if isinstance(labels, list) else [labels])]
        for label in chosen[name]:
            if label not in axes[name]:
                hint = nearest(label, axes[name]) or f"; it has {', '.join(axes[name])}"
                raise ValueError(f"{what} names {label!r}, which axis {name} does not have{hint}")
    return chosen


def _seeds(seeds: Any) -> tuple[int, ...]:
    seeds = [seeds] if isinstance(seeds, int) else seeds or []
    if not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds):
        raise ValueError(f"seeds are {seeds!r}, they must be whole numbers from 0")
    return tuple(seeds)


def _disjoint(axes: Mapping[str, Mapping[str, Settings]]) -> None:
    """Two axes that set the same key would depend on their order."""
    owner: dict[str, str] = {}
    for name, values in axes.items():
        if name in ("seed", "seeds", "run", "status"):
            raise ValueError(f"an axis cannot be called {name}")
        for key in {key for settings in values.values() for key in settings.keys}:
            if owner.setdefault(key, name) != name:
                raise ValueError(f"axes {owner[key]} and {name} both set {key}; say which wins under `overrides`")


def _mapping(content: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{what} must be a mapping, not {content!r}")
    return content


def _known(content: Any, known: tuple[str, ...], what: str, kind: str = "key") -> None:
    for key in _mapping(content, what):
        if key not in known:
            hint = nearest(str(key), known) or f"; known: {', '.join(known)}"
            raise ValueError(f"{what} has the {kind} {key!r}, which there is not{hint}")


class Strict(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands here twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def matching(cells: tuple[Cell, ...], words: list[str]) -> Iterator[Cell]:
    """The cells that carry one of the wanted labels on each axis named.

    Args:
        words: such as `depth=12`; several of one axis are alternatives. The seed is an axis too.

    Raises:
        ValueError: a word is not of this form, or names an axis or a label that no cell has.
    """
    wanted: dict[str, set[str]] = {}
    for word in words:
        name, equals, label = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not of the form AXIS=LABEL")
        wanted.setdefault(name, set()).add(label)
    labelled = [({**cell.labels, "seed": str(cell.seed)}, cell) for cell in cells]
    for name, labels in wanted.items():
        there = {own.get(name) for own, _ in labelled}
        if missing := sorted(labels - there):
            known = sorted(label for label in there if label is not None) or sorted(labelled[0][0]) if labelled else []
            raise ValueError(f"no cell has {name}={', '.join(missing)}; there are: {', '.join(known)}")
    for own, cell in labelled:
        if all(own[name] in labels for name, labels in wanted.items()):
            yield cell
