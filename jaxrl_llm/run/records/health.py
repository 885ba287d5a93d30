"""Says while a run goes on that it learns nothing, and why that may be; what is the mean of no value is left out.

A condition is said once, when it has held for some steps in a row; the report says for how many steps it held in all.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.train import refill
from jaxrl_llm.types import Rewards, Trajectories

PATIENCE = 3  # steps in a row before something is said
CUT = 0.8  # share of responses out of tokens
GONE = 0.01  # nats of entropy
FAILING = 0.5  # share of valid rewards
EQUAL, TRUNCATED = "group/degenerate_fraction", "length/truncated_fraction"

Figures = dict[str, Any]


def without_empty(
    figures: Figures,
    trajectories: Trajectories,
    rewards: Rewards,
    used: Callable[[Trajectories, Rewards], Any] | None = None,
) -> Figures:
    """The figures of a step without the means of empty sets, which the compiled step gives as 0.

    Args:
      used: ``(trajectories, rewards) -> bool [B]``, the rows that the loss counts beside those that are invalid; of
        none of their tokens, entropy and gap are no numbers. None: all.
    """
    read = {name: getattr(trajectories, name) for name in ("mask", "group_ids", "truncated")}
    read, value, valid = hosts.gathered((read, rewards.value, rewards.valid))  # also those of other hosts
    mask, kept = read["mask"], valid
    if used is not None:
        here = trajectories._replace(**{name: jnp.asarray(x) for name, x in read.items()})
        kept = valid & np.asarray(used(here, Rewards(jnp.asarray(value), jnp.asarray(valid))))
    empty: set[str] = set()
    waits = not figures.get(refill.TRAINED, 1.0)  # for more rollouts, and none of its rows trains
    if waits or not (mask & kept[:, None]).any():
        of_tokens = ("policy/", "kl/", "value/") + ("loss/",) * waits
        empty |= {name for name in figures if name.startswith(of_tokens)}
    for name, rows in (("reward/mean", valid), ("length/right_tokens", valid & (value > 0.5)),
                       ("length/wrong_tokens", valid & ~(value > 0.5))):  # fmt: skip
        empty |= set() if rows.any() else {name}
    return {name: figure for name, figure in figures.items() if name not in empty}


def _equal(figures: Figures) -> str:
    """All groups equal: no advantage, no gradient."""
    if figures.get(EQUAL) != 1.0:
        return ""
    mean = figures.get("reward/mean")
    if mean is None:
        return "no response has a valid reward: the verifier or its processes fail"
    if mean <= 0.0:
        cut = figures.get(TRUNCATED, 0.0)
        if cut > CUT:
            return f"every reward is {mean:g} and {cut:.0%} of the responses are cut: raise --max-new-tokens"
        return (
            f"every reward is {mean:g}: the model never answers in the form that the verifier reads (look at the run's "
            "episodes), or the problems are far too hard for it"
        )
    if mean >= 1.0:
        return f"every reward is {mean:g}: the model solves all of these problems; take harder ones"
    return (
        f"all rewards of a group are equal (mean {mean:.3g}): the reward does not depend on the answer, or sampling is "
        "too even: raise --temperature or --group-size"
    )


def _cut(figures: Figures) -> str:
    cut = figures.get(TRUNCATED, 0.0)
    if cut <= CUT:
        return ""
    return (
        f"{cut:.0%} of the responses are cut before their end: raise --max-new-tokens, of episodes --max-turns, or "
        "give the text that ends an answer by --stop; a base model without a chat template may never end one"
    )


def _still(figures: Figures) -> str:
    if figures.get("grad/norm") != 0.0 or figures.get(EQUAL) == 1.0:
        return ""
    if not figures.get(refill.TRAINED, 1.0):  # the batch waits for more groups
        return ""
    return "the gradient is exactly 0 though groups differ: nothing of the batch reaches the loss (masks, clipping)"


def _certain(figures: Figures) -> str:
    entropy = figures.get("policy/entropy")
    if entropy is None or entropy >= GONE or figures.get(EQUAL) == 1.0:
        return ""
    return (
        f"the entropy is down to {entropy:.2g} nats a token: the model no longer tries anything else; lower the "
        "learning rate, raise --clip-high or --temperature, or begin from an earlier checkpoint"
    )


def _failing(figures: Figures) -> str:
    share = figures.get("reward/valid_fraction", 1.0)
    return "" if share >= FAILING else f"only {share:.0%} of the rewards are valid: the verifier or its processes fail"


def _skipping(figures: Figures) -> str:
    if not figures.get("update/skipped"):
        return ""
    return "updates are not finite and are skipped: lower the learning rate, or look at rewards and log-probabilities"


CONDITIONS: dict[str, Callable[[Figures], str]] = {
    "all groups equal": _equal,
    "responses cut": _cut,
    "no gradient": _still,
    "entropy gone": _certain,
    "rewards invalid": _failing,
    "updates skipped": _skipping,
}


class Health:
    """Sees the figures of every step and says what keeps the run from learning, each cause once.

    Args:
      silent: figures that say nothing of this run, ``silent_of`` its settings.
    """

    def __init__(self, patience: int = PATIENCE, silent: tuple[str, ...] = ()):
        self._patience, self._row, self._said, self._last = patience, dict.fromkeys(CONDITIONS, 0), set(), {}
        self._silent = silent
        self.steps, self.held = 0, dict.fromkeys(CONDITIONS, 0)

    def see(self, figures: Figures, steps: int = 1) -> list[str]:
        """Lines to say now.

        Args:
          figures: of a step, or means over ``steps`` of them.
        """
        figures = {k: v for k, v in figures.items()
                   if k not in self._silent and isinstance(v, int | float) and math.isfinite(v)}  # fmt: skip
        self.steps += steps
        lines = []
        for name, condition in CONDITIONS.items():
            cause = condition(figures)
            self._row[name] = self._row[name] + steps if cause else 0
            self.held[name] += steps if cause else 0
            if cause:
                self._last[name] = cause
            if self._row[name] >= self._patience and name not in self._said:
                self._said.add(name)
                lines.append(f"{name} for {self._row[name]} steps: {cause}")
        return lines

    def summary(self) -> list[str]:
        """Of every condition that held in most steps a line, for the report."""
        often = [name for name, held in self.held.items() if held > self.steps / 2]
        return [f"{name} in {self.held[name]} of {self.steps} steps: {self._last[name]}" for name in often]


def silent_of(*, group_size: int, limited: bool = True) -> tuple[str, ...]:
    """The figures that say nothing: one response has none to differ from, and some tasks set its length themselves.

    >>> silent_of(group_size=1, limited=False)
    ('group/degenerate_fraction', 'length/truncated_fraction')
    """
    return (EQUAL,) * (group_size == 1) + (TRUNCATED,) * (not limited)


def judged(lines: list[Figures], silent: tuple[str, ...] = ()) -> Health:
    """The health of a run from its records."""
    health = Health(silent=silent)
    for line in lines:
        health.see(line)
    return health
