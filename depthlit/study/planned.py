"""What a cell of a study trains, what it is called, how long it takes: asked of the command line's own parser."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from depthlit import cost, runs
from depthlit.connection import ResidualStrategy
from depthlit.data.corpus import open_corpus
from depthlit.data.mirror import is_url
from depthlit.loggers import METRICS, rows_of
from depthlit.module import as_shape, as_strategy
from depthlit.optim import Budget, OptimizerSettings, Schedule
from depthlit.shape import ShapeSpec
from depthlit.study.experiment import SEED_KEYS, Cell, Hours
from depthlit.study.settings import lean, of_arguments

SPEED = ("model.shape", "model.residual", "data.block_size", "data.batch_size", "trainer.precision", "trainer.devices",
         "trainer.num_nodes", "trainer.strategy", "trainer.accelerator", "trainer.accumulate_grad_batches")  # fmt: skip
"""Keys on which the tokens per second of a run depend."""


@dataclass(frozen=True)
class Planned:
    """A cell, resolved.

    Args:
        cell: what was asked for.
        name: of the run: a function of its settings alone, wherever they were said.
        arguments: of `depthlit fit`, without the run folder.
        settings: dotted key -> value of everything that differs from a default, seeds included.
        config: dotted key -> value of everything.
        shape: of the model, with the vocabulary of the data where those are at hand.
        strategy: the residual strategy.
        ranks: on which it will run.
    """

    cell: Cell
    name: str
    arguments: tuple[str, ...]
    settings: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)
    shape: ShapeSpec
    strategy: ResidualStrategy
    ranks: int

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps; None while nothing says how many."""
        return steps_of(self.config, self.shape, self.strategy, self.ranks)

    @property
    def tokens(self) -> int | None:
        """Training tokens."""
        return None if self.steps is None else self.steps * tokens_per_step(self.config, self.ranks)

    @property
    def block_size(self) -> int:
        """Context T in tokens."""
        return int(self.config["data.block_size"])

    @property
    def data(self) -> list[str]:
        """The corpora."""
        return _listed(self.config["data.path"])

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, routing included."""
        return _counts(self.shape, self.strategy, self.block_size)[0]

    @cached_property
    def flops(self) -> float | None:
        """Of training, three forwards per token, routing counted, validation not."""
        return None if self.tokens is None else self.tokens * _counts(self.shape, self.strategy, self.block_size)[1]


def plan(
    cells: Iterable[Cell], hours: Hours | None = None, ready: Callable[[int], None] = lambda n: None
) -> list[Planned]:
    """Resolve cells, in order. Cells with the same settings get the same name: they are one run.

    Args:
        cells: of a study.
        hours: of the study, when its runs are matched by time.
        ready: told how many are resolved, after each.

    Raises:
        ValueError: the command line would refuse a cell; with the labels of the cell.
    """
    found: list[Planned] = []
    parsed: dict[tuple[tuple[str, ...], ...], dict[str, Any]] = {}
    for cell in cells:
        try:
            key = (cell.base, cell.above)
            if key not in parsed:  # seeds are numbers that parse in one way only
                parsed[key] = of_arguments([*cell.base, *cell.above])
            found.append(_resolve(cell, parsed[key], hours))
        except ValueError as error:
            labels = ", ".join(f"{name}={label}" for name, label in cell.labels.items())
            raise ValueError(f"cell {labels or 'without axes'}: {error}") from error
        ready(len(found))
    return found


def _resolve(cell: Cell, config: dict[str, Any], hours: Hours | None) -> Planned:
    # An override may set a seed too
    above = {word.partition("=")[0].removeprefix("--") for word in cell.above}
    config = {**config, **{key: cell.seed for key in SEED_KEYS if cell.seed is not None and key not in above}}
    arguments = list(cell.arguments)
    shape, strategy = _model(config)
    if hours is not None:
        speed = measured(lean(config), Path(hours.measured))
        tokens = None if speed is None else float(f"{speed * hours.each * 3600:.3g}")
        config |= {"model.budget.tokens": tokens, "trainer.max_steps": -1, "model.schedule.total_steps": None}
        arguments += [f"--model.budget.tokens={tokens}", "--trainer.max_steps=-1"]
    settings = lean(config)
    name = name_of(settings, shape, strategy)
    vocabulary = _vocabulary(tuple(_listed(config["data.path"])), config["data.vocab_multiple"])
    run = Planned(cell, name, tuple(arguments), settings, config, as_shape(shape, vocabulary), strategy, ranks(config))
    if run.steps is None and hours is None:
        raise ValueError("nothing says how long to train: set trainer.max_steps or a model.budget")
    return run


def name_of(settings: Mapping[str, Any], shape: ShapeSpec, strategy: ResidualStrategy) -> str:
    """Of a run, from its settings: hc_l24_d1024_s0_1f3a9c02, with a hash of them all at the end."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    seed = settings.get("model.init_seed", 0)
    return f"{type(strategy).__name__}_l{shape.n_layer}_d{shape.d_model}_s{seed}_{digest}".lower()


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _model(config: Mapping[str, Any]) -> tuple[ShapeSpec, ResidualStrategy]:
    """Shape and strategy. Settings that only a run would refuse are made too, so that they are refused now."""
    OptimizerSettings(**_below(config, "model.optimizer."))
    Schedule(**_below(config, "model.schedule."))
    named = config["model.residual"]
    import_module(named["class_path"].rpartition(".")[0])
    return ShapeSpec(**_below(config, "model.shape.")), as_strategy(named)


def _below(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}


def steps_of(config: Mapping[str, Any], shape: ShapeSpec, strategy: ResidualStrategy, ranks: int) -> int | None:
    """Optimizer steps of a run, as `LanguageModel.resolve_plan` decides it; None if nothing says how many."""
    if config["trainer.max_steps"] > 0:
        return int(config["trainer.max_steps"])
    budget = Budget(**_below(config, "model.budget."))
    per_token = None if budget.flops is None else _counts(shape, strategy, config["data.block_size"])[1]
    tokens = budget.total_tokens(shape, per_token)
    return max(1, round(tokens / tokens_per_step(config, ranks))) if tokens else config["model.schedule.total_steps"]


def tokens_per_step(config: Mapping[str, Any], ranks: int) -> int:
    """Over all micro-batches and ranks."""
    return int(
        config["data.block_size"] * config["data.batch_size"] * config["trainer.accumulate_grad_batches"] * ranks
    )


def complete(run: Planned, folder: Path) -> bool:
    """Whether a run folder holds the checkpoint of the last step, behind which nothing is left to do.

    Where the folder tells on how many ranks and with which vocabulary the run is made, that counts.
    """
    step = step_of(folder)
    if not step:
        return False
    try:
        facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        ranks, shape = int(facts["ranks"]), as_shape(facts["model"]["shape"])
    except (OSError, ValueError, KeyError, TypeError):
        ranks, shape = run.ranks, run.shape
    steps = steps_of(run.config, shape, run.strategy, ranks)
    return steps is not None and step >= steps


def ranks(config: Mapping[str, Any]) -> int:
    """Ranks of a run; where devices are `auto`, as many as there are here."""
    devices = config["trainer.devices"]
    if isinstance(devices, list):
        number = len(devices)
    elif str(devices) in ("auto", "-1"):
        number = 1 if config["trainer.accelerator"] == "cpu" else max(1, torch.cuda.device_count())
    else:
        number = int(devices)
    return number * int(config["trainer.num_nodes"])


@cache
def _counts(shape: ShapeSpec, strategy: ResidualStrategy, block: int) -> tuple[int, float]:
    """Parameters, and FLOPs of training per token."""
    decoder = cost.on_meta(shape, strategy)
    return cost.parameters(decoder)["total"], cost.training_flops(decoder, block)


@cache
def _vocabulary(paths: tuple[str, ...], multiple: int) -> int | None:
    """Of the data, rounded up as they will be; None while they are not here."""
    if any(is_url(path) for path in paths):
        return None
    try:
        return -(-max(open_corpus(path).vocab_size for path in paths) // multiple) * multiple
    except ValueError:
        return None


def without_data(plans: Iterable[Planned]) -> dict[str, int]:
    """What is wrong with corpora that are not whole here, and how many runs need them. URLs are not looked at."""
    found: dict[str, int] = {}
    for run in plans:
        if (wrong := _unreadable(tuple(run.data))) is not None:
            found[wrong] = found.get(wrong, 0) + 1
    return found


@cache
def _unreadable(paths: tuple[str, ...]) -> str | None:
    try:
        for path in paths:
            if not is_url(path):
                open_corpus(path)
    except ValueError as error:
        return str(error)
    return None


def measured(settings: Mapping[str, Any], folder: Path) -> float | None:
    """Tokens per second of the same model on the same devices in an earlier sweep: the median over its logged steps.

    Args:
        settings: of the run to come.
        folder: of that sweep.
    """
    record = folder / "study.json"
    if not record.is_file():
        return None
    for cell in json.loads(record.read_text(encoding="utf-8"))["cells"]:
        metrics = folder / cell["run"] / METRICS
        if _pace(cell["settings"]) == _pace(settings) and metrics.is_file():
            speeds = [float(row[name]) for row in rows_of(metrics) if (name := "throughput/tokens_per_sec") in row]
            if len(speeds) > 1:
                return median(speeds[1:])  # the first step warms up
    return None


def _pace(settings: Mapping[str, Any]) -> str:
    """What the speed of a run depends on, as text: JSON turns a tuple into a list."""
    return json.dumps({key: value for key, value in settings.items() if key.startswith(SPEED)}, sort_keys=True)


def seconds(run: Planned, rate: float | None) -> float | None:
    """Estimated duration of a run at a rate in FLOPs per second."""
    return None if rate is None or run.flops is None else run.flops / rate


def fit(run: Planned, folder: Path) -> list[str]:
    """Arguments of `depthlit` that make the run in a folder; what the sweep needs to know is in metrics.csv."""
    return ["fit", *run.arguments, f"--trainer.default_root_dir={folder}"]


def step_of(folder: Path) -> int:
    """Optimizer steps of a run folder's last checkpoint; 0 without one."""
    checkpoint = runs.last_checkpoint(folder)
    if checkpoint is None:
        return 0
    newest = checkpoint.resolve()
    if newest.name == checkpoint.name == "last.ckpt":  # a copied folder has a file in place of the link
        newest = max(checkpoint.parent.glob("step_*.ckpt"), default=newest)
    number = newest.name.removesuffix(".ckpt").rpartition("_")[2]
    return int(number) if number.isdigit() else 0
