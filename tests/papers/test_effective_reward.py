"""Clip and Delta: bounded rewards of steps, by the paper's numbers."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import process
from tests import close

SCORES = jnp.array([[0.9, 0.7, 0.8, 0.6]])
STEPS = jnp.array([[True, True, True, False]])  # the fourth is the answer


def _returns(rewards):
    return np.cumsum(np.asarray(rewards)[:, ::-1], axis=1)[:, ::-1]


def test_worked_delta_and_clip():
    delta = process.delta_steps(SCORES, STEPS)
    close.assert_near(delta, [[0.2, -0.1, 0.8, 0.0]])
    close.assert_near(_returns(delta), [[0.9, 0.7, 0.8, 0.0]])
    clipped = process.clipped_steps(SCORES, STEPS, bound=0.75)
    close.assert_near(clipped, [[0.0, -0.05, 0.0, 0.0]])
    close.assert_near(process.delta_steps(clipped, STEPS), [[0.05, -0.05, 0.0, 0.0]])


def test_a_repeated_right_step_pays_only_without_bounds():
    # a right step of score 1 is said once, then twice
    once, twice = (jnp.array([[1.0, 1.0, 0.0]]), jnp.array([[1.0, 1.0, 1.0]]))
    there, more = jnp.array([[True, True, False]]), jnp.ones((1, 3), bool)
    sums = [(f(twice, more).sum() - f(once, there).sum()).item() for f in
            (process.plain_steps, process.clipped_steps, process.delta_steps)]  # fmt: skip
    close.assert_near(sums, [1.0, 0.0, 0.0])


def test_returns_are_bounded_and_nothing_leaks_from_missing_steps():
    rng = np.random.default_rng(0)
    scores, valid = rng.random((20, 6)), np.arange(6)[None, :] < rng.integers(0, 7, (20, 1))
    given = jnp.asarray(np.where(valid, scores, np.nan), jnp.float32), jnp.asarray(valid)
    close.assert_near(_returns(process.delta_steps(*given)), np.where(valid, scores, 0))
    clipped = process.clipped_steps(*given, bound=0.5)
    assert float(clipped.max()) <= 0
    both = process.delta_steps(clipped, given[1])
    close.assert_near(_returns(both), np.where(valid, np.minimum(scores - 0.5, 0), 0))
    none = process.delta_steps(SCORES, jnp.zeros((1, 4), bool))
    assert not none.any()
