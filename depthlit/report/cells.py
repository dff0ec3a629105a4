"""Runs put together: those that differ in their seed alone are a cell, cells that may be compared are a panel.

Only finished runs are averaged and drawn. A cell keeps those that diverged, failed or are under way beside them, so
that a mean over the seeds that survived can be told as such.

Within a study, a setting that follows from design and shape (as the learning rate of one design, or the batch of the
deepest shapes) is part of them; one that varies for the same design and shape (a learning rate that is swept, a corpus)
separates panels. Runs without a study are compared only where all settings agree.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from depthlit.report.found import LOOSE, Broken, Run
from depthlit.report.known import Look, look
from depthlit.report.noise import Difference, Mean, compare, mean
from depthlit.shape import ShapeSpec

RATE = "model.optimizer.lr"
PATH = "data.path"
DATA = "data of fingerprint"
"""Stands among the settings that separate panels where one path held several data."""
HELD = ("total parameters", "backbone parameters", "training FLOPs", "width")
NEAR = 0.2
"""Sizes within this relative spread are called equal."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed alone.

    Args:
        design: what to call the residual design, with the options in which it differs from others of its class here.
        runs: the finished ones by seed, one of each.
        lost: those of further seeds that did not finish.
        repeats: further runs of a seed that is among them, which are left out.
    """

    design: str
    runs: tuple[Run, ...]
    lost: tuple[Run, ...] = ()
    repeats: tuple[Run, ...] = ()

    @property
    def first(self) -> Run:
        """The run of the lowest seed, whose maps are shown; a finished one where there is any."""
        return (*self.runs, *self.lost)[0]

    @property
    def strategy(self) -> str:
        """Class of the residual strategy."""
        return self.first.strategy

    @property
    def shape(self) -> ShapeSpec:
        """Of the model."""
        return self.first.shape

    @property
    def look(self) -> Look:
        """Colour and marker."""
        return look(self.strategy)

    @property
    def fate(self) -> str:
        """How many seeds did not finish, such as "2 of 3 diverged"; "" if all did."""
        seeds, counts = len(self.runs) + len(self.lost), Counter(run.status for run in self.lost)
        return ", ".join(f"{number} of {seeds} {status}" for status, number in counts.items())

    def by_seed(self, metric: str) -> dict[Hashable, float]:
        """All seeds of a run -> last value of a metric, where it is finite."""
        found = {run.seeds: run.last(metric) for run in self.runs}
        return {seeds: value for seeds, value in found.items() if math.isfinite(value)}

    def mean(self, metric: str = "val/loss") -> Mean:
        """Over seeds."""
        return mean(list(self.by_seed(metric).values()))

    def minus(self, other: Cell, metric: str = "val/loss") -> Difference:
        """This one's metric minus another's, tested against the noise of seeds."""
        return compare(self.by_seed(metric), other.by_seed(metric))


@dataclass(frozen=True)
class Panel:
    """Cells that may be compared.

    Args:
        study: that they belong to.
        condition: what sets them apart from other panels of the study; "" if nothing does.
        keys: settings that the condition names.
        every: cell, by design and depth.
    """

    study: str
    condition: str
    keys: tuple[str, ...]
    every: tuple[Cell, ...]

    @property
    def cells(self) -> list[Cell]:
        """Those of which a run is finished."""
        return [cell for cell in self.every if cell.runs]

    @property
    def title(self) -> str:
        """For a reader."""
        return f"{self.study}, {self.condition}" if self.condition else self.study

    @property
    def designs(self) -> dict[str, list[Cell]]:
        """Design -> its cells, shallow first."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.design, []).append(cell)
        return found

    @property
    def depths(self) -> list[int]:
        """Numbers of layers, ascending."""
        return sorted({cell.shape.n_layer for cell in self.cells})

    @property
    def held(self) -> tuple[str, ...]:
        """What its shapes share, of HELD; nothing if they are of several sizes, or one.

        Small vocabularies can make whole model and backbone equal at once: then it is both.
        """
        if len({(cell.shape.n_layer, cell.shape.d_model) for cell in self.cells}) < 2:
            return ()
        if len({cell.shape.d_model for cell in self.cells}) == 1:
            return (HELD[3],)
        spreads = [
            _spread([cell.shape.parameters() for cell in self.cells]),
            _spread([cell.shape.backbone() for cell in self.cells]),
            _spread([cell.first.flops for cell in self.cells]),
        ]
        most = min(NEAR, 2 * min(spreads) + 0.02)
        return tuple(what for what, spread in zip(HELD, spreads, strict=False) if spread <= most)

    @property
    def scored(self) -> bool:
        """Whether any run was validated."""
        return any("val/loss" in run.curves for cell in self.cells for run in cell.runs)

    def at(self, n_layer: int) -> list[Cell]:
        """The cells of a depth."""
        return [cell for cell in self.cells if cell.shape.n_layer == n_layer]


def panels(runs: Iterable[Run]) -> list[Panel]:
    """All runs, put together."""
    found = []
    for study, own in _grouped(runs, lambda run: run.study or LOOSE).items():
        names = _designs(own)
        keys = _conditions(own, names, strict=study == LOOSE)
        found += [_panel(study, keys, names, members) for members in _grouped(own, _values(keys)).values()]
    return found


def panels_over(panels: Iterable[Panel], key: str) -> dict[str, list[Panel]]:
    """Those that are set apart by a setting, put together if it is the only one: by what they have in common."""
    found: dict[str, list[Panel]] = {}
    for panel in panels:
        if key in panel.keys:
            said = _said(tuple(other for other in panel.keys if other != key), panel.every[0].first)
            found.setdefault(f"{panel.study}, {said}" if said else panel.study, []).append(panel)
    return found


def left_out(panels: Iterable[Panel]) -> list[Broken]:
    """Runs that repeat a seed of their cell, as two folders of one sweep hold them: they add no seed to a mean."""
    return [
        Broken(run.folder, f"same cell and seed as {kept.folder}, which is counted in its place")
        for panel in panels
        for cell in panel.every
        for run in cell.repeats
        for kept in (*cell.runs, *cell.lost)
        if kept.seeds == run.seeds
    ]


def depths_shown(panel: Panel, wanted: Sequence[int] = (16, 24, 32)) -> list[int]:
    """The paper's depths where there are some, else the least, the middle and the greatest."""
    depths = panel.depths
    there = [depth for depth in wanted if depth in depths]
    return there or sorted({depths[0], depths[len(depths) // 2], depths[-1]})


def _panel(study: str, keys: tuple[str, ...], names: Mapping[Run, str], runs: Sequence[Run]) -> Panel:
    """Cells in the order in which the study names designs, shallow first."""
    same = _grouped(runs, lambda run: (names[run], run.shape))
    order = list(dict.fromkeys(names.values()))
    cells = [_cell(name, own) for (name, _), own in same.items()]
    cells.sort(key=lambda cell: (order.index(cell.design), cell.shape.n_layer, cell.shape.d_model))
    return Panel(study, _said(keys, runs[0]), keys, tuple(cells))


def _said(keys: Sequence[str], run: Run) -> str:
    """Settings of a run, for a title."""
    return ", ".join(f"{key.rpartition('.')[2]} {_short(_setting(run, key))}" for key in keys)


def _cell(design: str, runs: Sequence[Run]) -> Cell:
    """By seed, the first that was found of each; one that came to its end goes before one that did not."""
    first: dict[Hashable, Run] = {}
    for run in sorted(runs, key=lambda run: run.status not in ("finished", "diverged")):
        first.setdefault(run.seeds, run)
    kept = sorted(first.values(), key=lambda run: (run.seed, str(run.seeds)))
    return Cell(
        design,
        tuple(run for run in kept if run.status == "finished"),
        tuple(run for run in kept if run.status != "finished"),
        tuple(run for run in runs if run is not first[run.seeds]),
    )


def _designs(runs: Sequence[Run]) -> dict[Run, str]:
    """Run -> name of its design, with those options that differ among the runs of its class."""
    found = {}
    for strategy, own in _grouped(runs, lambda run: run.strategy).items():
        options = dict.fromkeys(key for run in own for key in run.options)
        differing = [key for key in options if len({_frozen(run.options.get(key)) for run in own}) > 1]
        for run in own:
            said = " ".join(f"{key}={run.options[key]}" for key in differing if run.options.get(key) is not None)
            found[run] = f"{look(strategy).name} {said}".strip()
    return found


def _conditions(runs: Sequence[Run], names: dict[Run, str], strict: bool) -> tuple[str, ...]:
    """Settings that separate panels, of those that all runs have: an option that only a later version knows is none.

    A run that did not finish tells what was varied too, but not by what it lacks.
    """
    whole = [run for run in runs if run.status == "finished"] or runs
    groups = [list(runs)] if strict else list(_grouped(runs, lambda run: (names[run], run.shape)).values())
    keys = tuple(
        key
        for key in whole[0].settings
        if all(key in run.settings for run in whole)
        and any(len({_frozen(run.settings[key]) for run in group if key in run.settings}) > 1 for group in groups)
    )
    alike = _grouped(runs, _values((*keys, PATH))).values()
    return (*keys, DATA) if any(len({run.data for run in group}) > 1 for group in alike) else keys


def _values(keys: Sequence[str]) -> Callable[[Run], Hashable]:
    return lambda run: tuple(_frozen(_setting(run, key)) for key in keys)


def _setting(run: Run, key: str) -> Any:
    return run.data or "unknown" if key == DATA else run.settings.get(key)


def _frozen(value: Any) -> Hashable:
    return repr(value)


def _short(value: Any) -> str:
    """A value for a title; of a path the last part."""
    text = "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return Path(text).name if "/" in text else text


def _spread(values: Sequence[float]) -> float:
    """Range over median; infinite where a value is unknown."""
    known = np.array(values, dtype=float)
    return float(np.ptp(known) / np.median(known)) if np.isfinite(known).all() else math.inf


def _grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    found: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        found[key(run)].append(run)
    return dict(found)
