"""Trap 9, KL estimators: what is logged has no gradient; what is differentiated has the gradient that it names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import kl
from tests import close

LOGITS, REFERENCE, BEHAVIOUR = jnp.array([0.9, -0.3, 0.2, -1.0]), jnp.array([0.1, 0.4, -0.6, 0.3]), jnp.zeros(4)
N = 200_000


def _draw(logits):
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    return jnp.asarray(np.random.default_rng(0).choice(4, N, p=p / p.sum()), jnp.int32)


def _logp(logits, tokens):
    return jax.nn.log_softmax(logits)[tokens][:, None]


def _monte_carlo(terms, tokens):
    return np.asarray(jax.grad(lambda x: terms(_logp(x, tokens)).mean())(LOGITS))


def _deviation(terms, tokens):
    """Of one draw: the gradient of each token's term, by the number of times that it was drawn."""
    one = jnp.arange(4, dtype=jnp.int32)
    slopes = np.asarray(jax.jacobian(lambda x: terms(_logp(x, one), one)[:, 0])(LOGITS), np.float64)
    share = np.bincount(np.asarray(tokens), minlength=4) / N
    return np.sqrt(share @ (slopes - share @ slopes) ** 2)


def _analytic(direction):
    def value(x):
        p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(REFERENCE)
        return jnp.sum(jnp.exp(p) * (p - q)) if direction == "reverse" else jnp.sum(jnp.exp(q) * (q - p))

    return np.asarray(jax.grad(value)(LOGITS))


MASK = jnp.ones((N, 1), bool)


def _estimates(got, terms, tokens, direction):
    close.assert_mean(got, _analytic(direction), _deviation(terms, tokens), N)


def test_on_policy_the_gradient_terms_descend_the_reverse_kl():
    tokens = _draw(LOGITS)

    def terms(logp, tokens):
        return kl.kl_gradient_terms(logp, _logp(REFERENCE, tokens), MASK[: len(tokens)])

    got = _monte_carlo(lambda logp: terms(logp, tokens), tokens)
    _estimates(got, terms, tokens, "reverse")
    assert np.abs(_analytic("reverse")).max() > 0.1


def test_off_policy_the_weight_is_needed():
    tokens = _draw(BEHAVIOUR)

    def terms(logp, tokens):
        args = (_logp(BEHAVIOUR, tokens), _logp(REFERENCE, tokens), MASK[: len(tokens)])
        return kl.weighted_kl_gradient_terms(logp, *args)

    weighted = _monte_carlo(lambda logp: terms(logp, tokens), tokens)
    _estimates(weighted, terms, tokens, "reverse")
    plain = _monte_carlo(lambda logp: kl.kl_gradient_terms(logp, _logp(REFERENCE, tokens), MASK), tokens)
    assert np.abs(plain - _analytic("reverse")).max() > 0.05


def test_k3_in_the_loss_is_another_divergence_and_its_name_says_so():
    tokens = _draw(LOGITS)

    def terms(logp, tokens):
        return kl.k3_gradient_terms(logp, _logp(REFERENCE, tokens), MASK[: len(tokens)])

    got = _monte_carlo(lambda logp: terms(logp, tokens), tokens)
    _estimates(got, terms, tokens, "forward")
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
        found = value(_logp(LOGITS, tokens), _logp(REFERENCE, tokens), MASK)
        close.assert_mean(found.mean(), exact, found.std(), N)
