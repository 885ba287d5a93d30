"""Trap 33, reward failures as zeros: an invalid reward enters no loss, baseline, metric nor curriculum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.train import host
from jaxrl_llm.train.online import begin, finish
from jaxrl_llm.types import Rewards, Sampler
from tests import close
from tests.traps.tables import online, same, score, start

VALID = jnp.asarray(np.random.default_rng(3).random(16) < 0.6).at[4:8].set(False)  # the second group fails whole


def _rewards(method, state, fill):
    drawn = begin(method, state)
    answers = jax.tree.map(lambda x: x[drawn.trajectories.problem_ids], method.problems.answers)
    rewards = score(answers, drawn.trajectories)
    return drawn, Rewards(jnp.where(VALID, rewards.value, fill), VALID)


@pytest.mark.parametrize("fill", [pytest.param(1.0, marks=pytest.mark.slow), 50.0, jnp.nan])
def test_the_value_of_an_invalid_reward_changes_nothing(fill):
    told = []
    spy = Sampler(
        lambda n: jnp.zeros((), jnp.int32),
        lambda s, key, n: (jnp.arange(n, dtype=jnp.int32), s),
        lambda s, ids, scores, valid: told.append((np.asarray(scores), np.asarray(valid))) or s,
    )
    method = online(sampler=spy)
    outcomes = []
    for value in (0.0, fill):
        state = start(method)
        drawn, rewards = _rewards(method, state, value)
        outcomes.append(finish(method, state, drawn, rewards))
    same(*outcomes)
    np.testing.assert_array_equal(told[0], told[1])
    assert told[0][1].tolist() == [True, False, True, True]
    metrics = outcomes[0][1]
    close.assert_relative(metrics["reward/valid_fraction"], np.mean(VALID))


def test_the_denominator_leaves_them_out():
    method = online()
    state = start(method)
    drawn, rewards = _rewards(method, state, 0.0)
    batch = method.estimate(state.params, {}, drawn.trajectories, rewards)
    assert not np.asarray(batch.mask)[~np.asarray(VALID)].any()
    assert float(batch.total) == float((drawn.trajectories.mask & VALID[:, None]).sum())


def test_when_everything_fails_nothing_is_trained_and_nothing_is_nan():
    method = online()
    loop = host.make_host_loop(method, lambda out: Rewards(jnp.full((16,), jnp.nan), jnp.zeros((16,), bool)))
    before = start(method)
    want = jax.tree.map(np.array, before.params)
    after, history = host.run(loop, before, 2)
    same(want, after.params)
    assert all(np.isfinite(value) for row in history for value in row.values())
