"""Claims as code: parts that compare arms over paired seeds, and their conjunction."""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.experiment.results import Results
from jaxrl_llm.metrics.intervals import Interval, bootstrap_share, mean_interval, paired_difference

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE = "reproduced", "not reproduced", "inconclusive"


class Part(NamedTuple):
    """One comparison: what was found, what it says, and the bootstrap share of seed resamples in which it holds."""

    text: str
    verdict: str
    confidence: float


class Claim(NamedTuple):
    """What the paper says, restated for this experiment, and what came out.

    ``confidence`` is the bootstrap confidence in the verdict over resampled seeds: of the weakest part where all hold,
    that the worst part fails where one does not, and of the weakest part where it stays open. It knows nothing of
    other tasks, models or sizes.
    """

    statement: str
    verdict: str
    confidence: float
    parts: tuple[Part, ...]


def _difference(results: Results, metric: str, arm: str, other: str, step) -> tuple[np.ndarray, Interval]:
    steps = [None if s is None else int(s) for s in (step if isinstance(step, tuple) else (step, step))]
    left, right = results.values(arm, metric, step=steps[0]), results.values(other, metric, step=steps[1])
    fine = np.isfinite(left) & np.isfinite(right)
    if fine.sum() < 2:  # no interval, and nothing to resample
        return np.zeros(0), Interval(np.nan, np.nan, np.nan, int(fine.sum()))
    return (left - right)[fine], paired_difference(left[fine], right[fine])


def _part(text: str, found: Interval, holds: bool, fails: bool, share: float) -> Part:
    verdict = REPRODUCED if holds else NOT_REPRODUCED if fails else INCONCLUSIVE
    return Part(f"{text}: {found.mean:+.4g} [{found.low:+.4g}, {found.high:+.4g}] (n={found.n})", verdict, share)


def _at(step: Any) -> str:
    if step is None:
        return ""
    steps = [int(s) for s in step] if isinstance(step, tuple) else [int(step)]
    return f" at steps {steps[0]} and {steps[1]}" if len(steps) == 2 else f" at step {steps[0]}"


def greater(results: Results, metric: str, arm: str, than: str, *, by: float = 0.0, step=None) -> Part:
    """``metric`` of ``arm`` exceeds that of ``than`` by more than ``by``, seeds paired, 95 % t interval.

    Args:
      step: compare the curves at this step, or at ``(step of arm, step of than)``; None: the final values.
    """
    values, found = _difference(results, metric, arm, than, step)
    at = _at(step)
    share = bootstrap_share(values, lambda mean: mean > by)
    return _part(f"{metric}{at}, {arm} - {than} > {by:g}", found, found.low > by, found.high < by, share)


def smaller(results: Results, metric: str, arm: str, than: str, *, by: float = 0.0, step=None) -> Part:
    """``metric`` of ``arm`` is below that of ``than`` by more than ``by``; otherwise as ``greater``."""
    values, found = _difference(results, metric, arm, than, step)
    at = _at(step)
    share = bootstrap_share(values, lambda mean: mean < -by)
    return _part(f"{metric}{at}, {arm} - {than} < {-by:g}", found, found.high < -by, found.low > -by, share)


def close(results: Results, metric: str, arm: str, to: str, *, within: float, step=None) -> Part:
    """``metric`` of the two arms differs by less than ``within`` (equivalence: the whole interval lies inside)."""
    values, found = _difference(results, metric, arm, to, step)
    at = _at(step)
    share = bootstrap_share(values, lambda mean: np.abs(mean) < within)
    holds, fails = -within < found.low and found.high < within, found.low > within or found.high < -within
    return _part(f"{metric}{at}, |{arm} - {to}| < {within:g}", found, holds, fails, share)


def grows_more(results: Results, metric: str, arm: str, than: str, *, start: int, end: int | None = None) -> Part:
    """``metric`` of ``arm`` rises from step ``start`` to ``end`` (None: the last) by more than that of ``than``."""
    gains = [results.values(x, metric, step=end) - results.values(x, metric, step=start) for x in (arm, than)]
    fine = np.isfinite(gains[0]) & np.isfinite(gains[1])
    many = fine.sum() > 1
    found = paired_difference(*(g[fine] for g in gains)) if many else Interval(np.nan, np.nan, np.nan, int(fine.sum()))
    share = bootstrap_share((gains[0] - gains[1])[fine] if many else np.zeros(0), lambda mean: mean > 0)
    text = f"{metric}, rise of {arm} - rise of {than} since step {start} > 0"
    return _part(text, found, found.low > 0, found.high < 0, share)


def above(results: Results, metric: str, arm: str, level: float, *, step: int | None = None) -> Part:
    """``metric`` of one arm lies above a fixed number, 95 % t interval over seeds; ``step`` as in ``greater``."""
    text, found, values = _alone(results, metric, arm, step)
    share = bootstrap_share(values, lambda mean: mean > level)
    return _part(f"{text} > {level:g}", found, found.low > level, found.high < level, share)


def below(results: Results, metric: str, arm: str, level: float, *, step: int | None = None) -> Part:
    """``metric`` of one arm lies below a fixed number; otherwise as ``above``."""
    text, found, values = _alone(results, metric, arm, step)
    share = bootstrap_share(values, lambda mean: mean < level)
    return _part(f"{text} < {level:g}", found, found.high < level, found.low > level, share)


def _alone(results: Results, metric: str, arm: str, step: int | None) -> tuple[str, Interval, np.ndarray]:
    values = results.values(arm, metric, step=step)
    values = values[np.isfinite(values)]
    text = f"{metric}, {arm}" if step is None else f"{metric} at step {step}, {arm}"
    if values.size < 2:
        return text, Interval(np.nan, np.nan, np.nan, int(values.size)), np.zeros(0)
    return text, mean_interval(values), values


def conclude(statement: str, *parts: Part) -> Claim:
    """Reproduced when every part holds, not reproduced when one fails, else inconclusive."""
    if not parts:
        raise ValueError("a claim needs at least one part")
    failing = [p for p in parts if p.verdict == NOT_REPRODUCED]
    if failing:
        return Claim(statement, NOT_REPRODUCED, max(1.0 - p.confidence for p in failing), parts)
    verdict = REPRODUCED if all(p.verdict == REPRODUCED for p in parts) else INCONCLUSIVE
    return Claim(statement, verdict, min(p.confidence for p in parts), parts)


def open_claim(statement: str) -> Claim:
    """What is said when there is nothing to judge: arms are missing, or it was a smoke run."""
    return Claim(statement, INCONCLUSIVE, 0.0, ())
