"""Numbers made of numbers: late pairs and their fractions, bootstrap intervals."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats


def first_late(n: int) -> int:
    """The first of the late layers, those of the last three quarters: ceil(n / 4), counted from 0."""
    return math.ceil(n / 4)


def late_pairs(score: np.ndarray) -> np.ndarray:
    """The entries (s, l) of an (L, L) score with s >= ceil(L / 4) and l > s, layers counted from 0.

    DepthBench, Eq. (5), arXiv:2609.32534.
    """
    n = len(score)
    return np.array([score[s, l] for s in range(first_late(n), n) for l in range(s + 1, n)])


def fraction_above(values: np.ndarray, threshold: float) -> float:
    """Share of the values above a threshold; NaN if there are none."""
    return float((values > threshold).mean()) if values.size else math.nan


def sweep(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of the values above each threshold."""
    return np.array([fraction_above(values, threshold) for threshold in thresholds])


def bootstrap(
    totals: np.ndarray, numbers: np.ndarray, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of  sum of totals / sum of numbers  over resampled units.

    Args:
        totals: (U, ...), one row per unit (window or document).
        numbers: (U,) tokens in each.
        seed: of the resampling.
        level: of confidence.
        resamples: how many times to resample.

    Returns:
        Lower and upper ends, (...); NaN with fewer than two units.
    """
    if len(totals) < 2:
        return np.full(totals.shape[1:], np.nan), np.full(totals.shape[1:], np.nan)
    flat = totals.reshape(len(totals), -1)
    each = np.broadcast_to(numbers[:, None], flat.shape)
    found = stats.bootstrap(
        (flat, each), lambda total, number, axis: total.sum(axis) / number.sum(axis), paired=True, axis=0,
        vectorized=True, method="percentile", confidence_level=level, n_resamples=resamples,
        batch=max(1, 4_000_000 // flat.size), rng=np.random.default_rng(seed),
    )  # fmt: skip
    low, high = found.confidence_interval
    return low.reshape(totals.shape[1:]), high.reshape(totals.shape[1:])
