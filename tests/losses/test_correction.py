"""Weights for a sampler that is not the trainer: float64 loop, no gradient, planted NaN, known definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import correction
from tests import close
from tests.reference import losses as reference

RNG = np.random.default_rng(3)
OLD, SAMPLER = -RNG.random((5, 6)) * 2, -RNG.random((5, 6)) * 2
MASK = RNG.random((5, 6)) < 0.7
ARRAYS = jnp.asarray(OLD, jnp.float32), jnp.asarray(SAMPLER, jnp.float32), jnp.asarray(MASK)


@pytest.mark.parametrize("level", correction.LEVELS)
def test_against_float64(level):
    ratio = correction.mismatch_ratio(*ARRAYS, level=level)
    want = reference.weights(OLD, SAMPLER, MASK, level)
    close.assert_relative(ratio, want)
    capped = correction.truncated_weights(ratio, ARRAYS[2], cap=1.2)
    close.assert_relative(capped, np.minimum(want, 1.2))
    dropped = correction.masked_weights(ratio, ARRAYS[2], low=0.8, high=1.2)
    close.assert_relative(dropped, np.where((want >= 0.8) & (want <= 1.2), want, 0))
    fraction = correction.effective_sample_fraction(capped, ARRAYS[2])
    close.assert_near(fraction, reference.effective_fraction(np.minimum(want, 1.2), MASK))


def test_bounds_belong_to_what_stays():
    two, mask = jnp.array([[0.5, 2.0]]), jnp.ones((1, 2), bool)
    assert correction.masked_weights(two, mask, low=0.5, high=2.0).tolist() == [[0.5, 2.0]]
    # a response that is neither good nor bad is not left out, however far it drifted; one at the bound neither
    far, one = jnp.array([[-9.0], [-1.5]]), jnp.ones((2, 1), bool)
    kept = correction.off_policy_sequence_mask(far, jnp.full((2, 1), -1.0), jnp.array([[0.0], [-1.0]]), one, most=0.5)
    assert kept.tolist() == [[True], [True]]


def test_literal_numbers():
    # log ratios 0.4, -0.2, -0.1 and (masked) 0.3: product e^0.1, geometric mean e^(0.1/3)
    old, sampler = jnp.array([[-0.8, -0.9, -2.1, -0.1]]), jnp.array([[-1.2, -0.7, -2.0, -0.4]])
    mask = jnp.array([[True, True, True, False]])
    rows = {
        "token": [1.4918247, 0.8187308, 0.9048374, 0.0],
        "sequence": [1.1051709, 1.1051709, 1.1051709, 0.0],
        "geometric": [1.0338951, 1.0338951, 1.0338951, 0.0],
    }
    for level, want in rows.items():
        close.assert_printed(correction.mismatch_ratio(old, sampler, mask, level=level), [want], 7)


@pytest.mark.parametrize("level", correction.LEVELS)
def test_nothing_is_differentiated_and_nan_outside_the_mask_is_harmless(level):
    old, sampler, mask = ARRAYS
    poison = jnp.where(mask, old, jnp.nan), jnp.where(mask, sampler, jnp.nan)

    def total(a, b):
        ratio = correction.mismatch_ratio(a, b, mask, level=level)
        return jnp.sum(correction.truncated_weights(ratio, mask) + correction.masked_weights(ratio, mask))

    np.testing.assert_array_equal(total(*poison), total(old, sampler))
    for gradient in jax.grad(total, (0, 1))(*poison):
        assert not np.asarray(gradient).any()
    # also a ratio that the caller computed with a gradient
    for weigh in (correction.truncated_weights, correction.masked_weights):
        assert not np.asarray(jax.grad(lambda x, f=weigh: f(jnp.exp(x), mask).sum())(old)).any()
    dirty = correction.truncated_weights(jnp.full(mask.shape, jnp.nan), jnp.zeros_like(mask))
    assert not np.asarray(dirty).any()


def test_exact_sampler_leaves_everything_as_it_is():
    old, _, mask = ARRAYS
    for level in correction.LEVELS:
        ratio = correction.mismatch_ratio(old, old, mask, level=level)
        np.testing.assert_array_equal(correction.truncated_weights(ratio, mask), mask.astype(jnp.float32))
        np.testing.assert_array_equal(correction.masked_weights(ratio, mask), mask.astype(jnp.float32))
    close.assert_near(correction.effective_sample_fraction(ratio, mask), 1.0)


def test_one_heavy_token_has_the_sample_size_of_one():
    weights = jnp.array([[1e4, 1e-4, 1e-4, 1e-4]])
    close.assert_near(correction.effective_sample_fraction(weights, jnp.ones((1, 4), bool)), 0.25)


@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_far_apart_policies_stay_finite(shift):
    old, _, mask = ARRAYS
    for level in correction.LEVELS:
        assert np.isfinite(correction.mismatch_ratio(old + shift, old, mask, level=level)).all()


def test_untruncated_weights_make_the_gradient_that_of_the_policy():
    """Enumerated: sampling from mu with weights pi/mu gives E_pi[A grad log pi] exactly."""
    logits, sampler = jnp.array([0.3, -0.2, 0.9]), jnp.array([1.0, 0.1, -0.4])
    advantages, mask = jnp.array([[1.0], [-2.0], [0.5]]), jnp.ones((3, 1), bool)
    mu, pi = jax.nn.log_softmax(sampler)[:, None], jax.nn.log_softmax(logits)[:, None]
    weights = correction.mismatch_ratio(pi, mu, mask)

    def loss(x, weights):
        return -jnp.sum(jnp.exp(mu) * weights * advantages * jax.nn.log_softmax(x)[:, None])

    want = jax.grad(lambda x: -jnp.sum(jax.nn.softmax(x)[:, None] * advantages))(logits)
    close.assert_near(jax.grad(loss)(logits, weights), want)
    assert np.abs(np.asarray(jax.grad(loss)(logits, jnp.ones((3, 1))) - want)).max() > 0.05


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: correction.truncated_weights(ARRAYS[0], ARRAYS[2], cap=0.0), "cap=0.0"),
        (lambda: correction.masked_weights(ARRAYS[0], ARRAYS[2], low=2.0, high=0.5), "low=2.0"),
        (lambda: correction.mismatch_ratio(*ARRAYS, level="batch"), "level='batch'"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
