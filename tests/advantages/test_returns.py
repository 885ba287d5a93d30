import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import returns
from tests import close


def _loop(rewards, values, bootstrap, mask, gamma, lam):
    out = np.zeros(rewards.shape)
    for b in range(rewards.shape[0]):
        following, advantage = bootstrap[b], 0.0
        for t in reversed(np.flatnonzero(mask[b])):
            advantage = rewards[b, t] + gamma * following - values[b, t] + gamma * lam * advantage
            out[b, t], following = advantage, values[b, t]
    return out


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 1.0), (0.9, 0.0)])
def test_against_float64_with_holes(gamma, lam):
    rng = np.random.default_rng(0)
    rewards, values, bootstrap = rng.normal(size=(4, 9)), rng.normal(size=(4, 9)), rng.normal(size=4)
    mask = rng.random((4, 9)) < 0.6
    want = _loop(rewards, values, bootstrap, mask, gamma, lam)
    poison = [jnp.where(jnp.asarray(mask), jnp.asarray(x, jnp.float32), jnp.nan) for x in (rewards, values)]
    args = (*poison, jnp.asarray(bootstrap, jnp.float32), jnp.asarray(mask))
    got, target = returns.gae_advantages(*args, gamma=gamma, lam=lam)
    close.assert_near(got, want)
    close.assert_near(target, np.where(mask, want + values, 0))


def test_truncation_by_hand():
    """Trap 30: values 1, 2; reward 0, 1; gamma = lam = 1. Ended: A = (1-1, 1-2). Cut with bootstrap 4: plus 4."""
    rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 2.0]])
    mask = jnp.ones((1, 2), bool)
    ended, _ = returns.gae_advantages(rewards, values, jnp.array([0.0]), mask, lam=1.0)
    cut, _ = returns.gae_advantages(rewards, values, jnp.array([4.0]), mask, lam=1.0)
    assert ended.tolist() == [[0.0, -1.0]] and cut.tolist() == [[4.0, 3.0]]


def test_reward_at_the_last_trained_token():
    """Trap 31: not at the end of the array."""
    mask = jnp.array([[False, True, True, False], [False, True, False, True]])
    assert returns.at_last_token(jnp.array([2.0, 3.0]), mask).tolist() == [[0, 0, 2, 0], [0, 0, 0, 3]]
    assert returns.discounted_returns(returns.at_last_token(jnp.array([2.0, 3.0]), mask), mask, gamma=0.5).tolist() == [
        [0, 1, 2, 0],
        [0, 1.5, 0, 3],
    ]
