"""Steps of a written solution on the device: where each ends, and whether it is a step of the reference.

A step ends with its separator (a comma, or the mark that begins the answer); what follows the mark belongs to no step.
Texts are compared by a hash of their tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Responses, Trajectories

_BASE = np.int32(1_000_003)


class Steps(NamedTuple):
    """The steps of each response; at tokens of no step ``ids`` is the number of steps before."""

    ids: Int[Array, "B T"]  # number of the step, from 0
    inside: Bool[Array, "B T"]  # tokens of a finished step
    ends: Bool[Array, "B T"]  # the last token of a step
    hashes: Int[Array, "B T"]  # of the step's text without its separator, at its end
    count: Int[Array, " B"]


def text_hash(ids: Sequence[int]) -> int:
    """The hash that ``read_steps`` gives a step of these tokens."""
    value = 0
    for token in ids:
        value = (value * int(_BASE) + token + 1) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value >= 0x8000_0000 else value


def hash_table(encode: Callable[[str], list[int]], texts: Sequence[Sequence[str]]) -> np.ndarray:
    """Hashes of the steps of each problem ``[N, S]``; rows with fewer steps repeat their last one.

    Raises:
      ValueError: for a problem without steps.
    """
    if not all(texts):
        raise ValueError("a problem has no steps; give every one at least one")
    widest = max(map(len, texts))
    rows = [[text_hash(encode(step)) for step in steps] for steps in texts]
    return np.asarray([row + [row[-1]] * (widest - len(row)) for row in rows], np.int32)


def read_steps(trajectories: Trajectories, *, separator: int, mark: int) -> Steps:
    """Cuts the responses at token ``separator`` until token ``mark``."""
    return cut(trajectories, lambda token: (token == separator) | (token == mark), mark)


def cut(trajectories: Trajectories | Responses, closes: Callable[[Array], Array], mark: int) -> Steps:
    """Cuts the responses behind every token that ``closes`` a step, until token ``mark`` (-1: until their end)."""
    tokens, mask = trajectories.tokens, trajectories.mask
    rows = tokens.shape[0]

    def read(state, column):
        value, number, answering = state
        token, counted = column
        ends = counted & ~answering & closes(token)
        out = number, ends, value
        grown = jnp.where(counted & ~ends, value * _BASE + token + 1, value)
        state = (
            jnp.where(ends, 0, grown).astype(jnp.int32),
            number + ends.astype(jnp.int32),
            answering | (counted & (token == mark)),
        )
        return state, out

    zeros = jnp.zeros((rows,), jnp.int32)
    (_, count, _), out = jax.lax.scan(
        read, (zeros, zeros, jnp.zeros((rows,), bool)), (tokens.T.astype(jnp.int32), mask.T)
    )
    ids, ends, hashes = (x.T for x in out)
    return Steps(ids, mask & (ids < count[:, None]), ends, hashes, count)


def only(steps: Steps, mask: Bool[Array, "B T"], kept: Bool[Array, "B T"]) -> Steps:
    """The steps that are ``kept`` at their ends, numbered anew; what is dropped belongs to the step behind it.

    >>> ids, ends = jnp.array([[0, 0, 1, 2, 2, 3]]), jnp.array([[False, True, True, False, True, False]])
    >>> steps, mask = Steps(ids, ids < 3, ends, ids, jnp.array([3])), jnp.ones((1, 6), bool)
    >>> found = only(steps, mask, jnp.array([[True, True, False, True, True, True]]))
    >>> found.ids.tolist(), found.ends.astype(int).tolist(), found.count.tolist()
    ([[0, 0, 1, 1, 1, 2]], [[0, 1, 0, 0, 1, 0]], [2])
    """
    ends = steps.ends & kept
    closed = ends.astype(jnp.int32)
    number = jnp.cumsum(closed, axis=1)
    ids, count = number - closed, number[:, -1]
    return Steps(ids, mask & (ids < count[:, None]), ends, steps.hashes, count)


def right_steps(steps: Steps, table: Int[Array, "B S"]) -> Bool[Array, "B T"]:
    """At the end of each step: whether its text is that of any reference step of its problem. A repeat is right, too.

    Args:
      table: ``hash_table`` of the row's problem.
    """
    same = steps.hashes[:, :, None] == table[:, None, :]
    return steps.ends & jnp.any(same, axis=2)


def repeated_steps(steps: Steps) -> Bool[Array, "B T"]:
    """At the end of each step: whether an earlier step of the response reads the same."""
    width = steps.ends.shape[1]
    same = (steps.hashes[:, :, None] == steps.hashes[:, None, :]) & steps.ends[:, None, :]
    before = jnp.arange(width)[None, :, None] > jnp.arange(width)[None, None, :]
    return steps.ends & jnp.any(same & before, axis=2)


def per_step(values: Float[Array, "B T"], steps: Steps, *, most: int) -> tuple[Float[Array, "B K"], Bool[Array, "B K"]]:
    """Values at the ends of steps as one number a step, and which steps there are; beyond ``most`` none count."""
    at = jnp.where(steps.ends, steps.ids, most)
    chosen = at[:, :, None] == jnp.arange(most, dtype=jnp.int32)[None, None, :]
    numbers = jnp.sum(jnp.where(chosen, values[:, :, None], 0.0), axis=1)
    return numbers, jnp.arange(most, dtype=jnp.int32)[None, :] < steps.count[:, None]


def at_ends(values: Float[Array, "B K"], steps: Steps) -> Float[Array, "B T"]:
    """One number a step at its last token, 0 elsewhere."""
    most = values.shape[1]
    picked = jnp.take_along_axis(values, jnp.minimum(steps.ids, most - 1), axis=1)
    return jnp.where(steps.ends & (steps.ids < most), picked, 0.0)


def over_steps(values: Float[Array, "B K"], steps: Steps) -> Float[Array, "B T"]:
    """One number a step at all of its tokens, 0 elsewhere."""
    most = values.shape[1]
    picked = jnp.take_along_axis(values, jnp.minimum(steps.ids, most - 1), axis=1)
    return jnp.where(steps.inside & (steps.ids < most), picked, 0.0)
