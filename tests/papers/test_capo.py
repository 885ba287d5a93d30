"""CAPO: votes of critics, token rewards in which the outcome dominates, normalisation over a group's tokens."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group, process
from tests import close

WRONG = jnp.array([[[True, False], [True, True], [False, False]]])
ALL = jnp.ones((1, 3), bool)


def test_worked_votes():
    assert process.majority(WRONG, ALL).tolist() == [[1.0, 0.0]]
    assert process.unanimous(WRONG, ALL).tolist() == [[0.0, 0.0]]
    close.assert_near(process.average(WRONG, ALL), [[2 / 3, 1 / 3]], magnitude=0)
    two = jnp.array([[True, True, False]])  # the third critic said nothing that could be read
    assert process.unanimous(WRONG, two).tolist() == [[1.0, 0.0]]
    assert process.majority(WRONG, two).tolist() == [[1.0, 0.0]]
    silent = jnp.zeros((1, 3), bool)
    for vote in (process.majority, process.unanimous, process.average):
        assert vote(WRONG, silent).tolist() == [[0.0, 0.0]]


def test_worked_token_rewards():
    flaws, mask = jnp.array([[0.0, 0.0, 1.0, 1.0, 0.0]]), jnp.array([[True] * 4 + [False]])
    paid = process.credited(jnp.array([True]), flaws, mask)
    assert paid.tolist() == [[2.0, 2.0, 1.0, 1.0, 0.0]]
    wrong = process.credited(jnp.array([False]), jnp.zeros((1, 5)), mask)
    assert float(paid[:, :4].min()) > float(wrong.max())  # a flawed step of a right answer beats a wrong answer


def test_without_flaws_it_is_group_normalisation():
    rewards, ids, mask = (
        jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        jnp.array([0, 0, 0, 0, 1, 1]),
        jnp.ones((6, 3), bool),
    )
    paid = process.credited(rewards > 0, jnp.zeros((6, 3)), mask, penalty=0.0)
    found = process.group_token_normalized(paid, ids, mask, eps=0.0)
    expected = group.group_normalized_advantages(rewards, ids, ddof=0, eps=0.0)
    close.assert_near(found, np.repeat(np.asarray(expected)[:, None], 3, axis=1))


def test_normalisation_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    rewards, mask, ids = rng.normal(size=(9, 5)), rng.random((9, 5)) < 0.7, np.repeat(np.arange(3), 3)
    expected = np.zeros((9, 5))
    for g in range(3):
        own = mask & (ids == g)[:, None]
        expected[own] = (rewards[own] - rewards[own].mean()) / rewards[own].std()
    given = jnp.asarray(np.where(mask, rewards, np.nan), jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(mask)
    close.assert_near(process.group_token_normalized(*given, eps=0.0), expected)
