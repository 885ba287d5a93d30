"""Draws from chosen rows only: a stage of a curriculum, and the difficulty levels that choose the rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import Sampler


def make_subset(rows: Sequence[int] | np.ndarray) -> Sampler:
    """Uniform draws with replacement from the given rows of the table; the state is the number of prompts.

    Args:
      rows: row numbers, or one truth value for each row of the table.

    Raises:
      ValueError: when no row is chosen, or one lies outside the table.
    """
    chosen = np.asarray(rows)
    chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int32)
    if chosen.size == 0:
        raise ValueError("rows is empty: no prompt belongs to this stage; widen its condition")

    def init(num_problems):
        if chosen.min() < 0 or chosen.max() >= num_problems:
            raise ValueError(f"rows has {chosen.min()} to {chosen.max()}; the table has rows 0 to {num_problems - 1}")
        return jnp.asarray(num_problems, jnp.int32)

    def draw(state, key, n):
        return jnp.asarray(chosen, jnp.int32)[jax.random.randint(key, (n,), 0, chosen.size, jnp.int32)], state

    def update(state, ids, scores, valid):
        return state

    return Sampler(init, draw, update)


def ladder_levels(
    small: Float[Array, " N"], medium: Float[Array, " N"], large: Float[Array, " N"], coins: Bool[Array, " N"]
) -> tuple[Bool[Array, " N"], Bool[Array, " N"], Bool[Array, " N"]]:
    """Three difficulty levels from the pass rates of a ladder of models; they overlap.

    Level 1: ``0 < small < 1``. Level 2: (``small = 0`` and ``medium > 0``) or (``0 < small < 1`` and
    ``0 < medium < 1``). Level 3: ``large = 0``, and of the others those whose coin shows heads.

    From the data card of "How Difficulty-Aware Staged Reinforcement Learning Enhances LLMs' Reasoning Capabilities",
    arXiv:2504.00829 (there 1.5B, 7B and 32B parameters, and a fair coin).

    >>> import jax.numpy as jnp
    >>> half, one, no = jnp.array([0.5]), jnp.array([1.0]), jnp.array([False])
    >>> [bool(x[0]) for x in ladder_levels(half, half, one, no)]
    [True, True, False]
    """
    sometimes = (small > 0) & (small < 1)
    second = ((small <= 0) & (medium > 0)) | (sometimes & (medium > 0) & (medium < 1))
    return sometimes, second, (large <= 0) | coins


def on_rows(sampler: Sampler, rows: np.ndarray) -> Sampler:
    """A sampler made for ``len(rows)`` prompts, working on those rows of a larger table.

    Raises:
      ValueError: when a row occurs twice or lies outside the table.
    """
    chosen = np.asarray(rows).astype(np.int32)
    if np.unique(chosen).size != chosen.size or chosen.size == 0:
        raise ValueError(f"rows has {chosen.size} entries and {np.unique(chosen).size} different ones; name each once")

    def init(num_problems):
        if chosen.min() < 0 or chosen.max() >= num_problems:
            raise ValueError(f"rows has {chosen.min()} to {chosen.max()}; the table has rows 0 to {num_problems - 1}")
        return sampler.init(chosen.size)

    def draw(state, key, n):
        ids, state = sampler.draw(state, key, n)
        return jnp.asarray(chosen)[ids], state

    def update(state, ids, scores, valid):
        places = np.argsort(chosen)
        at = jnp.asarray(places.astype(np.int32))[jnp.searchsorted(jnp.asarray(chosen[places]), ids)]
        return sampler.update(state, at, scores, valid)

    return Sampler(init, draw, update)
