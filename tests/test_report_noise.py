"""Means, intervals and tests against independent calculations on random numbers."""

import math

import numpy as np
import pytest

from depthlit.report.noise import NO_SEED, NO_SPREAD, ONE_SEED, Difference, compare, holm, mean


def tail(t: float, df: float) -> float:
    """P(|T| > t) of Student's t, by integrating its density in u = arctan(x / sqrt df)."""
    u = np.linspace(0, math.atan(abs(t) / math.sqrt(df)), 200_001)
    y = np.cos(u) ** (df - 1)
    inner = float(((y[1:] + y[:-1]) / 2 * np.diff(u)).sum())
    whole = math.sqrt(math.pi) * math.gamma(df / 2) / math.gamma((df + 1) / 2) / 2
    return 1 - inner / whole


def quantile(df: float) -> float:
    """t with P(|T| > t) = 5 %, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > 0.05 else (low, middle)
    return low


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_mean_has_its_t_interval(n: int) -> None:
    values = np.random.default_rng(n).normal(3, 1, n)
    found = mean(list(values))
    spread = math.sqrt(sum((x - values.mean()) ** 2 for x in values) / (n - 1))
    assert found.value == pytest.approx(sum(values) / n)
    assert found.half == pytest.approx(quantile(n - 1) * spread / math.sqrt(n), rel=1e-5)
    assert found.n == n


def test_one_seed_has_no_interval() -> None:
    assert mean([2.0]).value == 2.0
    assert math.isnan(mean([2.0]).half)
    assert math.isnan(mean([]).value)


def test_three_shared_seeds_are_paired() -> None:
    rng = np.random.default_rng(0)
    a = {seed: float(rng.normal()) for seed in (0, 1, 2, 5)}
    b = {seed: a[seed] - 0.3 + 0.05 * float(rng.normal()) for seed in (0, 1, 2)} | {9: 4.0}
    steps = np.array([a[seed] - b[seed] for seed in (0, 1, 2)])
    error = steps.std(ddof=1) / math.sqrt(3)
    found = compare(a, b)
    assert found.test == "paired t, 3 seeds"
    assert found.value == pytest.approx(steps.mean())
    assert found.p == pytest.approx(tail(steps.mean() / error, 2), rel=1e-4)
    assert found.high - found.low == pytest.approx(2 * quantile(2) * error, rel=1e-5)
    assert found.verdict == "higher"
    assert compare(b, a).verdict == "lower"


def test_two_seeds_are_compared_by_welch() -> None:
    a, b = {0: 1.0, 1: 1.3}, {0: 1.9, 1: 1.5, 7: 1.6}
    va, vb = np.var(list(a.values()), ddof=1) / 2, np.var(list(b.values()), ddof=1) / 3
    df = (va + vb) ** 2 / (va**2 + vb**2 / 2)
    value = np.mean(list(a.values())) - np.mean(list(b.values()))
    found = compare(a, b)
    assert found.test == "Welch t, 2 and 3 seeds"
    assert found.value == pytest.approx(value)
    assert found.p == pytest.approx(tail(value / math.sqrt(va + vb), df), rel=1e-4)
    assert found.low == pytest.approx(value - quantile(df) * math.sqrt(va + vb), rel=1e-5)


def test_what_cannot_be_tested_says_so() -> None:
    assert compare({0: 1.0}, {0: 2.0, 1: 3.0}).verdict == ONE_SEED
    assert compare({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}).verdict == NO_SPREAD
    assert compare({0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 3.0, 2: 5.0}).verdict == NO_SPREAD
    assert math.isnan(compare({}, {0: 1.0}).value) and compare({}, {0: 1.0}).verdict == NO_SEED


def test_seeds_of_one_distribution_are_called_different_in_one_case_of_twenty() -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(1500, 2, 4))
    wrong = [compare(dict(enumerate(a)), dict(enumerate(b))).verdict != "not separated" for a, b in draws]
    assert 0.035 < np.mean(wrong) < 0.066


def test_holm_raises_p_and_leaves_the_untested() -> None:
    p = [0.01, 0.04, math.nan, 0.03, 0.5]
    raised = [one.p for one in holm([Difference(1.0, p=x) for x in p])]
    assert raised[:2] == pytest.approx([0.04, 0.09])
    assert math.isnan(raised[2])
    assert raised[3:] == pytest.approx([0.09, 0.5])
