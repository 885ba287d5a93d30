"""Trap 12, standard deviation of equal rewards: exactly 0, never noise over epsilon; ddof and eps are named."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group
from tests import close


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1e-8, 16777217.0, -2.3])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 12])
def test_equal_rewards_give_exactly_zero(value, size):
    rewards, ids = jnp.full((size,), value, jnp.float32), jnp.zeros((size,), jnp.int32)
    for advantages in (group.group_normalized_advantages, group.dr_grpo_advantages, group.rloo_advantages):
        assert not np.any(advantages(rewards, ids))
    assert not np.any(group.group_normalized_advantages(rewards, ids, eps=0.0))


def test_a_group_of_one_and_a_group_without_a_valid_member_give_zero():
    rewards, ids = jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 1, 1])
    valid = jnp.array([True, False, False])
    assert not np.any(group.group_normalized_advantages(rewards, ids, valid=valid, eps=0.0))
    assert not np.any(group.rloo_advantages(rewards, ids, valid=valid))


def test_ddof_and_eps_are_parameters_with_documented_defaults():
    rewards, ids = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    sample = group.group_normalized_advantages(rewards, ids, ddof=1, eps=0.0)
    population = group.group_normalized_advantages(rewards, ids, ddof=0, eps=0.0)
    close.assert_relative(population / sample, np.sqrt(2))
    defaults = inspect.signature(group.group_normalized_advantages).parameters
    assert defaults["ddof"].default == 1 and defaults["eps"].default == 1e-6


def test_the_degenerate_fraction_is_a_metric():
    from jaxrl_llm.train.online import rollout_metrics
    from jaxrl_llm.types import Rewards, Trajectories

    ones = jnp.ones((4, 2), jnp.int32)
    ids = jnp.array([0, 0, 1, 1])
    out = Trajectories(ones, ones, ones, ones > 0, jnp.zeros((4, 2), jnp.float32), jnp.zeros((4,), bool), ids, ids)
    rewards = Rewards(jnp.array([0.1, 0.1, 0.0, 1.0]), jnp.ones((4,), bool))
    assert float(rollout_metrics(out, rewards)["group/degenerate_fraction"]) == 0.5
