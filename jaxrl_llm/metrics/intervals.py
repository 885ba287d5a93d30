"""Intervals for reported numbers; NumPy only."""

import math
from typing import NamedTuple

import numpy as np

# two-sided 97.5 % quantiles of Student's t for 1..30 degrees of freedom
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Interval(NamedTuple):
    """A mean with its 95 % interval and the number of independent units behind it."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


def t_quantile(dof: int) -> float:
    """97.5 % quantile of Student's t (the table to 30, then the expansion around 1.96)."""
    if dof < 1:
        raise ValueError(f"dof={dof} must be at least 1; an interval needs two values")
    if dof <= len(_T975):
        return _T975[dof - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * dof)


def mean_interval(values) -> Interval:
    """Mean and t interval over independent values (seeds, or problems). NaN bounds for a single value.

    >>> str(mean_interval([1.0, 2.0, 3.0]))
    '2.000 [-0.484, 4.484] (n=3)'
    """
    values = np.asarray(values, np.float64)
    n = values.size
    if n == 0:
        raise ValueError("no values to average")
    mean = float(values.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = t_quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def wilson_interval(successes: float | int, n: int) -> Interval:
    """Wilson's 95 % interval of a proportion.

    >>> str(wilson_interval(8, 10))
    '0.800 [0.490, 0.943] (n=10)'
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie in [0, n] with n={n} at least 1")
    z2, p = 1.959964**2, successes / n
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # rounding must not carry an end beyond the possible, nor past the proportion itself
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)


def score_interval(values) -> Interval:
    """Mean of scores in [0, 1] with its t interval cut to [0, 1]; Wilson's where a t interval says nothing.

    A single score and equal scores have no spread to go by: ten zeros are no proof that the rate is exactly zero.

    >>> print(score_interval([0.0, 0.5, 0.5]), "and", score_interval([0.0] * 8))
    0.333 [0.000, 1.000] (n=3) and 0.000 [0.000, 0.324] (n=8)
    """
    values = np.asarray(values, np.float64)
    if values.size and not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"scores must lie in [0, 1]; these lie in [{values.min()}, {values.max()}]")
    if values.size and values.min() == values.max():
        return wilson_interval(float(values.sum()), values.size)
    found = mean_interval(values)
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def paired_difference(left, right) -> Interval:
    """Interval of ``left - right`` over paired values (the same seeds)."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    if left.shape != right.shape:
        raise ValueError(f"paired values differ in shape: {left.shape} and {right.shape}")
    return mean_interval(left - right)


def pass_at_k(correct, samples: int, k: int) -> np.ndarray:
    """Unbiased pass@k of each problem from ``correct`` right answers among ``samples``.

    ``1 - C(n - c, k) / C(n, k)``, as a product that does not overflow.

    From "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, eq. 1.

    >>> pass_at_k([0, 1, 4], 4, 2).round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must lie in [1, samples={samples}]")
    correct = np.asarray(correct, np.int64)
    wrong = samples - correct
    failing = np.ones(correct.shape, np.float64)
    for i in range(k):
        failing *= np.clip(wrong - i, 0, None) / (samples - i)
    return 1.0 - failing


def best_of_k(values, k: int) -> np.ndarray:
    """The expected largest of ``k`` of each problem's values ``[N, n]``, drawn without putting back.

    ``sum_i x_(i) C(i - 1, k - 1) / C(n, k)`` over the sorted values: of ones and zeros it is ``pass_at_k``.

    >>> best_of_k([[3.0, 1.0, 2.0]], 1).tolist(), best_of_k([[3.0, 1.0, 2.0]], 2).round(4).tolist()
    ([2.0], [2.6667])
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=1)
    samples = ordered.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must lie in [1, samples={samples}]")
    chances = [math.comb(i, k - 1) / math.comb(samples, k) for i in range(samples)]
    return ordered @ np.asarray(chances)


def pass_hat_k(correct, samples: int, k: int):
    """Unbiased pass^k of each task, the chance that ``k`` trials all succeed: ``C(c, k) / C(n, k)``.

    An array of NumPy gives one of NumPy, one of JAX gives one of JAX.

    From "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains", arXiv:2406.12045.

    >>> pass_hat_k(np.array([1, 3, 4]), 4, 2).tolist()
    [0.0, 0.5, 1.0]
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must lie in [1, samples={samples}]")
    chance = 1.0
    for i in range(k):
        chance = chance * (correct - i).clip(0) / (samples - i)
    return chance
