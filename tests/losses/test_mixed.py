"""Losses of outside tokens: worked numbers, float64 loops, gradients, masks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import mixed, policy
from tests import close
from tests.reference.losses import each

rng = np.random.default_rng(4)
OLD = -2 * rng.random((4, 5))
LOGP = np.minimum(OLD + 0.4 * rng.normal(size=(4, 5)), -1e-3)
ADVANTAGES = rng.normal(size=(4, 5))
MASK = rng.random((4, 5)) < 0.7
LOSSES = {
    "ratio": mixed.ratio_loss,
    "probability": mixed.probability_loss,
    "shaped": mixed.shaped_probability_loss,
    "mixture": mixed.mixture_loss,
}


def _f32(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays] + [jnp.asarray(MASK)]


def _reference(name, b, t):
    p, old, a = np.exp(LOGP[b, t]), np.exp(OLD[b, t]), ADVANTAGES[b, t]
    return {
        "ratio": -p / old * a,
        "probability": -p * a,
        "shaped": -p / (p + 0.1) * a,
        "mixture": -2 * p / (old + 0.5 * (old + 1)) * (1 - p) ** 0.5 * a,
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_against_float64(name):
    got = LOSSES[name](*_f32(LOGP, OLD, ADVANTAGES))
    close.assert_near(got.loss, each(MASK, partial(_reference, name)))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_reaches_logp_alone_and_no_nan(name):
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    gradients = jax.grad(lambda *x: jnp.sum(LOSSES[name](*x, arguments[3]).loss), (0, 1, 2))(*arguments[:3])
    assert np.isfinite(gradients[0]).all() and np.asarray(gradients[0])[MASK].all()
    assert not np.asarray(gradients[0])[~MASK].any()
    assert not np.asarray(gradients[1]).any() and not np.asarray(gradients[2]).any()


def test_no_gradient_through_the_exploration_factor():
    logp, old, advantages, mask = _f32(LOGP, OLD, ADVANTAGES)
    got = jax.grad(lambda x: jnp.sum(mixed.mixture_loss(x, old, advantages, mask).loss))(logp)
    want = each(MASK, partial(_reference, "mixture"))  # d exp(logp) / d logp = exp(logp)
    close.assert_near(got, want)


def test_shaped_gradient_is_largest_at_gamma():
    """Gradient weights of p = 0.01, 0.1, 0.9: gamma p / (p + gamma)^2."""
    logp, ones = jnp.log(jnp.array([[0.01, 0.1, 0.9]])), jnp.ones((1, 3))
    slope = jax.grad(lambda x: -jnp.sum(mixed.shaped_probability_loss(x, x, ones, ones > 0).loss))(logp)
    close.assert_printed(slope[0], [0.0826, 0.25, 0.09], 4)


def test_a_token_of_probability_one_has_its_whole_gradient():
    zero, ones = jnp.zeros((1, 1)), jnp.ones((1, 1))
    slopes = {
        mixed.probability_loss: 1.0,
        mixed.shaped_probability_loss: 0.1 / 1.1**2,
        partial(mixed.mixture_loss, gamma=0.0): 1.0,
    }
    for loss, want in slopes.items():
        slope = jax.grad(lambda x, f=loss: -jnp.sum(f(x, zero, ones, ones > 0).loss))(zero)
        close.assert_near(slope, [[want]])


def test_mixture_ratio_stays_bounded_where_the_old_policy_was_sure_of_something_else():
    assert float(mixed.mixture_ratio(jnp.array([[-0.1]]), jnp.array([[-80.0]]))[0, 0]) <= 4.0


def test_ratio_loss_is_ppo_without_its_clip():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    wide = policy.clipped_policy_loss(*arguments, clip_low=0.999, clip_high=1e9)
    close.assert_relative(mixed.ratio_loss(*arguments).loss, wide.loss)


def test_combined_takes_each_row_from_its_loss():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    own, other = mixed.ratio_loss(*arguments), mixed.mixture_loss(*arguments)
    outside = jnp.array([False, True, False, True])
    got = mixed.combined(own, other, outside)
    np.testing.assert_array_equal(got.loss[0], own.loss[0])
    np.testing.assert_array_equal(got.loss[3], other.loss[3])
    assert set(got.aux) == {"ratio", "clipped", "weight"} and not np.asarray(got.aux["weight"][0]).any()
    # nothing from outside: the own loss alone
    alone = mixed.combined(own, other, jnp.zeros(4, bool))
    np.testing.assert_array_equal(alone.loss, own.loss)


def test_numbers_that_make_no_sense_are_refused():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    with pytest.raises(ValueError, match="gamma=0"):
        mixed.shaped_probability_loss(*arguments, gamma=0.0)
    with pytest.raises(ValueError, match="gamma=-1"):
        mixed.exploration_factor(arguments[0], gamma=-1.0)
