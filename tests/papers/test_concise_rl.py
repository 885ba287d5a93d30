"""Concise reasoning: lambda below 1 rewards short right and long wrong responses."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.efficiency import concise_rl
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss, reinforce_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards
from tests import close


def _response(length, width=24):
    return jnp.arange(width)[None, :] < length


@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_worked_losses_fall_in_size_with_the_length(reward):
    for length, size in ((10, 0.80253), (20, 0.64151)):
        mask = _response(length)
        advantages = returns.terminal_advantages(jnp.array([reward]), mask, lam=0.95)
        zeros = jnp.zeros(mask.shape)
        loss = reduce.tokens(clipped_policy_loss(zeros, zeros, advantages, mask).loss, mask)
        pressure = returns.length_pressure(jnp.array([reward]), jnp.array([float(length)]), lam=0.95)[0]
        close.assert_printed([loss, pressure], [-reward * size] * 2, 5)


def test_lambda_one_has_no_preference():
    lengths = jnp.array([1.0, 10.0, 500.0])
    close.assert_near(returns.length_pressure(jnp.full(3, -0.5), lengths, lam=1.0), 0.5, magnitude=0)


def test_agrees_with_a_loop_with_holes_and_with_gae_without_a_critic():
    rng = np.random.default_rng(0)
    mask, rewards, lam = rng.random((5, 9)) < 0.6, rng.normal(size=5), 0.8
    expected = np.zeros((5, 9))
    for b in range(5):
        value = rewards[b]
        for t in reversed(range(9)):
            if mask[b, t]:
                expected[b, t], value = value, value * lam
    args = jnp.asarray(rewards, jnp.float32), jnp.asarray(mask)
    got = returns.terminal_advantages(*args, lam=lam)
    close.assert_near(got, expected)
    zeros = jnp.zeros((5, 9))
    gae, _ = returns.gae_advantages(returns.at_last_token(*args), zeros, zeros[:, 0], args[1], lam=lam)
    close.assert_near(got, gae)


def test_all_right_groups_move_ppo_but_not_grpo():
    rewards, ids, mask = jnp.ones(4), jnp.zeros(4, jnp.int32), jnp.ones((4, 3), bool)
    grpo = group.per_token(group.group_normalized_advantages(rewards, ids), mask)
    ppo = returns.terminal_advantages(rewards, mask, lam=0.95)

    def slope(advantages):
        return jax.grad(lambda x: reduce.tokens(reinforce_loss(x, advantages, mask).loss, mask))(jnp.zeros((4, 3)))

    assert not slope(grpo).any()
    assert (slope(ppo) < 0).all()


def test_rewards_and_arguments():
    right, answered = jnp.array([True, False, False, True]), jnp.array([True, True, False, False])
    assert shaping.answered_rewards(right, answered).tolist() == [1.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="lam=1.5"):
        returns.terminal_advantages(jnp.ones(1), jnp.ones((1, 2), bool), lam=1.5)
    # a row without a trained token stays 0, whatever its reward holds
    assert returns.terminal_advantages(jnp.array([jnp.nan]), jnp.zeros((1, 2), bool)).tolist() == [[0.0, 0.0]]


def _embedded(**changes):
    return dataclasses.replace(concise_rl.Settings(), **concise_rl.EMBEDDED | concise_rl.SMOKE | changes)


def test_the_few_are_problems_that_the_taught_model_solves(monkeypatch):
    """Of those tried the first that are solved; fewer than asked for were filled up with unsolved ones."""
    seen, rates = [], np.array([0.0, 0.5, 0.0, 1.0, 0.25, 0.0] + [0.0] * 10)

    def taught_rates(settings, rows, warm_steps):
        seen.append((rows, warm_steps))
        return rates[: len(rows)]

    monkeypatch.setattr(concise_rl, "taught_rates", taught_rates)
    settings, easy = _embedded(few=2, warm_steps=7), np.arange(10, 40)
    assert concise_rl.solvable(settings, easy).tolist() == [11, 13]
    assert seen == [(tuple(range(10, 26)), 7)]
    with pytest.raises(
        UserError, match="--few 4: of the first 32 problems below --hard-level 4 the model solves 3 in 8"
    ):
        concise_rl.solvable(dataclasses.replace(settings, few=4), easy[:16])
    with pytest.raises(UserError, match="the model solves 0 in 8 samples"):
        concise_rl.solvable(settings, easy[:0])


def test_where_every_problem_is_hard_the_few_are_of_those(monkeypatch):
    """As on a bed of one level: nothing is easier, and the second phase is of problems that are solved."""
    chosen, make_chosen = [], curricula.make_chosen

    def keep(rows, which):
        chosen.append(np.asarray(rows).tolist())
        return make_chosen(rows, which)

    monkeypatch.setattr(curricula, "make_chosen", keep)
    monkeypatch.setattr(concise_rl, "taught_rates", lambda settings, rows, warm_steps: np.array(rows) % 3 == 0)
    concise_rl.build(_embedded(levels=(4,), few=2, train_problems=12))
    assert chosen == [list(range(12)), [0, 3]]


def test_rates_are_of_the_taught_copy(monkeypatch):
    judged = []

    def pass_rates(found, by, rows, **sampling):
        judged.append(by.params)
        return np.ones(len(rows))

    monkeypatch.setattr(curricula, "pass_rates", pass_rates)
    monkeypatch.setattr(concise_rl, "taught", lambda settings, steps: lambda key: f"taught for {steps}")
    settings = _embedded(train_problems=24)  # a bench of its own: rates are kept
    for steps in (3, 0):
        concise_rl.taught_rates(settings, (0, 1), steps)
    assert judged[0] == "taught for 3" and judged[1] is recipes.bench(settings).model.params


def test_both_phases_have_the_lambda_of_the_arm(monkeypatch):
    """The first had lambda 1 in every arm, so that its continuation in phase1 was another method."""
    monkeypatch.setattr(concise_rl, "taught_rates", lambda settings, rows, steps: np.ones(len(rows)))
    used = []
    monkeypatch.setattr(
        builders, "make_estimate", lambda policy, advantages, **options: used.append(advantages) or advantages
    )
    mask = jnp.ones((1, 3), bool)
    rows = types.SimpleNamespace(mask=mask)
    rewards = Rewards(jnp.ones(1), jnp.ones(1, bool))
    for lam, first in ((0.5, [0.25, 0.5, 1.0]), (1.0, [1.0, 1.0, 1.0])):
        used.clear()
        concise_rl.build(_embedded(lam=lam))
        own = [one for one in used if "lam" in one.__code__.co_freevars]
        assert len(own) == 2
        for advantages in own:
            close.assert_near(advantages(rows, rewards), [first], magnitude=0)
