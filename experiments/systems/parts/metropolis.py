"""Search for the cheapest plan when one option is chosen for every call: by chance, or by trying all of them."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Key

Cost = Callable[[Array], Array]  # a plan [V] of option numbers -> seconds


class Found(NamedTuple):
    """The cheapest plan that was seen, what it costs, and how often each chain moved."""

    plan: Int[Array, " V"]
    cost: Float[Array, ""]
    accepted: Float[Array, " C"]


def acceptance(
    proposed: Float[Array, ""], current: Float[Array, ""], beta: Float[Array, ""], *, scale: float = 0.1
) -> Float[Array, ""]:
    """Probability of the move from a plan to another: ``min(1, exp(-beta (proposed - current) / scale))``.

    From "ReaL", arXiv:2406.14088, section 5.2; ``scale`` is the published code's 1e5 microseconds. Differs from that
    code in that the difference is not rounded down to whole scales.

    Args:
      proposed, current: seconds of the two plans.
    """
    return jnp.exp(-beta * jnp.maximum(proposed - current, 0.0) / scale)


def metropolis(
    cost: Cost,
    start: Int[Array, " V"],
    allowed: Bool[Array, "V O"],
    key: Key,
    betas: Float[Array, " C"],
    *,
    steps: int,
) -> Found:
    """Metropolis-Hastings over plans, one chain for every ``beta``; the cheapest plan that any chain has proposed.

    A proposal changes one call: every pair of a call and another allowed option of it is equally likely. Each chain
    begins at ``start``; the paper's begins with the fastest option of every call by itself.

    From "ReaL", arXiv:2406.14088, section 5.2. Differs from the published code in that steps are counted, not seconds.

    Args:
      allowed: which options a call may have; ``start`` must be among them.
    """
    calls, options = allowed.shape

    def step(carry, key, beta):
        plan, seconds, best, least = carry
        draw, coin = jax.random.split(key)
        others = allowed & (jnp.arange(options, dtype=jnp.int32)[None, :] != plan[:, None])
        place = jax.random.categorical(draw, jnp.where(others.reshape(-1), 0.0, -jnp.inf))
        call, option = place // options, place % options
        other = jnp.where(jnp.arange(calls, dtype=plan.dtype) == call, option.astype(plan.dtype), plan)
        price = cost(other)
        take = (jax.random.uniform(coin) < acceptance(price, seconds, beta)) & jnp.any(others)
        better = (price < least) & jnp.any(others)
        best, least = jnp.where(better, other, best), jnp.where(better, price, least)
        return (jnp.where(take, other, plan), jnp.where(take, price, seconds), best, least), take

    def chain(key, beta):
        first = cost(start)
        keys = jax.random.split(key, steps)
        (_, _, best, least), took = jax.lax.scan(
            lambda carry, k: step(carry, k, beta), (start, first, start, first), keys
        )
        return best, least, jnp.mean(took.astype(jnp.float32))

    plans, costs, accepted = jax.vmap(chain)(jax.random.split(key, betas.shape[0]), betas)
    least = jnp.argmin(costs)
    return Found(plans[least], costs[least], accepted)


def every_plan(choices: Sequence[Sequence[int]]) -> Int[np.ndarray, "P V"]:
    """All combinations of one option for each call.

    >>> every_plan([[0, 1], [2]]).tolist()
    [[0, 2], [1, 2]]
    """
    return np.asarray(list(itertools.product(*choices)), np.int32).reshape(-1, len(choices))


def cheapest(cost: Cost, plans: Int[Array, "P V"], *, batch: int = 2048) -> Found:
    """The cheapest of the given plans, the first of equals; ``batch`` of them are looked at together."""
    costs = jax.lax.map(cost, plans, batch_size=batch)
    least = jnp.argmin(costs)
    return Found(plans[least], costs[least], jnp.zeros((0,), jnp.float32))
