"""Uniform draws with replacement: the curriculum without memory."""

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Sampler


def make_uniform() -> Sampler:
    """Every prompt is equally likely at every step; the state is the number of prompts."""

    def init(num_problems):
        return jnp.asarray(num_problems, jnp.int32)

    def draw(state, key, n):
        return jax.random.randint(key, (n,), 0, state, jnp.int32), state

    def update(state, ids, scores, valid):
        return state

    return Sampler(init, draw, update)
