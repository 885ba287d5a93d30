"""Corrections, entropy mechanisms, value losses, shaping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import correction, entropy, value
from jaxrl_llm.rewards import shaping
from tests import close
from tests.close import doubles

MASK = jnp.array([[True, True, False], [True, True, True]])
OLD = jnp.log(jnp.array([[0.4, 0.2, 0.1], [0.1, 0.3, 0.2]]))
SAMPLER = jnp.log(jnp.array([[0.2, 0.4, 0.5], [0.4, 0.3, 0.1]]))


def test_mismatch_levels_by_hand():
    nan = jnp.where(MASK, SAMPLER, jnp.nan)
    token = correction.mismatch_ratio(OLD, nan, MASK)
    close.assert_near(token, [[2, 0.5, 0], [0.25, 1, 2]])
    product = correction.mismatch_ratio(OLD, nan, MASK, level="sequence")
    close.assert_near(product, [[1, 1, 0], [0.5, 0.5, 0.5]])
    mean = correction.mismatch_ratio(OLD, nan, MASK, level="geometric")
    close.assert_near(mean, [[1, 1, 0], [0.5 ** (1 / 3)] * 3])
    close.assert_near(correction.truncated_weights(token, MASK, cap=1.5), [[1.5, 0.5, 0], [0.25, 1, 1.5]])
    close.assert_near(correction.masked_weights(token, MASK, low=0.4, high=1.9), [[0, 0.5, 0], [0, 1, 0]])
    assert float(correction.effective_sample_fraction(jnp.ones((2, 3)), MASK)) == doubles(1.0)
    assert not np.asarray(jax.grad(lambda x: correction.mismatch_ratio(x, SAMPLER, MASK).sum())(OLD)).any()
    with pytest.raises(ValueError, match="geometric"):
        correction.mismatch_ratio(OLD, SAMPLER, MASK, level="row")


def test_packed_correction_equals_unpacked():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(-rng.random((4, 3)), jnp.float32) for _ in range(2))
    mask = jnp.ones((4, 3), bool)
    segments = jnp.tile(jnp.array([[1, 1, 1, 2, 2, 2]]), (2, 1))
    for level in correction.LEVELS:
        want = correction.mismatch_ratio(a, b, mask, level=level)
        got = correction.mismatch_ratio(
            a.reshape(2, 6), b.reshape(2, 6), mask.reshape(2, 6), level=level, segment_ids=segments
        )
        close.assert_near(got.reshape(4, 3), want)


def test_covariance_selects_the_extreme_tokens():
    logp = jnp.array([[-1.0, -3.0, -2.0, -2.0]])
    advantages = jnp.array([[2.0, -2.0, 0.0, jnp.nan]])
    mask = jnp.array([[True, True, True, False]])
    cov = entropy.token_covariance(logp, advantages, mask)
    close.assert_near(cov, [[2.0, 2.0, 0.0, 0.0]])
    noise = jnp.array([[0.9, 0.1, 0.0, 0.0]])
    keep = entropy.clip_cov_keep(cov, mask, noise, fraction=0.34, low=1.0, high=5.0)
    assert keep.tolist() == [[True, False, True, False]]  # one of the two inside, the one with the lower noise
    top = entropy.kl_cov_select(cov * jnp.array([[1.0, 2.0, 1.0, 1.0]]), mask, fraction=0.34)
    assert top.tolist() == [[False, True, False, False]]


def test_entropy_terms():
    bonus = entropy.entropy_bonus_terms(jnp.array([[0.5, jnp.nan]]), jnp.array([[True, False]]))
    assert bonus.tolist() == [[-0.5, 0.0]]
    # enumerated: the expectation of -logp under the distribution is its entropy
    p = jnp.array([[0.5, 0.3, 0.2]])
    estimate = jnp.sum(p * entropy.sampled_entropy(jnp.log(p), jnp.ones((1, 3), bool)))
    close.assert_near(estimate, -jnp.sum(p * jnp.log(p)))


def test_value_losses_by_hand():
    values, old, target = jnp.array([[1.0, jnp.nan]]), jnp.array([[0.0, 0.0]]), jnp.array([[3.0, jnp.nan]])
    mask = jnp.array([[True, False]])
    assert value.squared_value_loss(values, target, mask).loss.tolist() == [[2.0, 0.0]]
    # near = 0 + clip(1, 0.2) = 0.2: (0.2 - 3)^2 / 2 = 3.92 is larger than 2
    terms = value.clipped_value_loss(values, old, target, mask, clip=0.2)
    close.assert_near(terms.loss, [[3.92, 0.0]])
    assert terms.aux["value_clipped"].tolist() == [[1.0, 0.0]]
    gradient = jax.grad(lambda v: value.squared_value_loss(v, target, mask).loss.sum())(values)
    assert gradient.tolist() == [[-2.0, 0.0]]


def test_two_hot_has_the_target_as_mean():
    targets = jnp.array([[-1.0, 0.3, 0.5, 9.0]])
    weights = value.two_hot(targets, low=-1.0, high=1.0, bins=5)
    close.assert_near(weights.sum(-1), 1.0)
    centres = jnp.linspace(-1.0, 1.0, 5)
    close.assert_near((weights * centres[None, None, :]).sum(-1), [[-1.0, 0.3, 0.5, 1.0]])
    logits = jnp.log(weights + 1e-9)
    terms = value.categorical_value_loss(logits, targets, jnp.ones((1, 4), bool), low=-1.0, high=1.0)
    best = -(weights * jax.nn.log_softmax(logits)).sum(-1)
    close.assert_near(terms.loss, best)


def test_length_shaping_by_hand():
    lengths = jnp.array([10, 20, 30])
    right = jnp.array([True, False, False])
    got = shaping.length_reward(lengths, right, jnp.full(3, 10.0), jnp.full(3, 30.0))
    np.testing.assert_array_equal(got, [0.5, 0.0, -0.5])
    got = shaping.cosine_length_reward(
        jnp.array([0, 100, 0, 100]), jnp.array([True, True, False, False]), limit_tokens=100
    )
    close.assert_near(got, [2, 1, -10, 0])
    asked = jnp.array([10, 25, 10])
    assert shaping.target_length_penalty(lengths, asked, weight=0.5).tolist() == [0.0, -2.5, -10.0]
    some, ids = jnp.array([True, True, False, False]), jnp.array([0, 0, 0, 1])
    low, high = shaping.group_extremes(jnp.array([-3.0, -1.0, 5.0, 7.0]), ids, valid=some)
    assert low.tolist() == [-3.0, -3.0, -3.0, 0.0] and high.tolist() == [-1.0, -1.0, -1.0, 0.0]
    assert shaping.clipped_rewards(jnp.array([-3.0, 0.5]), low=-1.0, high=1.0).tolist() == [-1.0, 0.5]
    with pytest.raises(ValueError, match="buffer_tokens=30"):
        shaping.overlong_penalty(lengths, limit_tokens=20, buffer_tokens=30)


def test_running_moments_are_those_of_all_rewards_at_once():
    """1, 3, 5 and 7 in two batches: mean 4, squares 9 + 1 + 1 + 9; what is invalid is in none."""
    moments = shaping.add_rewards(shaping.no_moments(), jnp.array([1.0, 3.0]))
    some = jnp.array([True, False, True])
    moments = shaping.add_rewards(moments, jnp.array([5.0, 99.0, 7.0]), valid=some)
    assert [float(x) for x in moments] == [4.0, 4.0, 20.0]
    assert shaping.add_rewards(moments, jnp.array([9.0]), valid=jnp.array([False])) == moments
