"""Trap 9, KL estimators: what is logged has no gradient; what is differentiated has the gradient that it names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import kl

LOGITS, REFERENCE, BEHAVIOUR = jnp.array([0.9, -0.3, 0.2, -1.0]), jnp.array([0.1, 0.4, -0.6, 0.3]), jnp.zeros(4)
N = 200_000


def _draw(logits):
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    return jnp.asarray(np.random.default_rng(0).choice(4, N, p=p / p.sum()), jnp.int32)


def _logp(logits, tokens):
    return jax.nn.log_softmax(logits)[tokens][:, None]


def _monte_carlo(terms, tokens):
    return np.asarray(jax.grad(lambda x: terms(_logp(x, tokens)).mean())(LOGITS))


def _analytic(direction):
    def value(x):
        p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(REFERENCE)
        return jnp.sum(jnp.exp(p) * (p - q)) if direction == "reverse" else jnp.sum(jnp.exp(q) * (q - p))

    return np.asarray(jax.grad(value)(LOGITS))


MASK = jnp.ones((N, 1), bool)


def test_on_policy_the_gradient_terms_descend_the_reverse_kl():
    tokens = _draw(LOGITS)
    got = _monte_carlo(lambda logp: kl.kl_gradient_terms(logp, _logp(REFERENCE, tokens), MASK), tokens)
    np.testing.assert_allclose(got, _analytic("reverse"), atol=0.01)
    assert np.abs(_analytic("reverse")).max() > 0.1


def test_off_policy_the_weight_is_needed():
    tokens = _draw(BEHAVIOUR)
    args = (_logp(REFERENCE, tokens), MASK)
    old = _logp(BEHAVIOUR, tokens)
    weighted = _monte_carlo(lambda logp: kl.weighted_kl_gradient_terms(logp, old, *args), tokens)
    np.testing.assert_allclose(weighted, _analytic("reverse"), atol=0.01)
    plain = _monte_carlo(lambda logp: kl.kl_gradient_terms(logp, *args), tokens)
    assert np.abs(plain - _analytic("reverse")).max() > 0.05


def test_k3_in_the_loss_is_another_divergence_and_its_name_says_so():
    tokens = _draw(LOGITS)
    got = _monte_carlo(lambda logp: kl.k3_gradient_terms(logp, _logp(REFERENCE, tokens), MASK), tokens)
    np.testing.assert_allclose(got, _analytic("forward"), atol=0.02)
    assert np.abs(got - _analytic("reverse")).max() > 0.05


@pytest.mark.parametrize("value", [kl.k1, kl.k2, kl.k3, kl.absolute])
def test_a_value_estimator_in_a_loss_trains_nothing(value):
    tokens = _draw(LOGITS)
    assert not _monte_carlo(lambda logp: value(logp, _logp(REFERENCE, tokens), MASK), tokens).any()


def test_the_values_estimate_the_kl():
    tokens = _draw(LOGITS)
    p, q = jax.nn.log_softmax(LOGITS), jax.nn.log_softmax(REFERENCE)
    exact = float(jnp.sum(jnp.exp(p) * (p - q)))
    for value in (kl.k1, kl.k3):
        got = float(value(_logp(LOGITS, tokens), _logp(REFERENCE, tokens), MASK).mean())
        assert got == pytest.approx(exact, abs=0.01)
