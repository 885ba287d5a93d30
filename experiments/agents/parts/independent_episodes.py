"""Episodes that run independently of each other and a trainer that takes whatever has ended, in virtual time."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Episodes(NamedTuple):
    """Seconds at which episodes begin and end, in the order in which they begin, and at which each update has ended."""

    begin: Float[Array, "S B"]
    end: Float[Array, "S B"]
    update: Float[Array, " S"]


def run(
    seconds: Float[Array, "S B"], update_seconds: float | Float[Array, ""], *, slots: int, staleness: int
) -> Episodes:
    """``S`` updates on ``B`` episodes each, ``slots`` of which run at a time.

    Episode ``i`` begins in the first free slot, not before ``floor(i / B) - staleness`` updates have ended. Each update
    takes the episodes that ended first of those not yet taken, as soon as these are ``B``. ``staleness`` 0 is lockstep:
    all ``B`` episodes, then the update.

    From "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning", arXiv:2505.24298,
    the system behind "Beyond Ten Turns", arXiv:2508.07976. Differs from the paper in that an update takes those that
    ended first, not those that began first.

    Args:
      seconds: of each episode.
      update_seconds: of an update, the new weights on their way included.

    >>> import jax.numpy as jnp
    >>> late = jnp.array([[1.0, 9.0], [1.0, 1.0], [1.0, 1.0]])
    >>> [run(late, 1.0, slots=2, staleness=eta).update.tolist() for eta in (0, 2)]
    [[10.0, 12.0, 14.0], [3.0, 5.0, 10.0]]
    """
    updates, batch = seconds.shape
    if slots < 1 or staleness < 0:
        raise ValueError(f"slots={slots} must be at least 1 and staleness={staleness} must not be negative")

    def block(carry, b):
        free, begin, end, update = carry
        gate = jnp.where(b > staleness, update[jnp.maximum(b - 1 - staleness, 0)], 0.0)
        here = b < updates

        def one(free, length):
            slot = jnp.argmin(free)
            start = jnp.maximum(free[slot], gate)
            return free.at[slot].set(jnp.where(here, start + length, free[slot])), start

        row = jnp.minimum(b, updates - 1)
        free, started = jax.lax.scan(one, free, seconds[row])
        begin = begin.at[row].set(jnp.where(here, started, begin[row]))
        end = end.at[row].set(jnp.where(here, started + seconds[row], end[row]))
        # all that can have ended by now has begun: what comes later waits for this update
        k = jnp.maximum(b - staleness, 0)
        ready = jnp.sort(end.reshape(-1))[(k + 1) * batch - 1]
        done = jnp.maximum(ready, jnp.where(k > 0, update[jnp.maximum(k - 1, 0)], 0.0)) + update_seconds
        return (free, begin, end, update.at[k].set(jnp.where(b >= staleness, done, update[k]))), None

    never = jnp.full(seconds.shape, jnp.inf, jnp.float32)
    start = jnp.zeros((slots,), jnp.float32), never, never, jnp.zeros((updates,), jnp.float32)
    (_, begin, end, update), _ = jax.lax.scan(block, start, jnp.arange(updates + staleness, dtype=jnp.int32))
    return Episodes(begin, end, update)


def draw_seconds(
    key: Array, turns: Int[Array, "S B"], *, most: int, median: float, spread: float
) -> Float[Array, "S B"]:
    """Of episodes of these numbers of turns, ``most`` at most, each turn log-normal: few of them take very long.

    Args:
      median: seconds of a turn: what the model says and the tool that answers it.
      spread: deviation of their logarithm.
    """
    each = median * jnp.exp(spread * jax.random.normal(key, (*turns.shape, most), jnp.float32))
    taken = jnp.arange(most, dtype=jnp.int32)[None, None, :] < turns[:, :, None]
    return jnp.sum(jnp.where(taken, each, 0.0), axis=2)


def seconds_of_updates(
    turns: Int[Array, " R"], key: Array, *, batch: int, most: int, staleness: int, updates: int = 16,
    update_seconds: float = 60.0, median: float = 20.0, spread: float = 1.0,
) -> Float[Array, ""]:  # fmt: skip
    """Seconds of an update, on average of a few, for episodes of turns drawn from ``turns``.

    In lockstep all machines sample, a whole ``batch`` at a time, and then train for ``update_seconds``. Else half of
    them do each: half as many episodes run at a time, and an update takes twice as long.

    Args:
      most: turns of an episode; longer ones are cut.
      staleness, updates: as in ``run``; ``median`` and ``spread`` as in ``draw_seconds``.
    """
    share = 0.5 if staleness else 1.0
    counts = jax.random.choice(key, jnp.minimum(turns, most), (updates, batch))
    seconds = draw_seconds(jax.random.fold_in(key, 1), counts, most=most, median=median, spread=spread)
    found = run(seconds, update_seconds / share, slots=max(int(batch * share), 1), staleness=staleness)
    return found.update[-1] / updates


@lru_cache(maxsize=8)
def make_hours(*, updates: int, batch: int, most: int, staleness: int) -> Callable[[Array, Array], dict[str, Array]]:
    """``(turns, key) -> {"flow/hours"}``: what this many updates take if episodes have turns like these.

    Equal numbers give the same function, so that arms share what is compiled with it.
    """

    def hours(turns: Array, key: Array) -> dict[str, Array]:
        each = seconds_of_updates(turns, key, batch=batch, most=most, staleness=staleness)
        return {"flow/hours": each * (updates / 3600)}

    return hours
