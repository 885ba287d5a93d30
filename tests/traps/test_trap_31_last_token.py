"""Trap 31, reward at the wrong index, values on pads: the reward stands on the last trained token of each row."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import reduce
from jaxrl_llm.advantages.returns import at_last_token
from jaxrl_llm.losses import value as value_losses
from jaxrl_llm.models import heads
from tests import close
from tests.models_for_tests import small_model

MASK = jnp.array(
    [
        [False, True, True, True, True],  # to the end of the array
        [False, False, True, False, False],  # right padding
        [True, True, False, True, False],  # a hole, then padding
        [False, False, False, False, False],  # nothing trained
    ]
)


def test_the_reward_is_at_the_last_trained_token():
    placed = np.asarray(at_last_token(jnp.array([1.0, 2.0, 3.0, 4.0]), MASK))
    want = np.zeros((4, 5))
    want[0, 4], want[1, 2], want[2, 3] = 1.0, 2.0, 3.0
    np.testing.assert_array_equal(placed, want)


def test_a_reward_model_reads_the_last_real_token_on_either_side_of_the_padding():
    policy, params, _ = small_model()
    head = heads.init_head(16, jax.random.key(0), scale=1.0)
    tokens = jnp.asarray([[7, 8, 9, 4]], jnp.int32)

    @jax.jit
    def score(tokens, positions, segments):
        return heads.sequence_rewards(head, policy.hidden(params, tokens, positions, segments), segments)[0]

    scores = []
    for left in (0, 1, 3):
        pad = ((0, 0), (left, 3 - left))
        positions = jnp.pad(jnp.arange(4, dtype=jnp.int32)[None], pad)
        scores.append(score(jnp.pad(tokens, pad, constant_values=5), positions, jnp.pad(jnp.ones_like(tokens), pad)))
    close.assert_same_forward(np.asarray(scores), np.full(3, scores[0]), columns=7)


def test_the_value_of_a_token_is_of_the_state_before_it_and_pads_have_none():
    head = heads.init_head(3, jax.random.key(0), scale=1.0)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 3)), jnp.float32)
    segments = jnp.array([[1, 1, 2, 2, 0]])
    after, before = heads.token_values(head, hidden), heads.state_values(head, hidden, segments)
    close.assert_near(before[0], [0.0, after[0, 0], 0.0, after[0, 2], 0.0])


def test_pads_do_not_train_the_value():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
    targets = jnp.where(MASK, 1.0, jnp.nan)

    def loss(values):
        return reduce.tokens(value_losses.squared_value_loss(values, targets, MASK).loss, MASK)

    gradient = np.asarray(jax.grad(loss)(jnp.where(MASK, values, jnp.nan)))
    assert np.isfinite(gradient).all() and not gradient[~np.asarray(MASK)].any() and gradient[0, 1] != 0
