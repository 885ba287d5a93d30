"""Controls that the harness makes of any arm that learns from a reward: what must help, and what must not.

``again``: the same arm on other seeds; ``scrambled``: every response is paid for another one; ``oracle``: every group
is shown a worked solution as one of its responses; ``more``: four times the problems at every step. Of the last two one
must help, as long as the file names no positive control of its own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.evidence import fingerprints, verdicts
from jaxrl_llm.experiment.evidence.verdicts import Bounds
from jaxrl_llm.run import bench
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Rewards

WORDS = ("oracle", "more", "scrambled", "again")
POSITIVE = ("oracle", "more")  # tried in this order until one helps
MORE = 4  # times the problems a step
OTHER_SEEDS = 50_000  # those of `again` begin so much later


class Seen(NamedTuple):
    """What a control did: a difference with its interval in ``bounds``; ``problem`` is empty where it did as it must.

    ``kind``: ``helps`` (must lie above zero), ``same`` (must lie within d*), ``gains_nothing`` (must stay below d*).
    """

    name: str
    text: str
    kind: str
    bounds: Bounds
    problem: str


def shifted(rewards: Rewards) -> Rewards:
    """Every row has the reward of the row half a batch further on: of another group, where there are two.

    >>> import jax.numpy as jnp
    >>> shifted(Rewards(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones(4, bool))).value.tolist()
    [3.0, 4.0, 1.0, 2.0]
    """
    return jax.tree.map(lambda x: jnp.roll(x, x.shape[0] // 2, axis=0), rewards)


def _each(plan: Plan, change: Callable[[Online], Online]) -> Plan:
    stages = (s._replace(method=change(s.method)) if isinstance(s.method, Online) else s for s in plan.stages)
    return plan._replace(stages=tuple(stages))


def scrambled(plan: Plan) -> Plan | None:
    """The plan with ``shifted`` rewards; None where a world in Python, or no stage at all, is paid by ``score``.

    A reward that a model of the run itself gives, where advantages are estimated, does not pass ``score``: what is
    shifted there feeds metrics alone, and the plan would be the same arm again.
    """
    if plan.world is not None or not any(isinstance(s.method, Online) for s in plan.stages):
        return None
    if plan.on_host and plan.host_score is not None:
        return _and_of_seeds(plan, _judged)

    def paid(how: Callable[[Rewards], Rewards], one: Plan) -> Plan:
        return _each(one, lambda m: m._replace(score=lambda answers, rows: how(m.score(answers, rows))))

    # the values alone: whether a row is valid may be read all the same
    moved = paid(lambda rewards: rewards._replace(value=shifted(rewards).value), plan)
    same = fingerprints.same_updates({"": plan, "moved": moved})
    return None if same else _and_of_seeds(plan, partial(paid, shifted))


def _judged(plan: Plan) -> Plan:
    score = plan.host_score
    assert score is not None
    return plan._replace(host_score=lambda rows: shifted(score(rows)))


def _and_of_seeds(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """The changed plan; what belongs to a seed brings a score of its own, which is changed after it is there."""
    if plan.of_seed is None:
        return change(plan)
    return change(plan)._replace(of_seed=lambda _, seed: change(plans.of_seed(plan, seed)))


def oracle(plan: Plan, settings: Any) -> Plan | None:
    """The plan whose every group has a worked solution among its responses.

    None where no stage samples the bench's problems, or these have no solutions that fit.
    """
    if not isinstance(settings, bench.OnlineSettings) or not settings.data or plan.world is not None:
        return None  # a file whose problems are its own where no data are named has none of the bench
    try:
        found = bench.bench(settings)
    except ValueError:  # a plan on the bench has opened it before: this one has problems of its own
        return None
    if not any(isinstance(s.method, Online) and s.method.problems is found.train for s in plan.stages):
        return None
    try:
        bench.demonstrations(settings)
    except ValueError:  # rows of one's own without a solution, or with one that is too long
        return None

    def change(method: Online) -> Online:
        if method.problems is not found.train:
            return method
        return method._replace(rollout=recipes.demonstrating_rollout(settings, found, method.rollout))

    return _each(plan, change)


def seeds_of(word: str, seeds: list[int]) -> list[int]:
    """The seeds of a control: those of the arm, or for ``again`` as many others.

    >>> seeds_of("again", [0, 1]), seeds_of("oracle", [0, 1])
    ([50000, 50001], [0, 1])
    """
    return [seed + OTHER_SEEDS for seed in seeds] if word == "again" else seeds


def more(build: Callable[[Any], Plan], settings: Any) -> Plan | None:
    """The plan with ``MORE`` times the problems a step; None where the settings do not say how many there are."""
    if not hasattr(settings, "prompts_per_step"):
        return None
    return build(dataclasses.replace(settings, prompts_per_step=MORE * settings.prompts_per_step))


def made(word: str, build: Callable[[Any], Plan], plan: Plan, settings: Any) -> Plan | None:
    """The plan of a control by its word; None where there can be none.

    Args:
      build: settings to plan, of the experiment file.
    """
    match word:
        case "oracle":
            return oracle(plan, settings)
        case "more":
            found = more(build, settings)
            same = found is not None and fingerprints.same_updates({"as it is": plan, "more": found})
            return None if same else found  # a step whose rows are counted otherwise is no control
        case "scrambled":
            return scrambled(plan)
    return plan


def one_helps(seen: list[Seen]) -> list[Seen]:
    """Positive controls are a problem only where none of them helps."""
    if not any(one.kind == "helps" and not one.problem for one in seen):
        return seen
    return [one._replace(problem="") if one.kind == "helps" else one for one in seen]


def helps(name: str, text: str, differences: Any, level: float = verdicts.ALPHA) -> Seen:
    """A positive control: its differences to the arm must lie above zero."""
    seen = verdicts.bounds(differences, level)
    return Seen(
        name, text, "helps", seen, "" if seen.low > 0 else _said(name, text, seen, "does not beat the baseline")
    )


def same(name: str, text: str, left: Any, right: Any, d_star: float, *, strict: bool,
         level: float = verdicts.ALPHA) -> Seen:  # fmt: skip
    """The arm once more on other seeds: the interval of the two means must lie within d*.

    Args:
      strict: False: only an interval that lies wholly outside is a problem, as few seeds show no more.
    """
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    seen = _unpaired(left[np.isfinite(left)], right[np.isfinite(right)], level)
    if strict:
        fine = -d_star < seen.low and seen.high < d_star
    else:
        fine = not (seen.low > d_star or seen.high < -d_star)
    return Seen(name, text, "same", seen, "" if fine else _said(name, text, seen, f"is not within d* {d_star:.3g}"))


def gains_nothing(name: str, text: str, gains: Any, d_star: float, level: float = verdicts.ALPHA) -> Seen:
    """Scrambled credit: what it gains from its own start must stay below d*, for it comes from no reward."""
    seen = verdicts.bounds(gains, level)
    fine = seen.high < d_star
    return Seen(
        name, text, "gains_nothing", seen, "" if fine else _said(name, text, seen, f"is not below d* {d_star:.3g}")
    )


def _unpaired(left: np.ndarray, right: np.ndarray, level: float) -> Bounds:
    """Welch's interval of a difference of two means."""
    from scipy import special

    n = min(left.size, right.size)
    mean = float(left.mean() - right.mean()) if n else float("nan")
    if n < 2:
        return Bounds(mean, float("nan"), float("nan"), n, level, 1.0)
    a, b = left.var(ddof=1) / left.size, right.var(ddof=1) / right.size
    error = float(np.sqrt(a + b))
    if error == 0:
        return Bounds(mean, mean, mean, n, level, verdicts.p_value(mean, 0.0, n))
    freedom = float((a + b) ** 2 / (a**2 / (left.size - 1) + b**2 / (right.size - 1)))
    half = float(special.stdtrit(freedom, 1 - level / 2)) * error
    p = float(2 * special.stdtr(freedom, -abs(mean) / error))
    return Bounds(mean, mean - half, mean + half, n, level, p)


def _said(name: str, text: str, seen: Bounds, what: str) -> str:
    return f"control {name}, {text}: {seen.mean:+.3g} [{seen.low:+.3g}, {seen.high:+.3g}] (n={seen.n}) {what}"
