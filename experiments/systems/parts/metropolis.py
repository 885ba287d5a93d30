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

    A plan of infinite seconds, or one that never ends (NaN), is never moved to.

    From "ReaL", arXiv:2406.14088, section 5.2; ``scale`` is the published code's 1e5 microseconds. Differs from that
    code in that the difference is not rounded down to whole scales.

    Args:
      proposed, current: seconds of the two plans.
    """
    worse = jnp.where(proposed > current, proposed - current, 0.0)  # infinity less infinity is none
    possible = jnp.isfinite(proposed)
    return jnp.where(possible, jnp.exp(-beta * jnp.where(possible, worse, 0.0) / scale), 0.0)


def metropolis(
    cost: Cost,
    starts: Int[Array, "S V"],
    allowed: Bool[Array, "V O"],
    key: Key,
    betas: Float[Array, " C"],
    *,
    groups: Bool[Array, "G V"],
    steps: int,
) -> Found:
    """Metropolis-Hastings over plans, a chain for every start and ``beta``; the cheapest plan that any has proposed.

    A proposal draws one of ``groups`` and an allowed option for each call in it, all equally likely, whatever the plan
    is: as likely back as forth. The paper's chains begin with the fastest option of every call by itself.

    From "ReaL", arXiv:2406.14088, section 5.2. Differs from the published code in that steps are counted, not seconds,
    and in groups and starts: two calls of a model that cost little apart only where both change have a way together.

    Args:
      starts: of each chain; a chain does not come back to a call's option that is not allowed.
      allowed: which options a call may have.
      groups: calls that change together; each call alone should be among them.
    """

    def step(carry, key, beta):
        plan, seconds, best, least = carry
        draw, which, coin = jax.random.split(key, 3)
        changed = groups[jax.random.randint(which, (), 0, groups.shape[0], jnp.int32)]
        drawn = jax.random.categorical(draw, jnp.where(allowed, 0.0, -jnp.inf), axis=1)
        other = jnp.where(changed, drawn.astype(plan.dtype), plan)
        price = cost(other)
        take = (jax.random.uniform(coin) < acceptance(price, seconds, beta)) & jnp.any(other != plan)
        better = price < least
        best, least = jnp.where(better, other, best), jnp.where(better, price, least)
        return (jnp.where(take, other, plan), jnp.where(take, price, seconds), best, least), take

    def chain(key, start, beta):
        first = cost(start)
        first = jnp.where(jnp.isnan(first), jnp.inf, first)  # what never ends is no plan to stay at
        keys = jax.random.split(key, steps)
        (_, _, best, least), took = jax.lax.scan(
            lambda carry, k: step(carry, k, beta), (start, first, start, first), keys
        )
        return best, least, jnp.mean(took.astype(jnp.float32))

    number = starts.shape[0]
    each = jnp.repeat(starts, betas.shape[0], axis=0), jnp.tile(betas, number)
    plans, costs, accepted = jax.vmap(chain)(jax.random.split(key, len(each[1])), *each)
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
