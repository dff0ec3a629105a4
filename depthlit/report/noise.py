"""How sure is a mean over seeds, and is a difference larger than what seeds alone do?

    mean +- t(0.975, n - 1) s / sqrt(n)                                       95 % t-interval over n seeds

A difference is tested two-sided at 5 %: by the paired t-test over the seeds that both sides have where there are at
least three, since equal seeds mean equal order of the data; else by Welch's t-test where both sides have two seeds or
more (two pairs would leave a paired test a single degree of freedom); else not at all. Where several differences are
looked at together, p is raised by Holm's method before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

LEVEL = 0.95
INTERVAL = "95 % t-interval over seeds"
NO_SEED = "no finished seed on one side: not tested"
ONE_SEED = "one seed: not tested"
NO_SPREAD = "no spread between seeds: not tested"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Args:
        value: the mean.
        half: half the width of its interval; NaN with one seed.
        values: of each seed.
    """

    value: float
    half: float
    values: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        """Seeds."""
        return len(self.values)

    def times(self, scale: float) -> Mean:
        """In another unit."""
        return Mean(self.value * scale, self.half * scale, tuple(value * scale for value in self.values))


@dataclass(frozen=True)
class Difference:
    """The difference of two means.

    Args:
        value: first minus second.
        low: lower end of its 95 % interval; NaN where not tested.
        high: upper end.
        p: of the test, two-sided; NaN where not tested.
        test: which one, or why none.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    test: str = ONE_SEED

    @property
    def verdict(self) -> str:
        """What may be said."""
        if math.isnan(self.p):
            return self.test
        return ("lower" if self.value < 0 else "higher") if self.p < 1 - LEVEL else "not separated"


def mean(values: Sequence[float]) -> Mean:
    """The mean with its interval; NaN of no values."""
    n, kept = len(values), tuple(map(float, values))
    if n < 2:
        return Mean(kept[0] if n else math.nan, math.nan, kept)
    spread = float(np.std(kept, ddof=1))
    return Mean(float(np.mean(kept)), float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * spread / math.sqrt(n), kept)


def compare(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Difference:
    """First minus second, tested against the noise of seeds.

    Args:
        first: seed -> value.
        second: the same of the other side.
    """
    if not first or not second:
        return Difference(math.nan, test=NO_SEED)
    a, b = list(first.values()), list(second.values())
    value = float(np.mean(a) - np.mean(b))
    shared = [seed for seed in first if seed in second]
    if len(shared) >= 3:
        steps = np.array([first[seed] - second[seed] for seed in shared])
        if not np.ptp(steps):
            return Difference(float(steps.mean()), test=NO_SPREAD)
        found = stats.ttest_1samp(steps, 0.0)
        value, name = float(steps.mean()), f"paired t, {len(shared)} seeds"
    elif min(len(a), len(b)) >= 2:
        if not np.ptp(a) and not np.ptp(b):
            return Difference(value, test=NO_SPREAD)
        found, name = stats.ttest_ind(a, b, equal_var=False), f"Welch t, {len(a)} and {len(b)} seeds"
    else:
        return Difference(value)
    interval = found.confidence_interval(LEVEL)
    return Difference(value, float(interval.low), float(interval.high), float(found.pvalue), name)


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """The same with p raised for how many are looked at (Holm, 1979); untested ones stay as they are."""
    order = sorted((i for i, d in enumerate(differences) if not math.isnan(d.p)), key=lambda i: differences[i].p)
    raised, least = list(differences), 0.0
    for rank, i in enumerate(order):
        least = min(1.0, max(least, (len(order) - rank) * differences[i].p))
        raised[i] = replace(differences[i], p=least)
    return raised
