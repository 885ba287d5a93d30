"""ROVER on a tree whose values are enumerated: softmax over Q^U solves it and keeps all right leaves."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import reduce
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.valuation import rover_loss, uniform_policy_values
from jaxrl_llm.types import Problems, Rewards, Trajectories
from tests import close
from tests.close import doubles

DEPTH, ACTIONS = 4, 3
REWARDS = jnp.asarray(np.random.default_rng(3).random(ACTIONS**DEPTH) < 0.15, jnp.float32)
LEVELS = uniform_policy_values(REWARDS, ACTIONS)


def _leaf_probabilities(levels, rho):
    chance = jnp.ones(1)
    for q in levels:
        chance = (chance[:, None] * jax.nn.softmax(q / rho, axis=1)).reshape(-1)
    return chance


def test_softmax_over_the_uniform_values_solves_the_tree_and_keeps_every_right_leaf():
    """As rho falls the policy fails less; every right leaf keeps a chance, which the greedy policy denies it."""
    assert 1 < float(REWARDS.sum()) < 20
    success = [float((_leaf_probabilities(LEVELS, rho) * REWARDS).sum()) for rho in (10.0, 0.3, 0.03, 0.003)]
    assert success == sorted(success) and success[0] < 0.3 and success[-1] > 0.99
    chance = _leaf_probabilities(LEVELS, 0.1)
    right = np.asarray(chance)[np.asarray(REWARDS) > 0]
    assert right.min() > 0 and (right > 0.01).sum() > 1


def test_worked_step():
    """pi / pi_old = 1.25 and 0.5, V = -0.0079 after the first token: targets 0.4921 and 0.5, mean loss 0.7479."""
    old = jnp.log(jnp.array([[0.4, 0.4]]))
    now = old + jnp.array([[0.2231, -0.6931]])
    means = jnp.array([[0.0, -1.15525]]), jnp.array([[0.0, -1.14734]])
    mask = jnp.ones((1, 2), bool)
    terms = rover_loss(now, old, *means, jnp.full((1, 2), 0.5), mask)
    close.assert_printed(terms.aux["value_error"], [[0.4921 - 0.2231, 0.5 + 0.6931]], 4)
    close.assert_printed(reduce.tokens(terms.loss, mask), 0.7479, 4)


def test_the_bellman_equation_of_the_uniform_policy_is_its_fixed_point():
    """Where Q is that of the uniform policy at both of two steps, nothing moves the first of them."""
    q_next = jnp.array([0.2, -0.1, 0.5])
    # log-probabilities need not sum to 1 for the algebra: Q = logp - old with rho 1, the reward paid at the end only
    value = jnp.sum(q_next) / 3
    logp, old = jnp.array([[value, q_next[0]]]), jnp.zeros((1, 2))
    mean = jnp.array([[0.0, value]])
    advantages = jnp.array([[0.0, q_next[0]]])

    def loss(x):
        return jnp.sum(rover_loss(x, old, mean, jnp.zeros((1, 2)), advantages, jnp.ones((1, 2), bool)).loss)

    close.assert_near(jax.grad(loss)(logp), jnp.zeros((1, 2)))


def test_right_answers_are_counted_once_each():
    """Four samples of two problems: right a, right a, right b, wrong; wrong, right c, wrong, right c: 2/4 and 1/4."""
    tokens = jnp.array([[5, 1], [5, 9], [6, 1], [7, 1], [5, 1], [8, 1], [8, 1], [8, 1]])
    mask = jnp.ones((8, 2), bool).at[1, 1].set(False).at[0, 1].set(False)
    grid, zeros = jnp.zeros((8, 2), jnp.int32), jnp.zeros(8, jnp.int32)
    rows = Trajectories(tokens, grid, grid, mask, grid.astype(jnp.float32), zeros > 0, zeros, zeros)
    rewards = Rewards(jnp.array([1.0, 1, 1, 0, 0, 1, 0, 1]), jnp.ones(8, bool))
    heldout = Problems(grid[:2], grid[:2] > 0, {}, zeros[:2])
    found = recipes.Bench(None, None, heldout, *[None] * 4)
    assert float(curricula.distinct_right(found)(rows, rewards)["eval/distinct_right"]) == doubles(3 / 8)
