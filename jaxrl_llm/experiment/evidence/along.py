"""Where on a curve arms are compared: where each has spent the same of something, or on the way there."""

import dataclasses

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Along:
    """``step=`` of a part of a claim: the value where the curve of ``budget`` first reaches ``level``.

    With ``mean`` it is the mean of the metric over all budgets from the curve's first one to ``level``.
    """

    budget: str
    level: float
    mean: bool = False

    def __str__(self) -> str:
        return f"{self.budget} {'up to ' if self.mean else ''}{self.level:g}"


def at(budget: str, level: float) -> Along:
    """Compare arms where ``budget`` (for example ``eval/kl``) of each seed first reaches ``level``.

    A run that never gets there counts with its last value: it was free to spend the rest. The report says how many do.
    """
    return Along(budget, level)


def up_to(budget: str, level: float) -> Along:
    """Compare arms by the mean of the metric over budgets up to ``level``: the whole curve, not one point of it."""
    return Along(budget, level, mean=True)


def _path(budget: np.ndarray, values: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """One curve up to the level, whose last point lies on it; a budget that falls back has been spent all the same."""
    spent = np.maximum.accumulate(budget)
    over = np.flatnonzero(spent >= level)
    if not over.size:  # what remains of the budget stays unspent, at the last value
        return np.append(spent, level), np.append(values, values[-1])
    k = int(over[0])
    if k == 0:
        return spent[:1], values[:1]
    share = (level - spent[k - 1]) / (spent[k] - spent[k - 1])
    end = values[k - 1] + share * (values[k] - values[k - 1])
    return np.append(spent[:k], level), np.append(values[:k], end)


def reached(
    budget: Float[np.ndarray, "S P"], values: Float[np.ndarray, "S P"], level: float, *, mean: bool = False
) -> Float[np.ndarray, " S"]:
    """Per seed: ``values`` where ``budget`` first is ``level``, linear between points, or their mean up to there.

    >>> kl, gold = np.array([[0.0, 2.0, 6.0]]), np.array([[1.0, 3.0, 2.0]])
    >>> float(reached(kl, gold, 4.0)[0]), float(reached(kl, gold, 9.0)[0])
    (2.5, 2.0)
    >>> float(reached(kl, gold, 4.0, mean=True)[0])  # 2 up to kl 2, then 2.75
    2.375

    Raises:
      ValueError: for curves of different shapes.
    """
    if budget.shape != values.shape:
        raise ValueError(f"budget {budget.shape} and values {values.shape} must be measured at the same steps")
    paths = [_path(*row, level) for row in zip(budget, values, strict=True)]
    if not mean:
        return np.asarray([y[-1] for _, y in paths])
    return np.asarray([np.trapezoid(y, x) / (x[-1] - x[0]) if x[-1] > x[0] else y[0] for x, y in paths])


def cut(budget: Float[np.ndarray, "S P"], values: Float[np.ndarray, "S P"], level: float) -> Float[np.ndarray, "S Q"]:
    """The curves up to where the mean budget has reached ``level``; the last column is each seed's value there.

    >>> cut(np.array([[0.0, 2.0, 6.0, 9.0]]), np.array([[1.0, 3.0, 2.0, 0.0]]), 4.0).tolist()
    [[1.0, 3.0, 2.5]]
    """
    spent = np.maximum.accumulate(np.nanmean(budget, axis=0))
    before = max(1, int((spent < level).sum()))
    return np.column_stack([values[:, :before], reached(budget, values, level)])


def short(budget: Float[np.ndarray, "S P"], level: float) -> int:
    """How many runs never spend ``level``: their value there is that of their last measurement.

    >>> short(np.array([[0.0, 2.0, 6.0], [0.0, 1.0, 0.5]]), 2.0)
    1
    """
    return int((~(budget >= level).any(axis=1)).sum())  # an undefined budget never gets there
