"""A linear reward model: it finds the direction that decides, and knows what it cannot learn."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import linear_reward_model
from tests import close

rng = np.random.default_rng(4)


def test_it_orders_groups_by_the_deciding_direction():
    direction = np.array([1.0, -2.0, 0.0, 0.5])
    x = rng.normal(size=(60, 4))
    truth = (x @ direction > 0).astype(np.float32)
    ids = jnp.repeat(jnp.arange(12, dtype=jnp.int32), 5)
    found = linear_reward_model.fit_linear(jnp.asarray(x, jnp.float32), jnp.asarray(truth), ids, steps=200)
    cosine = found.weight @ direction / (np.linalg.norm(found.weight) * np.linalg.norm(direction))
    assert float(cosine) > 0.9
    scores = found.scores(jnp.asarray(x, jnp.float32))
    # sums of sixty values, each of four terms, in units of their deviation; 1e-3 was added to it
    largest = float(jnp.abs(jnp.asarray(x, jnp.float32) @ found.weight).max() * found.scale)
    close.assert_near(scores.mean(), 0.0, terms=64, magnitude=largest)
    close.assert_near(scores.std(), 1.0 - 1e-3 * float(found.scale), terms=2 * 64, magnitude=largest**2)


def test_pairs_stay_within_their_group():
    """Each group is of one kind: nothing to compare, nothing learned, scores of 0."""
    x, ids = rng.normal(size=(8, 3)), jnp.arange(8, dtype=jnp.int32) // 4
    found = linear_reward_model.fit_linear(jnp.asarray(x, jnp.float32), (ids > 0).astype(jnp.float32), ids)
    np.testing.assert_array_equal(found.scores(jnp.asarray(x, jnp.float32)), jnp.zeros(8))
    with pytest.raises(ValueError, match="steps=0"):
        linear_reward_model.fit_linear(jnp.zeros((2, 1)), jnp.zeros(2), jnp.zeros(2, jnp.int32), steps=0)


def test_what_nobody_could_judge_is_in_no_pair():
    """A verifier that failed has said nothing: the last feature, which its rows alone have, weighs nothing."""
    x = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.0, 5.0]] * 4)
    truth, ids = jnp.array([1.0, 0.0, 0.0] * 4), jnp.arange(12, dtype=jnp.int32) // 3
    known = jnp.array([True, True, False] * 4)
    weights = [linear_reward_model.fit_linear(x, truth, ids, valid=valid).weight for valid in (known, known | True)]
    assert weights[0][0] > 0 and weights[0][1] == 0 and weights[1][1] < 0
