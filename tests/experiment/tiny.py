"""A whole experiment around a table of logits: every part of the harness is tested on it in milliseconds.

Paper:     "A policy that is a table", arXiv:0000.00000.
Claim:     more steps of the same method give more reward.
Run:       python -m tests.experiment.tiny
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods.builders import make_estimate
from jaxrl_llm.train.offline import Offline
from tests.traps import tables


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """``model`` is read by nobody."""

    learning_rate: float = 0.1
    warm_steps: int = 0  # of imitation before the reward
    on_host: bool = False
    advantages: Callable[..., Array] = group.group_normalized_advantages


EMBEDDED = {"steps": 6, "eval_every": 3}
SMOKE = {"steps": 2, "eval_every": 2}
ARMS = {
    "baseline": {"advantages": group.dr_grpo_advantages},
    "method": {},
    "warm": {"warm_steps": 2},
}
UNTUNED = "records of tests, most of which are not about rates"
METRICS = ("eval/accuracy",)
CURVES = ("eval/accuracy", "reward/mean")


@functools.cache
def imitation(learning_rate: float) -> Offline:
    """Next tokens of the table's problems."""

    def loss(params, extras, rows):
        logp = jax.nn.log_softmax(params["table"])[rows["now"], rows["next"]]
        return -reduce.scalars(logp), {"tokens/trained": jnp.asarray(logp.shape[0], jnp.float32)}

    table = {"now": jnp.asarray([3, 4, 5, 0], jnp.int32), "next": jnp.asarray([3, 3, 3, 3], jnp.int32)}
    return Offline(lambda extras: table, make_uniform(), 2, loss, optax.adam(learning_rate))


@functools.cache
def practice(learning_rate: float, advantages: Callable[..., Array]):
    """The online method of ``tests.traps.tables`` with its advantages chosen."""

    def estimate(trajectories, rewards):
        values = advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    return tables.online(
        estimate=make_estimate(tables.table_policy(), estimate), tx=optax.adam(learning_rate), group_size=4
    )


def measure(params, key):
    """Mean reward of fresh samples."""
    found, count = tables.problems(), tables.problems().tokens.shape[0]
    ids = jnp.arange(count, dtype=jnp.int32)
    rows = tables.rollout(params, found.tokens, found.valid, sample_keys(key, 0, ids, 4), ids)
    rewards = tables.score({"wanted": found.answers["wanted"][rows.problem_ids]}, rows)
    return {"eval/accuracy": reduce.scalars(rewards.value)}


def build(settings: Settings) -> experiment.Plan:
    """Imitation where the arm wants it, then practice."""
    online = experiment.Stage(practice(settings.learning_rate, settings.advantages), settings.steps)
    warm = experiment.Stage(imitation(settings.learning_rate), settings.warm_steps)
    first = tables.params()
    return experiment.Plan(
        init=lambda key: first,
        stages=(warm, online) if settings.warm_steps else (online,),
        measure=measure,
        on_host=settings.on_host,
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """The method earns more than the baseline."""
    return experiment.conclude(claim.__doc__, experiment.greater(results, "eval/accuracy", "method", "baseline"))


if __name__ == "__main__":
    experiment.main(__name__)
