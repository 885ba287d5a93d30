"""Covariance mechanisms and entropy terms: float64 loop, known definitions, gradient facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.losses import entropy
from tests import close
from tests.reference import losses as reference

LOGP = jnp.array([[-0.8, -0.9, -2.1, -0.1], [-1.5, -1.2, -0.35, -1.0]])
OLD = jnp.array([[-1.2, -0.7, -2.0, -0.4], [-0.9, -1.6, -0.3, -2.2]])
ADVANTAGES = jnp.array([[1.5] * 4, [-0.5] * 4])
MASK = jnp.array([[True, True, True, False], [True, True, True, True]])
NOISE = jnp.array([[0.9, 0.1, 0.3, 0.0], [0.5, 0.6, 0.7, 0.8]])
NAN = [jnp.where(MASK, x, jnp.nan) for x in (LOGP, OLD, ADVANTAGES)]


def test_covariance_against_float64():
    got = entropy.token_covariance(NAN[0], NAN[2], MASK)
    want = reference.covariance(np.asarray(LOGP, np.float64), np.asarray(ADVANTAGES, np.float64), np.asarray(MASK))
    close.assert_near(got, want)
    # as verl computes it
    verl = [[0.367347, 0.253061, -1.118367, 0.0], [0.32449, 0.067347, -0.661224, -0.104082]]
    close.assert_printed(got, verl, 6)


def _value_and_gradient(loss):
    def total(x):
        terms = loss(x)
        return reduce.tokens(terms.loss, MASK), terms

    (value, terms), gradient = jax.value_and_grad(total, has_aux=True)(NAN[0])
    return float(value), gradient, terms


def test_kl_cov_loss_as_verl_defines_it():
    value, gradient, terms = _value_and_gradient(
        lambda x: entropy.kl_cov_loss(x, NAN[1], NAN[2], MASK, fraction=0.3, coefficient=0.5)
    )
    # compute_policy_loss_kl_cov of verl with kl_cov_ratio 0.3 (the 2 largest of 7) and ppo_kl_coef 0.5, token-mean
    close.assert_printed(value, -0.1667283, 7)
    want = [[-0.248248, -0.175442, -0.193894, 0.0], [-0.032228, 0.106559, 0.067945, 0.237151]]
    close.assert_printed(gradient, want, 6)
    assert terms.aux["penalised"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_clip_cov_loss_as_verl_defines_it():
    """With the window [0.1, 5] only the second token is inside: the other high ones are clipped by PPO already."""
    value, gradient, terms = _value_and_gradient(
        lambda x: entropy.clip_cov_loss(x, NAN[1], NAN[2], MASK, NOISE, clip_high=0.28, fraction=0.9, low=0.1)
    )
    # compute_policy_loss_clip_cov of verl with clip_cov_ratio 0.9, bounds 0.1 and 5, clip 0.2 and 0.28
    close.assert_printed(value, 0.0006185, 7)
    want = [[0.0, 0.0, -0.193894, 0.0], [0.0, 0.106559, 0.067945, 0.237151]]
    close.assert_printed(gradient, want, 6)
    assert terms.aux["dropped"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert terms.aux["clipped"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_clip_cov_draws_at_most_its_fraction():
    cov = jnp.where(MASK, 2.0, 2.0)
    for fraction, dropped in ((1e-6, 1), (0.3, 2), (1.0, 7)):
        keep = entropy.clip_cov_keep(cov, MASK, NOISE, fraction=fraction)
        assert int(jnp.sum(MASK & ~keep)) == dropped and not bool(keep[0, 3])
    assert entropy.clip_cov_keep(jnp.zeros((2, 4)), MASK, NOISE).tolist() == MASK.tolist()


LOSSES = {
    "clip_cov": lambda x, o, a: entropy.clip_cov_loss(x, o, a, MASK, NOISE, fraction=0.3, low=0.1),
    "kl_cov": lambda x, o, a: entropy.kl_cov_loss(x, o, a, MASK, fraction=0.3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_mask_anchors_dtype_and_jit(name):
    clean, dirty = LOSSES[name](LOGP, OLD, ADVANTAGES), LOSSES[name](*NAN)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    gradients = jax.grad(lambda *a: LOSSES[name](*a).loss.sum(), (0, 1, 2))(*NAN)
    assert np.isfinite(gradients[0]).all() and gradients[0][0, 3] == 0
    assert not np.asarray(gradients[1]).any() and not np.asarray(gradients[2]).any()
    assert LOSSES[name](*(x.astype(jnp.bfloat16) for x in (LOGP, OLD, ADVANTAGES))).loss.dtype == jnp.float32
    jax.tree.map(lambda a, b: close.assert_near(a, b), clean, jax.jit(LOSSES[name])(LOGP, OLD, ADVANTAGES))
    for shift in (-50.0, 50.0):
        terms = LOSSES[name](OLD + shift, OLD, ADVANTAGES)
        assert np.isfinite(terms.loss).all()


def test_at_ratio_one_kl_cov_is_the_policy_gradient_and_clip_cov_lacks_the_dropped_tokens():
    gradient = jax.grad(lambda x: LOSSES["kl_cov"](x, OLD, ADVANTAGES).loss.sum())(OLD)
    close.assert_near(gradient, jnp.where(MASK, -ADVANTAGES, 0.0))
    terms = LOSSES["clip_cov"](OLD, OLD, ADVANTAGES)
    gradient = jax.grad(lambda x: LOSSES["clip_cov"](x, OLD, ADVANTAGES).loss.sum())(OLD)
    kept = MASK & (terms.aux["dropped"] == 0)
    close.assert_near(gradient, jnp.where(kept, -ADVANTAGES, 0.0))
    assert 0 < float(terms.aux["dropped"].sum()) <= 2


def test_bonus_from_logits_has_the_analytic_gradient():
    """dH/dz_k = -p_k (log p_k + H)."""
    logits = jnp.array([[[0.4, -0.3, 1.1], [0.0, 0.0, 0.0]]])
    mask = jnp.array([[False, True]])

    def loss(x):
        return jnp.sum(entropy.entropy_bonus_terms(logprobs.token_entropy(x), mask))

    logp = jax.nn.log_softmax(logits[0, 0])
    h = -jnp.sum(jnp.exp(logp) * logp)
    close.assert_near(jax.grad(loss)(logits)[0, 0], jnp.exp(logp) * (logp + h))
    assert not np.asarray(jax.grad(loss)(logits)[0, 1]).any()


def test_bonus_is_float32_and_the_sampled_value_has_no_gradient():
    assert entropy.entropy_bonus_terms(jnp.ones((2, 4), jnp.bfloat16), MASK).dtype == jnp.float32
    assert not np.asarray(jax.grad(lambda x: entropy.sampled_entropy(x, MASK).sum())(NAN[0])).any()
    np.testing.assert_array_equal(entropy.sampled_entropy(NAN[0], MASK), jnp.where(MASK, -LOGP, 0.0))
