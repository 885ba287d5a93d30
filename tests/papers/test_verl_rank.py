"""VERL: its printed ranks, growth, bonus and shaping, and the averages that a step leaves behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import verl_rank
from jaxrl_llm.advantages import effective_rank as ranks
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.online import init_state, iterate
from jaxrl_llm.types import Rewards
from tests import close


def test_printed_numbers():
    close.assert_printed(ranks.rank_of_singular_values(jnp.array([3.0, 1.0])), 1.7548, 4)
    velocity, acceleration = ranks.growth(jnp.array([[2.0, 3.0, 5.0, 4.0]]), jnp.ones((1, 4), bool))
    close.assert_printed(velocity[0], 1.3889, 4)
    close.assert_printed(acceleration[0], -0.1667, 4)
    bonus = ranks.rank_bonus(jnp.array([[0.5, 1.0, 0.2]]), gain=1.0)
    close.assert_printed(bonus[0], 0.5969, 4)
    shaped = ranks.shaped_advantages(jnp.array([[1.0], [-1.0], [1.0]]), jnp.array([0.8, 0.8, -0.3]), kappa=2.0)
    close.assert_near(shaped[:, 0], [1.5, -0.5, 1.0])


@pytest.mark.slow
def test_the_first_step_shapes_nothing_and_leaves_averages():
    settings = dataclasses.replace(verl_rank.Settings(), **verl_rank.EMBEDDED | verl_rank.SMOKE)
    stage, bench, ids = verl_rank.build(settings).stages[0], recipes.bench(settings), jnp.arange(2, dtype=jnp.int32)
    online, params = stage.method, bench.model.params
    rows = online.rollout(
        params, bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(0), 0, ids, 2), ids
    )
    rewards = Rewards(jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool))
    extras = stage.extras(params, jax.random.key(0))
    first = online.estimate(params, extras, rows, rewards)
    grpo = verl_rank.build(dataclasses.replace(settings, weight=0.0)).stages[0].method
    np.testing.assert_array_equal(first.advantages, grpo.estimate(params, extras, rows, rewards).advantages)
    state = type("State", (), {"extras": extras})()
    extras = online.remember(state, first, rows, rewards)
    figures = np.asarray(first.extras["figures"])
    close.assert_near(extras["averages"].mean, figures.mean(0))
    # afterwards a response of more than average rank gets more, never less, and no sign turns
    second = online.estimate(params, extras, rows, rewards).advantages
    assert (second >= first.advantages - 1e-6).all() and (jnp.sign(second) == jnp.sign(first.advantages)).all()
    assert np.abs(np.asarray(second - first.advantages)).max() > 0


def test_the_bonus_fades_as_scores_rise_and_may_stand_at_the_end_alone():
    score = jnp.zeros(())
    rewards, all_ = jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.ones(4, bool)
    for k in range(1, 5):  # scores 2 r - 1 have the mean 0.5
        score = verl_rank.followed(score, rewards, all_, rate=0.3)
        close.assert_near(score, np.float32(0.5 * (1 - 0.7**k)), terms=k)
    close.assert_near(verl_rank.followed(score, rewards, ~all_, rate=0.3), score)
    close.assert_near([verl_rank.fading(jnp.float32(x)) for x in (-1.0, 0.0, 1.0)], [1.0, 0.5, 0.0])
    mask = jnp.array([[False, True, True, False], [True, False, False, False], [False] * 4])
    found = verl_rank.at_the_end(jnp.full((3, 4), 2.0), jnp.zeros((3, 4)), mask)
    assert found.tolist() == [[0, 0, 2, 0], [2, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.slow
def test_a_step_of_fading_keeps_the_score():
    settings = dataclasses.replace(
        verl_rank.Settings(), **verl_rank.EMBEDDED | verl_rank.SMOKE | {"left": verl_rank.fading}
    )
    stage, bench = verl_rank.build(settings).stages[0], recipes.bench(settings)
    state = init_state(
        stage.method, bench.model.params, jax.random.key(0), extras=stage.extras(bench.model.params, jax.random.key(1))
    )
    state, metrics = iterate(stage.method, state)
    mean = float(metrics["reward/mean"])
    close.assert_near(state.extras["score"], np.float32(settings.rate * (2 * mean - 1)), terms=4)
