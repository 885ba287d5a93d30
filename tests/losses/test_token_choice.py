"""Forking tokens and entropy-change weights: worked numbers, float64 loops, equalities, masks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import token_choice
from jaxrl_llm.losses.policy import clipped_policy_loss
from tests import close

rng = np.random.default_rng(6)
OLD = -2 * rng.random((4, 6)) - 0.05
LOGP = np.minimum(OLD + 0.3 * rng.normal(size=(4, 6)), -1e-2)
ADVANTAGES, ENTROPY = rng.normal(size=(4, 6)), 2 * rng.random((4, 6))
MASK = rng.random((4, 6)) < 0.7


def _f32(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays] + [jnp.asarray(MASK)]


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 1.0])
def test_top_tokens_against_sorting(fraction):
    values = sorted(ENTROPY[MASK], reverse=True)
    tau = values[max(math.ceil(fraction * len(values) - 1e-4), 1) - 1]
    got = token_choice.top_tokens(*_f32(ENTROPY), fraction=fraction)
    np.testing.assert_array_equal(got, MASK & (ENTROPY >= tau))
    np.testing.assert_array_equal(token_choice.top_tokens(*_f32(ENTROPY), fraction=fraction, exact=True), got)


def test_ties_belong_unless_exact():
    equal, mask = jnp.ones((2, 5)), jnp.ones((2, 5), bool)
    assert token_choice.top_tokens(equal, mask, fraction=0.2).all()
    exact = token_choice.top_tokens(equal, mask, fraction=0.2, exact=True)
    assert exact.sum() == 2 and exact[0, :2].all()
    assert not token_choice.top_tokens(equal, ~mask, fraction=0.2).any()


def test_selected_gradient_is_the_full_one_with_other_advantages_zero():
    logp, old, advantages, entropy, mask = _f32(LOGP, OLD, ADVANTAGES, ENTROPY)
    chosen = token_choice.top_tokens(entropy, mask, fraction=0.3)

    def value(x, weights, a):
        return reduce.tokens(weights * clipped_policy_loss(x, old, a, mask).loss, mask)

    masked = jax.grad(value)(logp, chosen.astype(jnp.float32), advantages)
    zeroed = jax.grad(value)(logp, jnp.ones(mask.shape), jnp.where(chosen, advantages, 0.0))
    close.assert_near(masked, zeroed)
    everything = token_choice.top_tokens(entropy, mask, fraction=1.0)
    np.testing.assert_array_equal(everything, mask)


def test_steer_worked_example():
    """(A, p = p_old, H) = (1, .5, log 2), (1, .9, .5), (-1, .1, 2): |Omega| = 0, .0395, .2723."""
    p, mask = jnp.array([[0.5, 0.9, 0.1]]), jnp.ones((1, 3), bool)
    advantages, entropy = jnp.array([[1.0, 1.0, -1.0]]), jnp.array([[math.log(2), 0.5, 2.0]])
    change = token_choice.entropy_change(jnp.log(p), jnp.log(p), advantages, entropy, mask)
    close.assert_printed(jnp.abs(change)[0], [0, 0.0395, 0.2723], 4)
    close.assert_printed(token_choice.steer_weights(change, mask)[0], [1, 0.9682, 0.8], 4)
    close.assert_printed(token_choice.steer_linear_weights(change, mask)[0], [1.2, 1.1420, 0.8], 4)


def test_entropy_change_and_weights_against_float64():
    arguments = _f32(LOGP, OLD, ADVANTAGES, ENTROPY)
    p, old = np.exp(LOGP), np.exp(OLD)
    want = np.where(MASK, ADVANTAGES / old * p * (1 - p) * (LOGP + ENTROPY), 0.0)
    change = token_choice.entropy_change(*arguments)
    close.assert_near(change, want)
    size = np.abs(want)
    weights = np.exp(math.log(0.7) / size.max() * size)
    got = token_choice.steer_weights(change, arguments[-1], w_min=0.7)
    close.assert_near(got, np.where(MASK, weights, 0.0))


def test_the_sign_of_the_change_is_that_of_the_entropy():
    """A bandit: one small policy-gradient step on an action changes the entropy opposite to Omega."""
    logits = jnp.log(jnp.array([0.6, 0.3, 0.1]))

    def entropy(x):
        return -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x))

    for action in range(3):
        logp = jax.nn.log_softmax(logits)[action]
        step = jax.grad(lambda x, a=action: jax.nn.log_softmax(x)[a])(logits)
        measured = float(entropy(logits + 1e-3 * step) - entropy(logits))
        one = jnp.ones((1, 1))
        omega = token_choice.entropy_change(logp * one, logp * one, one, entropy(logits) * one, jnp.ones((1, 1), bool))
        assert np.sign(measured) == -np.sign(float(omega[0, 0]))


def test_no_advantage_no_damping_and_small_changes_are_left_alone():
    logp, old, _, entropy, mask = _f32(LOGP, OLD, ADVANTAGES, ENTROPY)
    none = token_choice.entropy_change(logp, old, jnp.zeros(mask.shape), entropy, mask)
    np.testing.assert_array_equal(token_choice.steer_weights(none, mask), mask.astype(jnp.float32))
    close.assert_near(np.asarray(token_choice.steer_linear_weights(none, mask))[MASK], 1.0)
    # w_min = 1 is PPO
    change = token_choice.entropy_change(*_f32(LOGP, OLD, ADVANTAGES, ENTROPY))
    np.testing.assert_array_equal(token_choice.steer_weights(change, mask, w_min=1.0), mask.astype(jnp.float32))
    # below the least change of 0.02 nobody gets w_min
    tiny = jnp.where(mask, 0.01, 0.0)
    assert float(jnp.min(token_choice.steer_weights(tiny, mask)[mask])) > 0.85


def test_no_gradient_and_refusals():
    arguments = _f32(LOGP, OLD, ADVANTAGES, ENTROPY)
    mask = arguments[-1]

    def total(*x):
        return jnp.sum(token_choice.steer_weights(token_choice.entropy_change(*x, mask), mask))

    for gradient in jax.grad(total, (0, 1, 2, 3))(*arguments[:-1]):
        assert not np.asarray(gradient).any()
    with pytest.raises(ValueError, match="fraction=0"):
        token_choice.top_tokens(arguments[3], mask, fraction=0.0)
    with pytest.raises(ValueError, match="w_min=0"):
        token_choice.steer_weights(arguments[0], mask, w_min=0.0)
    with pytest.raises(ValueError, match="w_max=0.5"):
        token_choice.steer_linear_weights(arguments[0], mask, w_max=0.5)


def test_a_batch_of_no_rows_has_no_choice():
    values, mask = jnp.zeros((0, 3)), jnp.zeros((0, 3), bool)
    assert token_choice.top_tokens(values, mask, fraction=0.5).shape == (0, 3)
    assert token_choice.steer_weights(values, mask).shape == (0, 3)
    assert token_choice.steer_linear_weights(values, mask).shape == (0, 3)
