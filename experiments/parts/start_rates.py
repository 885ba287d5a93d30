"""Held-out problems beside what the start of a run made of them: what was gained, and what it could not solve."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.types import Params, Rewards, Trajectories

SAMPLES = 16  # of the start, to each problem


def heldout_rates(found: recipes.Bench, params: Params, *, samples: int, max_new_tokens: int) -> np.ndarray:
    """Share of right ones among so many responses of these parameters to each held-out problem ``[P]``."""
    held = found._replace(train=found.heldout, host_score=found.heldout_score)
    by, every = found.model._replace(params=params), np.arange(found.heldout.level.shape[0])
    return curricula.pass_rates(held, by, every, samples=samples, max_new_tokens=max_new_tokens)


@recipes.cached_by_task
def base_rates(settings: recipes.OnlineSettings, samples: int) -> np.ndarray:
    """``heldout_rates`` of the model that the settings name; computed once."""
    found = recipes.bench(settings)
    return heldout_rates(found, found.model.params, samples=samples, max_new_tokens=settings.max_new_tokens)


def start_rates(found: recipes.Bench, params: Params, rows: Trajectories) -> Array:
    """Share of right ones among ``SAMPLES`` responses of the start to the problem of each row; made while traced."""
    new_tokens = rows.tokens.shape[1] - found.heldout.tokens.shape[1]
    with jax.core.eval_context():
        rates = heldout_rates(found, params, samples=SAMPLES, max_new_tokens=new_tokens)
    return jnp.asarray(rates, jnp.float32)[rows.problem_ids]


def gain(rewards: Rewards, rates: Array) -> Array:
    """Accuracy of the rows less that of the start on the same problems."""
    return jnp.mean((rewards.value > 0.5).astype(jnp.float32) - rates)


def right_where_the_start_failed(rewards: Rewards, rates: Array, *, most: int = 2) -> Array:
    """Accuracy on the problems of which the start solved at most so many of its samples; 0 without any.

    >>> import jax.numpy as jnp
    >>> found = Rewards(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.ones(4, bool))
    >>> float(right_where_the_start_failed(found, jnp.array([0.0, 0.125, 0.1875, 1.0])))
    0.5
    """
    there = rewards.valid & (rates <= most / SAMPLES)
    right = ((rewards.value > 0.5) & there).astype(jnp.float32)
    return jnp.sum(right) / jnp.maximum(jnp.sum(there.astype(jnp.float32)), 1.0)


def solved_where_the_start_never_was(rewards: Rewards, rates: Array) -> tuple[Array, Array]:
    """Of the problems without a right sample of the start: the share with one among the rows, and how many they are.

    The first is 0 without any; the second is a share of all problems.

    Args:
      rewards: of equally many rows of each problem, one problem after another.
      rates: of the start, one a problem.

    >>> import jax.numpy as jnp
    >>> found = Rewards(jnp.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), jnp.ones(8, bool))
    >>> [float(x) for x in solved_where_the_start_never_was(found, jnp.array([0.0, 0.0, 0.5, 0.25]))]
    [0.5, 0.5]
    """
    never = rates == 0
    solved = jnp.any((rewards.valid & (rewards.value > 0.5)).reshape(never.shape[0], -1), axis=1)
    count = jnp.sum(never.astype(jnp.float32))
    both = jnp.sum((solved & never).astype(jnp.float32))
    return both / jnp.maximum(count, 1.0), count / never.shape[0]
