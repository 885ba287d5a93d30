"""Updates that were not finite: each is skipped inside the compiled step; too many in a row end the run.

A reward that is not finite is caught before: it is a mistake of its verifier, and the message says which one and where.
"""

from typing import Any

import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Rewards

SKIPPED = "update/skipped"  # in the metrics of a step: 1 where its gradient was not finite, else 0
MOST = 10  # of them in a row


class NotFinite(UserError):
    """So many updates in a row were skipped that a run cannot be learning; parameters are those before them."""


class Streak:
    """Counts skipped updates in a row, of one run or of several seeds side by side.

    >>> streak = Streak(most=2)
    >>> for step, skipped in enumerate([1.0, 0.0, 1.0], 1):
    ...     streak.see({SKIPPED: skipped}, step)
    >>> streak.see({SKIPPED: 1.0, "loss/total": float("nan"), "grad/norm": float("nan")}, 4)
    Traceback (most recent call last):
    ...
    jaxrl_llm.train.skipped.NotFinite: step 4: 2 updates in a row were not finite and were skipped ...
    """

    def __init__(self, most: int = MOST):
        self._most, self._length = most, np.zeros((), int)

    def see(self, figures: dict[str, Any], step: int) -> None:
        """Takes in the metrics of the step that ends at ``step``, or ``[..., steps]`` of several that end there.

        Raises:
          NotFinite: for ``most`` skipped updates in a row; 0 allows any number.
        """
        if SKIPPED not in figures:
            return
        flags = np.asarray(figures[SKIPPED]) >= 1.0  # of several updates a step, all of them
        flags = flags[..., None] if flags.ndim == 0 else flags
        for k in range(flags.shape[-1]):
            self._length = np.where(flags[..., k], self._length + 1, 0)
            if self._most and np.any(self._length >= self._most):
                seeds = np.flatnonzero(np.atleast_1d(self._length >= self._most)) if self._length.ndim else ()
                self._stop(figures, step - flags.shape[-1] + 1 + k, k, [int(s) for s in seeds])

    def _stop(self, figures: dict[str, Any], step: int, k: int, seeds: list[int]) -> None:
        def shown(name: str) -> str:
            values = np.asarray(figures.get(name, np.nan))
            return f"{name} {np.max(values[..., k] if values.ndim else values):.3g}"

        where = f" (seeds {', '.join(map(str, seeds))} of the arm)" if seeds else ""
        raise NotFinite(
            f"step {step}{where}: {self._most} updates in a row were not finite and were skipped "
            f"({shown('loss/total')}, {shown('grad/norm')}): the weights are those before them; lower the learning "
            "rate or look at the rewards, or allow more by --most-skipped (0: any number)"
        )


def check_rewards(rewards: Rewards, problem_ids: Any, who: str) -> None:
    """Raises UserError for a reward that is valid and yet no finite number, naming row, problem and verifier."""
    value, valid, problem_ids = hosts.gathered((rewards.value, rewards.valid, problem_ids))
    bad = np.flatnonzero(valid & ~np.isfinite(value))
    if len(bad):
        row = int(bad[0])
        more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise UserError(
            f"the reward of row {row}, problem {int(problem_ids[row])}{more} is {value[row]}, from {who}: "
            "a reward is a finite number; where a verifier has none it says valid=False"
        )


def name_of(scorer: Any) -> str:
    """What to call a scorer or verifier in a message: the module and name of its function."""
    scorer = getattr(scorer, "__wrapped__", scorer)
    scorer = getattr(scorer, "func", scorer)  # of functools.partial
    name = getattr(scorer, "__qualname__", type(scorer).__qualname__)
    return f"{getattr(scorer, '__module__', '?')}.{name}"
