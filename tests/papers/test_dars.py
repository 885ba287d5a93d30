"""DARS: more responses to hard prompts, until every prompt weighs what it should."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group, pools
from tests import close

RATES = jnp.array([0.0, 0.125, 0.25, 0.375, 0.5])


def test_worked_allocations():
    assert pools.extra_rollouts(RATES, rollouts=8, most=32).tolist() == [24, 11, 3, 1, 0]
    assert pools.extra_rollouts(RATES, rollouts=8, most=99).tolist() == [27, 11, 3, 1, 0]
    wish = pools.hardness_weighted
    assert pools.extra_rollouts(RATES, rollouts=8, most=64, wish=wish).tolist() == [56, 24, 8, 3, 0]
    assert pools.extra_rollouts(RATES, rollouts=8, most=64, wish=pools.no_extra).tolist() == [0] * 5
    with pytest.raises(ValueError, match="most=4"):
        pools.extra_rollouts(RATES, rollouts=8, most=4)


@pytest.mark.parametrize("std", [False, True])
def test_agrees_with_the_formula_in_float64(std):
    for n, most in ((8, 40), (16, 64)):
        rates = np.arange(n + 1) / n
        for wish, share in ((pools.equal_treatment, lambda a: 1.0), (pools.hardness_weighted, lambda a: 2 * (1 - a))):
            found = pools.extra_rollouts(
                jnp.asarray(rates, jnp.float32), rollouts=n, most=most, wish=wish, std=std
            ).tolist()
            for a, more in zip(rates, found, strict=True):
                if a >= 0.5:
                    assert more == 0
                    continue
                a = a or 0.5 / n
                one = 2 * math.sqrt(a * (1 - a)) if std else 2 * a * (1 - a)
                peak = n if std else n / 2
                wanted = math.ceil((share(a) * peak - n * one) / one - 1e-9)
                assert more == min(max(wanted, 0), most - n)


def test_cumulative_advantage_is_the_sum_over_the_group():
    for right in range(9):
        rewards = jnp.array([1.0] * right + [0.0] * (8 - right))
        ids, a = jnp.zeros(8, jnp.int32), jnp.array([right / 8])
        total = jnp.abs(group.dr_grpo_advantages(rewards, ids)).sum()
        close.assert_near(total, pools.cumulative_advantage(a, 8)[0])
        scaled = jnp.abs(group.group_normalized_advantages(rewards, ids, ddof=0, eps=0.0)).sum()
        close.assert_near(scaled, pools.cumulative_advantage(a, 8, std=True)[0])


def test_with_its_extra_rollouts_a_hard_prompt_weighs_as_much_as_the_favoured_one():
    rates = jnp.array([0.125, 0.25, 0.375])
    more = pools.extra_rollouts(rates, rollouts=8, most=64)
    for a, extra in zip(rates, more, strict=True):
        reached = pools.cumulative_advantage(a[None], 8 + int(extra))[0]
        assert 4.0 <= float(reached) < 4.0 + 2 * float(a * (1 - a))


def test_no_hard_prompt_means_a_plain_group():
    rewards = jnp.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    assert not pools.extra_rollouts(rewards.mean(1), rollouts=4, most=16).any()
    plain = group.dr_grpo_advantages(rewards.reshape(-1), jnp.repeat(jnp.arange(2), 4))
    close.assert_near(pools.pool_advantages(rewards, jnp.ones((2, 4), bool)).reshape(-1), plain)
