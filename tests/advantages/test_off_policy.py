import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import off_policy
from jaxrl_llm.advantages.group import dr_grpo_advantages, group_normalized_advantages
from tests import close

REWARDS = jnp.array([1.0, 0.0, 0.0, 0.0, 0.3, 0.1, 0.2, 0.7, 0.7])
IDS = jnp.array([0, 0, 0, 0, 1, 1, 1, 2, 2])


def _groups():
    for g in range(3):
        yield np.flatnonzero(np.asarray(IDS) == g)


def test_log_mean_exp_against_float64():
    got = off_policy.log_mean_exp_baseline(REWARDS, IDS, tau=0.2)
    for where in _groups():
        r = np.asarray(REWARDS, np.float64)[where]
        close.assert_near(got[where], 0.2 * np.log(np.mean(np.exp(r / 0.2))))
    tiny = off_policy.log_mean_exp_baseline(REWARDS, IDS, tau=1e-3)
    assert np.isfinite(tiny).all()
    close.assert_near(tiny[0], 1.0 + 1e-3 * np.log(1 / 4))  # the largest of four, alone


def test_opmd_scales_and_leaves_equal_groups_alone():
    got = off_policy.opmd_advantages(REWARDS, IDS, tau=0.2)
    want = (REWARDS - off_policy.log_mean_exp_baseline(REWARDS, IDS, tau=0.2)) / 1.2
    close.assert_near(got[:7], want[:7])
    assert got[7:].tolist() == [0.0, 0.0]
    tau = 100.0  # has the mean as its baseline, but for the variance (1/4 at most) over 2 tau
    large, mean = off_policy.opmd_advantages(REWARDS, IDS, tau=tau) * (1 + tau), dr_grpo_advantages(REWARDS, IDS)
    np.testing.assert_allclose(large, mean, rtol=0, atol=1 / (8 * tau) + tau * close.near(large, mean))


def test_red_drop_balances_each_group():
    kept = off_policy.balanced_members(REWARDS, IDS, jnp.arange(9.0))
    assert kept.tolist() == [True, True, False, False, True, True, True, True, True]
    # another order keeps another negative
    other = off_policy.balanced_members(REWARDS, IDS, -jnp.arange(9.0))
    assert other.tolist() == [True, False, False, True, True, True, True, True, True]
    close.assert_near(off_policy.red_drop_advantages(REWARDS, IDS)[:4], [0.5, -0.5, 0.0, 0.0])
    divided = off_policy.red_drop_advantages(REWARDS, IDS, estimator=group_normalized_advantages)
    close.assert_printed(divided[:2], [0.7071, -0.7071], 4)


def test_red_drop_without_excess_is_plain():
    rewards = jnp.array([1.0, 1.0, 0.0, 0.0])
    ids = jnp.zeros(4, jnp.int32)
    np.testing.assert_array_equal(off_policy.red_drop_advantages(rewards, ids), dr_grpo_advantages(rewards, ids))


@pytest.mark.parametrize(
    "estimator",
    [
        lambda r, g, valid: off_policy.opmd_advantages(r, g, tau=0.5, valid=valid),
        lambda r, g, valid: off_policy.asymre_advantages(r, g, valid=valid),
        lambda r, g, valid: off_policy.red_drop_advantages(r, g, valid=valid),
    ],
)
def test_invalid_rewards_are_outside(estimator):
    valid = jnp.ones(9, bool).at[1].set(False)
    got = estimator(REWARDS.at[1].set(jnp.nan), IDS, valid)
    keep = np.array([0, 2, 3, 4, 5, 6, 7, 8])
    want = estimator(REWARDS[keep], IDS[keep], jnp.ones(8, bool))
    assert float(got[1]) == 0.0
    close.assert_near(got[keep], want)


def test_a_group_of_one():
    one = jnp.array([0.4])
    assert off_policy.opmd_advantages(one, jnp.array([0]), tau=0.5).tolist() == [0.0]
    assert off_policy.red_drop_advantages(one, jnp.array([0])).tolist() == [0.0]
