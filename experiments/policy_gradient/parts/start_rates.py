"""Held-out problems beside what the start of a run made of them: what was gained, and what it could not solve."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.types import Params, Rewards, Trajectories

SAMPLES = 16  # of the start, to each problem


def start_rates(found: recipes.Bench, params: Params, rows: Trajectories) -> Array:
    """Share of right ones among ``SAMPLES`` responses of the start to the problem of each row; made while traced."""
    new_tokens = rows.tokens.shape[1] - found.heldout.tokens.shape[1]
    held, by = found._replace(train=found.heldout), found.model._replace(params=params)
    with jax.core.eval_context():
        every = np.arange(found.heldout.level.shape[0])
        rates = curricula.pass_rates(held, by, every, samples=SAMPLES, max_new_tokens=new_tokens)
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
