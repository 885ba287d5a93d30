"""When a comparison is decided: alpha spent over looks, the algebra of verdicts, Holm's correction, gates of a bed.

Pure functions of numbers. Seeds come in looks of 8, 16, 32 and 64; at each the paired t interval has the level that
a spending function gives this look, and the levels add up to 5 %: by the union bound a wrong direction is said with a
chance of at most 2.5 % a side, however the looks depend on each other.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

SUPPORTED_HERE, SUPPORTED, CONTRADICTED = "supported here", "supported", "contradicted"
NO_EFFECT, UNDECIDED, INVALID = "no practical effect", "undecided", "test bed invalid"
NOT_JUDGED, WITHDRAWN = "not judged", "withdrawn"
VERDICTS = (SUPPORTED, SUPPORTED_HERE, CONTRADICTED, NO_EFFECT, UNDECIDED, INVALID, WITHDRAWN, NOT_JUDGED)

LOOKS = (8, 16, 32, 64)
ALPHA = 0.05  # two-sided, over all looks together
SMALLEST_SHARE = 0.02  # the least smallest effect of interest of a share
OF_GAIN = 0.25  # else so much of what the baseline itself gains


class Bounds(NamedTuple):
    """A mean and its t interval of ``1 - level`` coverage over ``n`` seeds; ``p``: two-sided, of a mean of zero."""

    mean: float
    low: float
    high: float
    n: int
    level: float
    p: float


def spent(fraction: float, alpha: float = ALPHA) -> float:
    """What may be spent up to a fraction of the seeds: ``alpha ln(1 + (e - 1) fraction)``.

    From "Discrete Sequential Boundaries for Clinical Trials" (Lan and DeMets, 1983), the function near Pocock's.

    >>> round(spent(0.5), 4), round(spent(1.0), 4)
    (0.031, 0.05)
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie in [0, 1]")
    return alpha * math.log1p((math.e - 1) * fraction)


def levels(looks: Sequence[int] = LOOKS, alpha: float = ALPHA) -> tuple[float, ...]:
    """The two-sided level of every look; they add up to ``alpha``.

    >>> [round(x, 4) for x in levels()]
    [0.0097, 0.0081, 0.0131, 0.019]
    >>> levels((8,))
    (0.05,)
    """
    if not looks or list(looks) != sorted(set(looks)) or looks[0] < 2:
        raise ValueError(f"looks={tuple(looks)} must be rising numbers of seeds, the first at least 2")
    totals = [spent(n / looks[-1], alpha) for n in looks]
    return tuple(b - a for a, b in zip([0.0, *totals[:-1]], totals, strict=True))


def level_at(seeds: int, looks: Sequence[int] = (), alpha: float = ALPHA) -> float:
    """The level of an interval over so many seeds: that of the last look reached; all of ``alpha`` without looks.

    Before the first look nothing may be spent: the level is that of the first.
    """
    if not looks:
        return alpha
    reached = [level for n, level in zip(looks, levels(looks, alpha), strict=True) if n <= seeds]
    return reached[-1] if reached else levels(looks, alpha)[0]


def bounds(values, level: float = ALPHA) -> Bounds:
    """Mean and t interval of independent differences; NaN bounds and p = 1 for fewer than two.

    >>> found = bounds([0.1, 0.2, 0.3, 0.2])
    >>> round(found.low, 4), round(found.high, 4), found.n
    (0.0701, 0.3299, 4)
    """
    values = np.asarray(values, np.float64)
    n, mean = values.size, float(values.mean()) if values.size else math.nan
    if n < 2:
        return Bounds(mean, math.nan, math.nan, n, level, 1.0)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 1 - level / 2)) * error
    return Bounds(mean, mean - half, mean + half, n, level, p_value(mean, error, n))


def p_value(mean: float, error: float, n: int) -> float:
    """Two-sided p of a mean of zero by Student's t; 1 where nothing varies and nothing differs, 0 where it differs."""
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * special.stdtr(n - 1, -abs(mean) / error))


def decide(low: float, high: float, d_star: float) -> str:
    """The verdict on an effect whose interval points in the paper's direction; NaN bounds stay undecided.

    >>> [decide(*x, 0.02) for x in ((0.001, 0.01), (-0.05, -0.01), (-0.01, 0.015), (-0.01, 0.03))]
    ['supported here', 'contradicted', 'no practical effect', 'undecided']
    """
    if low > 0:
        return SUPPORTED_HERE
    if high < 0:
        return CONTRADICTED
    return NO_EFFECT if -d_star < low and high < d_star else UNDECIDED


def decide_same(low: float, high: float, within: float) -> str:
    """The verdict on a claim of no difference: the whole interval inside or outside ``+-within``.

    >>> [decide_same(*x, 0.02) for x in ((-0.01, 0.01), (0.03, 0.05), (0.01, 0.03))]
    ['supported here', 'contradicted', 'undecided']
    """
    if -within < low and high < within:
        return SUPPORTED_HERE
    return CONTRADICTED if low > within or high < -within else UNDECIDED


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> tuple[tuple[float, bool], ...]:
    """For every test its level and whether Holm's step-down procedure rejects it; at most ``alpha`` over all.

    The smallest of m p values is held against ``alpha / m``, the next against ``alpha / (m - 1)``, until one fails.

    From "A Simple Sequentially Rejective Multiple Test Procedure" (Holm, 1979).

    >>> [(round(level, 4), rejected) for level, rejected in holm([0.02, 0.001, 0.03])]
    [(0.025, True), (0.0167, True), (0.05, True)]
    >>> [rejected for _, rejected in holm([0.03, 0.001, 0.04])]
    [False, True, False]
    """
    order, found, going = np.argsort(p_values, kind="stable"), [(alpha, False)] * len(p_values), True
    for rank, k in enumerate(order):
        level = alpha / (len(p_values) - rank)
        going = going and p_values[k] <= level
        found[k] = (level, bool(going))
    return tuple(found)


def smallest_effect(gain: float, share: bool) -> float:
    """The smallest effect of interest where a file states no other: 25 % of the baseline's own gain.

    Args:
      gain: of the baseline from its start to its end, by amount.
      share: whether the metric is a share, for which 0.02 is the least.

    >>> smallest_effect(0.2, True), smallest_effect(0.01, True), smallest_effect(4.0, False)
    (0.05, 0.02, 1.0)
    """
    return max(SMALLEST_SHARE if share else 0.0, OF_GAIN * abs(gain))


def across(verdicts: Sequence[str]) -> str:
    """The verdict over the records of one paper, each on a task or base model of its own.

    Two that support it make it *supported*; where one supports and another contradicts it stays undecided.

    >>> across(["supported here"]), across(["supported here", "supported here", "undecided"])
    ('supported here', 'supported')
    >>> across(["supported here", "contradicted"]), across(["test bed invalid", "contradicted"])
    ('undecided', 'contradicted')
    """
    standing = [v for v in verdicts if v not in (INVALID, WITHDRAWN, NOT_JUDGED)]
    support = sum(v in (SUPPORTED, SUPPORTED_HERE) for v in standing)
    if not standing:
        return verdicts[0] if verdicts else NOT_JUDGED
    if CONTRADICTED in standing:
        return UNDECIDED if support else CONTRADICTED
    if support:
        return SUPPORTED if support > 1 or SUPPORTED in standing else SUPPORTED_HERE
    return NO_EFFECT if NO_EFFECT in standing else UNDECIDED


def gained(values) -> tuple[float, float]:
    """Mean gain from the first measurement to the last, and its standard error over the seeds, of ``[seeds, points]``.

    Seeds without one of the two have no gain, and make the others no surer.

    >>> gained([[0.0, 0.25], [0.0, 0.75]])
    (0.5, 0.25)
    """
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values[:, -1] - values[:, 0])]
    if not len(values):
        return math.nan, math.inf
    gains = values[:, -1] - values[:, 0]
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return float(values[:, -1].mean() - values[:, 0].mean()), error


def gates(steps, values, *, ceiling: float | None = None, chance: float = 0.0, room: bool = True) -> list[str]:
    """What is wrong with a test bed, read off its baseline's curve; nothing where it can show an effect.

    Args:
      steps: of the measurements, the first before training; one that is undefined in all seeds is passed over.
      values: ``[seeds, points]`` of a metric that training should raise.
      ceiling: the best possible value; None: unknown, and the end is not held against it.
      chance: what guessing earns.
      room: whether the claim is about this metric or one like it: then the end must leave room, and the gain must not
        be over before the first evaluation. A claim about lengths or pairs only needs training that works.
    """
    values = np.asarray(values, np.float64)
    there = np.isfinite(values).any(axis=0)
    there[[0, -1]] = True  # without a start or an end nothing was gained
    values, at = values[:, there], steps[min(int(np.flatnonzero(there)[1]), len(steps) - 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all seeds are undefined the mean is
        mean = np.nanmean(values, axis=0)
    start, first, end, best = mean[0], mean[1], mean[-1], np.nanmax(mean)
    gain, error = gained(values)
    found = []
    if not gain > 4 * error:
        found.append(f"the baseline gains {gain:+.3g}, not four standard errors ({error:.2g})")
    elif best - end > 0.2 * (best - start):
        found.append(f"the baseline falls from {best:.3g} to {end:.3g}, more than a fifth of its gain")
    if room and ceiling is not None and not 0.1 * ceiling <= end <= 0.85 * ceiling:
        found.append(f"the baseline ends at {end:.3g}, outside 10 - 85 % of the ceiling {ceiling:g}")
    if room and gain > 4 * error and first - start > 0.6 * gain:
        share = f"{100 * (first - start) / gain:.0f} % of the gain comes before the first evaluation (step {at})"
        found.append(share)
    if ceiling is not None and gain > 4 * error and end <= chance + 4 * error:
        found.append(f"the baseline ends at {end:.3g}, where guessing earns {chance:g}")
    return found


def improvement(differences, sign: int = 1) -> float:
    """Probability of improvement: the share of paired seeds that are better, ties by half. NaN without any.

    After "Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv:2108.13264, for paired seeds.

    >>> improvement([0.1, -0.2, 0.0, 0.3])
    0.625
    """
    values = sign * np.asarray(differences, np.float64)
    return float(np.mean((values > 0) + 0.5 * (values == 0))) if values.size else math.nan
