"""Records of arms and the one ``results.json``; tables from them."""

import dataclasses
import json
import math
import pathlib
import re
import sys
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.experiment.evidence.along import Along, reached, short
from jaxrl_llm.metrics.intervals import Interval, mean_interval

# the name of a function, and all that is bound to it, as ``plain`` writes it: not its module
_MOVED = re.compile(r"[A-Za-z_][\w.]*\.(\w+)(\(.*\))?", re.DOTALL)
DIGITS = 6  # significant digits kept in records


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """What one arm gave: final ``metrics[name]`` is ``[seeds]``; ``curves[name]``: ``step``, ``[seeds, points]``."""

    settings: dict[str, Any]
    seeds: list[int]
    metrics: dict[str, list[float]]
    curves: dict[str, dict[str, list]]
    rollouts: int  # of one seed; mean over seeds where the method decides how many it draws
    tokens: int  # generated or trained on, mean over seeds
    updates: int  # of one seed
    seconds: float
    problems: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # [seeds]: counts by problem, see `pack`
    trials: int = 0  # samples of each problem behind such a count


@dataclasses.dataclass(frozen=True)
class Results:
    """All arms, in the order of ``ARMS``, and what was fixed before their first seed.

    ``looks`` are the numbers of seeds at which the claim was looked at, none: once; ``d_star`` the smallest effects of
    interest by metric.
    """

    arms: dict[str, ArmResult]
    looks: tuple[int, ...] = ()
    d_star: dict[str, float] = dataclasses.field(default_factory=dict)

    def values(self, arm: str, metric: str, *, step: int | Along | None = None) -> np.ndarray:
        """Per seed: the final value, or that of the curve at ``step``, or where a budget was spent.

        Raises:
          KeyError: for an arm or a metric that was not recorded, or not at that step.
        """
        found = self.arms[arm]
        if step is None:
            return np.asarray(found.metrics[metric], np.float64)
        if isinstance(step, Along):
            _, budget, worth = self.beside(arm, step.budget, metric)
            return reached(budget, worth, step.level, mean=step.mean)
        curve = found.curves[metric]
        if step not in curve["step"]:
            raise KeyError(f"{metric} at step {step}")
        return np.asarray(curve["values"], np.float64)[:, curve["step"].index(step)]

    def at_seeds(self, arm: str, metric: str, seeds: list[int], *, step: int | Along | None = None) -> np.ndarray:
        """``values`` of these seeds, in their order; arms of later looks have more."""
        every, where = self.values(arm, metric, step=step), self.arms[arm].seeds
        return np.asarray([every[where.index(seed)] for seed in seeds], np.float64)

    def short(self, arm: str, step: int | Along | None, seeds: list[int]) -> int:
        """How many of these runs end before the budget is spent, and count with their last value there.

        None of an arm that makes no updates: it has nothing to spend it with.
        """
        if not isinstance(step, Along) or not self.arms[arm].updates:
            return 0
        where = [self.arms[arm].seeds.index(seed) for seed in seeds]
        return short(self.curve(arm, step.budget)[1][where], step.level)

    def diverged(self, arm: str) -> set[int]:
        """Seeds whose loss or gradient ended undefined."""
        found = self.arms[arm]
        ends = [found.metrics[name] for name in ("loss/total", "grad/norm") if name in found.metrics]
        return {seed for row in ends for seed, value in zip(found.seeds, row, strict=True) if not math.isfinite(value)}

    def beside(self, arm: str, budget: str, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(steps, budget, values)`` of two curves, at the steps that both have."""
        (steps, spent), (others, worth) = self.curve(arm, budget), self.curve(arm, metric)
        common = np.isin(steps, others), np.isin(others, steps)
        return steps[common[0]], spent[:, common[0]], worth[:, common[1]]

    def curve(self, arm: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """``(steps, values [seeds, points])``."""
        curve = self.arms[arm].curves[metric]
        return np.asarray(curve["step"]), np.asarray(curve["values"], np.float64)


def interval(values) -> Interval:
    """Mean and 95 % t interval of the finite values; NaN where there is none."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    return mean_interval(values) if values.size else Interval(math.nan, math.nan, math.nan, 0)


def _module(value: Any) -> str:
    """Where a function is from: the file that runs as ``__main__`` has its own name, too."""
    spec = getattr(sys.modules["__main__"], "__spec__", None) if value.__module__ == "__main__" else None
    return spec.name if spec else value.__module__


def plain(value: Any) -> Any:
    """As JSON: functions by name, NaN as null, floats with six significant digits."""
    if isinstance(value, partial):
        bound = [*map(str, map(plain, value.args)), *(f"{k}={plain(v)}" for k, v in value.keywords.items())]
        return f"{plain(value.func)}({', '.join(bound)})"
    if callable(value):
        return f"{_module(value)}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(v) for v in value]
    return math.nan if value is None else value


def read_arm(record: dict[str, Any]) -> ArmResult:
    """The inverse of ``plain(dataclasses.asdict(arm))``."""
    return ArmResult(
        **record
        | {
            "metrics": {k: _number(v) for k, v in record["metrics"].items()},
            "curves": {k: {n: _number(x) for n, x in v.items()} for k, v in record["curves"].items()},
        }
    )


def read(path: str | pathlib.Path) -> tuple[dict[str, Any], Results]:
    """A ``results.json`` as it lies there, and its arms."""
    record = json.loads(pathlib.Path(path).read_text())
    arms = {name: read_arm(arm) for name, arm in record["arms"].items()}
    return record, Results(arms, tuple(record.get("looks", ())), record.get("d_star", {}))


def join(parts: list[ArmResult]) -> ArmResult:
    """One arm from the results of its seeds, in the order given; budgets and times are means and sums over seeds.

    Raises:
      ValueError: where they were measured at different steps.
    """
    first, curves = parts[0], {}
    for name, curve in first.curves.items():
        if any(part.curves[name]["step"] != curve["step"] for part in parts):
            raise ValueError(f"the curve {name} was measured at other steps in some of {len(parts)} seeds")
        curves[name] = {"step": curve["step"], "values": [row for part in parts for row in part.curves[name]["values"]]}
    sizes = np.asarray([len(part.seeds) for part in parts])
    return dataclasses.replace(
        first,
        seeds=[seed for part in parts for seed in part.seeds],
        metrics={name: [v for part in parts for v in part.metrics[name]] for name in first.metrics},
        curves=curves,
        rollouts=round(float(np.average([part.rollouts for part in parts], weights=sizes))),
        tokens=int(np.average([part.tokens for part in parts], weights=sizes)),
        seconds=float(sum(part.seconds for part in parts)),
        problems={name: [v for part in parts for v in part.problems[name]] for name in first.problems},
    )


def of_seed(arm: ArmResult, index: int) -> ArmResult:
    """One seed of an arm, the inverse of ``join``."""
    return dataclasses.replace(
        arm,
        seeds=[arm.seeds[index]],
        metrics={name: [values[index]] for name, values in arm.metrics.items()},
        curves={name: {"step": c["step"], "values": [c["values"][index]]} for name, c in arm.curves.items()},
        seconds=arm.seconds / len(arm.seeds),
        problems={name: [rows[index]] for name, rows in arm.problems.items()},
    )


def pack(counts) -> str:
    """Small numbers, one of each problem, as one character each, from 0 on.

    >>> pack([0, 9, 12]), unpack("09<").tolist()
    ('09<', [0, 9, 12])
    """
    return "".join(chr(ord("0") + int(n)) for n in counts)


def unpack(text: str) -> np.ndarray:
    """The inverse of ``pack``."""
    return np.asarray([ord(letter) - ord("0") for letter in text])


def cell(found: Interval) -> str:
    """Mean [95 % interval] (n)."""
    if found.n == 0:
        return "undefined"
    if found.n == 1:
        return f"{found.mean:.4g} (n=1)"
    return f"{found.mean:.4g} [{found.low:.4g}, {found.high:.4g}] (n={found.n})"


def table(results: Results, metrics) -> str:
    """Markdown: one row an arm, mean [95 % interval] (n) of each metric, and the budget.

    Where no arm has any of ``metrics``, all that was measured is shown.
    """
    measured = {m for arm in results.arms.values() for m in arm.metrics}
    metrics = metrics if measured & set(metrics) else sorted(measured)
    lines = ["| arm | " + " | ".join(metrics) + " | rollouts | tokens | updates |", "|---" * (len(metrics) + 4) + "|"]
    for name, arm in results.arms.items():
        cells = [cell(interval(arm.metrics.get(m, []))) for m in metrics]
        budget = f"{arm.rollouts:,} | {arm.tokens:,} | {arm.updates:,}"
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {budget} |")
    return "\n".join(lines) + "\n"


def same(old: Any, new: Any) -> bool:
    """Equal, or a function of that name elsewhere, bound to the same: functions move.

    >>> same("losses.f(low=0.2)", "losses.policy.f(low=0.2)"), same("losses.f(low=0.2)", "losses.f(low=0.5)")
    (True, False)
    """
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return len(old) == len(new) and all(same(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(value, new[key]) for key, value in old.items())
    names = [_MOVED.fullmatch(x) if isinstance(x, str) else None for x in (old, new)]
    return old == new or (None not in names and names[0].groups() == names[1].groups())  # type: ignore[union-attr]
