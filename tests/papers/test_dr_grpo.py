"""Dr. GRPO: the printed coefficients of every token, its identities, and padding that changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.losses.policy import clipped_policy_loss
from tests import close
from tests.close import doubles

REWARDS, IDS = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, jnp.int32)
LENGTHS = np.array([2, 4, 4, 2])


def _coefficients(advantages, mode, width=4):
    """What each token's log-probability is multiplied with in the objective, at ratio 1."""
    mask = jnp.asarray(np.arange(width)[None] < LENGTHS[:, None])
    logp = jnp.where(mask, -1.0, 0.0)

    def objective(x):
        loss = clipped_policy_loss(x, logp, group.per_token(advantages, mask), mask).loss
        return -reduce.tokens(loss, mask, mode=mode, length_tokens=4)

    return objective(logp), jax.grad(objective)(logp)


def test_printed_coefficients():
    """Lengths 2, 4, 4, 2 and C = 4: .0469 and -.0156 everywhere; GRPO punishes the long wrong ones half as much."""
    value, gradient = _coefficients(group.dr_grpo_advantages(REWARDS, IDS), "constant")
    assert float(-value) == doubles(0.0625)
    close.assert_printed(gradient[:, 0], [0.0469, -0.0156, -0.0156, -0.0156], 4)
    _, gradient = _coefficients(group.group_normalized_advantages(REWARDS, IDS, ddof=0, eps=0.0), "seq_mean")
    close.assert_printed(gradient[:, 0], [0.2165, -0.0361, -0.0361, -0.0722], 4)
    # within a response all tokens count alike
    close.assert_near(gradient[1], jnp.full(4, gradient[1, 0]))


def test_padding_changes_nothing():
    advantages = group.dr_grpo_advantages(REWARDS, IDS)
    for mode in ("constant", "seq_mean"):
        (a, _), (b, _) = _coefficients(advantages, mode, 4), _coefficients(advantages, mode, 9)
        close.assert_near(a, float(b))


def test_identities():
    advantages = group.dr_grpo_advantages(REWARDS, IDS)
    close.assert_near(advantages, [0.75, -0.25, -0.25, -0.25], magnitude=0)
    close.assert_near(group.rloo_advantages(REWARDS, IDS), 4 / 3 * advantages)
    np.testing.assert_array_equal(group.dr_grpo_advantages(jnp.ones(4), IDS), jnp.zeros(4))
