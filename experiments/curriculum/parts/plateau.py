"""Stages that end where a validation score no longer rises: the rule, and a sampler that draws by it."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Sampler


class Plateau(NamedTuple):
    """Where a run stands among its stages; all scalars."""

    stage: Int[Array, ""]
    best: Float[Array, ""]  # highest mean of a window of this stage; -inf before the first
    waited: Int[Array, ""]  # windows since then
    total: Float[Array, ""]  # of the open window: sum of scores,
    weight: Float[Array, ""]  # of their weights,
    steps: Int[Array, ""]  # and how many steps it has


def first_stage() -> Plateau:
    """The state before the first score."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Plateau(none, jnp.full((), -jnp.inf, jnp.float32), none, zero, zero, none)


def past_plateau(
    state: Plateau,
    scores: Float[Array, " n"],
    valid: Bool[Array, " n"],
    *,
    window: int,
    patience: int = 1,
    least: float = 0.0,
) -> Plateau:
    """The state after one more step's validation scores.

    ``v_k`` is the mean score over the ``window`` steps of window k. It rises when ``v_k > best + least``; a stage ends
    with the ``patience``-th window in a row that does not, and the next one begins without a best score. A window
    without any valid score is no news: it neither rises nor waits.

    From "How Difficulty-Aware Staged Reinforcement Learning Enhances LLMs' Reasoning Capabilities", arXiv:2504.00829
    (a stage goes on until its validation score stops improving), and "Nudging the Boundaries of LLM Reasoning",
    arXiv:2509.25666 (hints begin where the validation reward is flat). Differs from the papers in nothing known: they
    give neither window nor patience.

    >>> import jax.numpy as jnp
    >>> state, stages = first_stage(), []
    >>> for score in (0.2, 0.4, 0.3, 0.1, 0.5):
    ...     state = past_plateau(state, jnp.array([score]), jnp.array([True]), window=1)
    ...     stages.append(int(state.stage))
    >>> stages
    [0, 0, 1, 1, 1]
    """
    if window < 1 or patience < 1 or least < 0:
        raise ValueError(f"window={window} and patience={patience} must be at least 1, least={least} at least 0")
    total = state.total + jnp.sum(jnp.where(valid, scores, 0.0))
    weight = state.weight + jnp.sum(valid.astype(jnp.float32))
    steps = state.steps + 1
    full = steps >= window
    known = full & (weight > 0)
    mean = total / jnp.maximum(weight, 1.0)
    rises = known & (mean > state.best + least)
    waited = jnp.where(rises, 0, state.waited + known.astype(jnp.int32))
    ends = waited >= patience
    best = jnp.where(ends, -jnp.inf, jnp.where(rises, mean, state.best))
    return Plateau(
        state.stage + ends.astype(jnp.int32),
        best,
        jnp.where(ends, 0, waited),
        jnp.where(full, 0.0, total),
        jnp.where(full, 0.0, weight),
        jnp.where(full, 0, steps),
    )


def make_validated(
    stages: Sequence[np.ndarray],
    validation: np.ndarray,
    *,
    count: int,
    window: int,
    patience: int = 1,
    least: float = 0.0,
) -> Sampler:
    """Draws from the rows of a stage until the score of validation rows no longer rises, then from those of the next.

    ``count`` prompts of a step, its first, are validation: whoever trains leaves their rows out of the loss
    (``not_validation``). All draws are uniform with replacement; the last stage goes on to the end. State: ``Plateau``.

    Args:
      stages: for each, one truth value a row of the table; validation rows are taken out.
      validation: one truth value a row of the table.
      window, patience, least: of ``past_plateau``.

    Raises:
      ValueError: for a stage or a validation without rows, or a count that leaves nothing to train on.
    """
    held = np.asarray(validation, bool)
    chosen = [np.flatnonzero(np.asarray(rows, bool) & ~held).astype(np.int32) for rows in stages]
    if not held.any() or not chosen or any(rows.size == 0 for rows in chosen):
        sizes = [int(rows.size) for rows in chosen]
        raise ValueError(f"stages have {sizes} rows beside {int(held.sum())} of validation; each needs at least one")
    asked = np.flatnonzero(held).astype(np.int32)
    width = max(rows.size for rows in chosen)
    table = np.stack([np.pad(rows, (0, width - rows.size)) for rows in chosen])
    sizes = np.asarray([rows.size for rows in chosen], np.int32)
    rule = partial(past_plateau, window=window, patience=patience, least=least)

    def init(num_problems: int) -> Plateau:
        if num_problems != held.size:
            raise ValueError(f"validation has {held.size} rows; the table has {num_problems}")
        return first_stage()

    def draw(state: Plateau, key: Any, n: int) -> tuple[Array, Plateau]:
        if not 1 <= count < n:
            raise ValueError(f"count={count} must be from 1 to {n - 1}, one less than the prompts of a step")
        stage = jnp.minimum(state.stage, len(chosen) - 1)
        one, two = jax.random.split(key)
        shown = jax.random.randint(one, (count,), 0, asked.size, jnp.int32)
        taught = jax.random.randint(two, (n - count,), 0, jnp.asarray(sizes)[stage], jnp.int32)
        return jnp.concatenate([jnp.asarray(asked)[shown], jnp.asarray(table)[stage, taught]]), state

    def update(state: Plateau, ids: Array, scores: Array, valid: Array) -> Plateau:
        return rule(state, scores.astype(jnp.float32), valid & jnp.asarray(held)[ids])

    return Sampler(init, draw, update)


def not_validation(validation: np.ndarray, problem_ids: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows that train: those of no validation problem.

    >>> import jax.numpy as jnp
    >>> not_validation(np.array([True, False]), jnp.array([0, 1, 1])).tolist()
    [False, True, True]
    """
    return ~jnp.asarray(validation, bool)[problem_ids]


def held_rows(size: int, count: int, *, seed: int = 0) -> Bool[np.ndarray, " N"]:
    """Which ``count`` of ``size`` rows are validation: drawn without replacement, the same at every call.

    Raises:
      ValueError: where nothing would be left to train on.
    """
    if not 0 < count < size:
        raise ValueError(f"count={count} rows of validation must be from 1 to {size - 1}")
    held = np.zeros(size, bool)
    held[np.random.default_rng(seed).permutation(size)[:count]] = True
    return held
