"""Trap 30, GAE at truncation: a cut episode is bootstrapped, an ended one is not; padding moves nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.returns import gae_advantages
from tests import close

REWARDS, VALUES = [0.0, 0.0, 1.0], [0.5, 0.4, 0.8]
GAMMA, LAM = 0.9, 0.5
# by hand, last to first: delta = r + 0.9 V_next - V, A = delta + 0.45 A_next
# ended:     d3 = 1 - 0.8 = 0.2;               d2 = 0.72 - 0.4 = 0.32; d1 = 0.36 - 0.5 = -0.14
# cut, V=2:  d3 = 1 + 1.8 - 0.8 = 2.0
ENDED = [-0.14 + 0.45 * (0.32 + 0.45 * 0.2), 0.32 + 0.45 * 0.2, 0.2]
CUT = [-0.14 + 0.45 * (0.32 + 0.45 * 2.0), 0.32 + 0.45 * 2.0, 2.0]


def _row(values, left, right, fill=np.nan):
    return jnp.asarray([[fill] * left + values + [fill] * right], jnp.float32)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize(("bootstrap", "want"), [(0.0, ENDED), (2.0, CUT)])
def test_by_hand_under_any_padding(left, right, bootstrap, want):
    mask = _row([1.0] * 3, left, right, 0.0) > 0
    advantages, returns = gae_advantages(
        _row(REWARDS, left, right), _row(VALUES, left, right), jnp.array([bootstrap]), mask, gamma=GAMMA, lam=LAM
    )
    close.assert_near(advantages[0, left : left + 3], want)
    close.assert_near(returns[0, left : left + 3], np.add(want, VALUES))
    assert not np.asarray(advantages)[~np.asarray(mask)].any()


def test_a_hole_in_the_mask_is_stepped_over():
    """Tool output between trained tokens: the next value is that of the next trained token."""
    rewards, values = jnp.array([[0.0, 9.0, 0.0, 9.0, 1.0]]), jnp.array([[0.5, 7.0, 0.4, 7.0, 0.8]])
    mask = jnp.array([[True, False, True, False, True]])
    advantages, _ = gae_advantages(rewards, values, jnp.array([2.0]), mask, gamma=GAMMA, lam=LAM)
    close.assert_near(advantages[0, ::2], CUT)
