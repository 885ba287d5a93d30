"""KL values against a float64 loop; the gradient each differentiable form has, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import kl
from tests.reference import losses as reference

# log ratios 0.4 -0.2 -0.1 (masked 0.3) and -0.6 0.4 -0.05 1.2
LOGP = jnp.array([[-0.8, -0.9, -2.1, -0.1], [-1.5, -1.2, -0.35, -1.0]])
REF = jnp.array([[-1.2, -0.7, -2.0, -0.4], [-0.9, -1.6, -0.3, -2.2]])
MASK = jnp.array([[True, True, True, False], [True, True, True, True]])
VALUES = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "absolute": kl.absolute}
# what verl's kl_penalty (k1, k2, k3, abs) returns for these numbers
LITERAL = {
    "k1": [[0.4, -0.2, -0.1, 0], [-0.6, 0.4, -0.05, 1.2]],
    "k2": [[0.08, 0.02, 0.005, 0], [0.18, 0.08, 0.00125, 0.72]],
    "k3": [[0.07032, 0.021403, 0.005171, 0], [0.222119, 0.07032, 0.001271, 0.501194]],
    "absolute": [[0.4, 0.2, 0.1, 0], [0.6, 0.4, 0.05, 1.2]],
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    got = VALUES[name](LOGP, jnp.where(MASK, REF, jnp.nan), MASK)
    np.testing.assert_allclose(got, LITERAL[name], atol=2e-6)
    a, b = np.asarray(LOGP, np.float64), np.asarray(REF, np.float64)
    want = reference.each(np.asarray(MASK), lambda i, t: reference.KL[name](a[i, t] - b[i, t]))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert not np.asarray(VALUES[name](LOGP, LOGP, MASK)).any()


def test_gradients_token_by_token():
    def gradient(terms):
        return jax.grad(lambda x: terms(x).sum())(LOGP)

    d = np.where(MASK, LOGP - REF, 0.0)
    # verl's "k3+" form has this gradient too: [[0.4, -0.2, -0.1, 0], [-0.6, 0.4, -0.05, 1.2]]
    np.testing.assert_allclose(gradient(lambda x: kl.kl_gradient_terms(x, REF, MASK)), d, atol=1e-6)
    # verl's k3 in the loss: 1 - e^-d = 0.32968, -0.221403, -0.105171; -0.822119, 0.32968, -0.051271, 0.698806
    want = [[0.32968, -0.221403, -0.105171, 0], [-0.822119, 0.32968, -0.051271, 0.698806]]
    np.testing.assert_allclose(gradient(lambda x: kl.k3_gradient_terms(x, REF, MASK)), want, atol=2e-6)
    old = LOGP - math.log(2.0)  # every token is now twice as likely as when it was drawn
    got = gradient(lambda x: kl.weighted_kl_gradient_terms(x, old, REF, MASK))
    np.testing.assert_allclose(got, 2 * d, atol=1e-6)


FORMS = {
    "k2": lambda x, old, ref, mask: kl.kl_gradient_terms(x, ref, mask),
    "k3": lambda x, old, ref, mask: kl.k3_gradient_terms(x, ref, mask),
    "weighted": kl.weighted_kl_gradient_terms,
}


@pytest.mark.parametrize("name", FORMS)
def test_no_gradient_into_the_anchors_and_none_outside_the_mask(name):
    nan = [jnp.where(MASK, x, jnp.nan) for x in (LOGP, LOGP - 0.1, REF)]
    gradients = jax.grad(lambda *a: FORMS[name](*a, MASK).sum(), (0, 1, 2))(*nan)
    assert np.isfinite(gradients[0]).all() and gradients[0][0, 3] == 0
    assert not np.asarray(gradients[1]).any() and not np.asarray(gradients[2]).any()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("distance", [-50.0, 50.0])
def test_a_token_far_from_the_reference_is_still_pulled_back(name, distance):
    """A clamp of the log ratio would make the penalty flat exactly where it is needed."""
    far = REF + distance
    value, gradient = jax.value_and_grad(lambda x: FORMS[name](x, far, REF, MASK).sum())(far)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    inside = np.asarray(gradient)[np.asarray(MASK)]
    assert (np.sign(distance) * inside > 0).all()


def test_in_the_reward():
    rewards = jnp.array([[0.0, 0.0, 1.0, jnp.nan], [0.0, 0.0, 0.0, 2.0]])
    got = kl.kl_in_reward(rewards, LOGP, REF, MASK, coefficient=0.5)
    np.testing.assert_allclose(got, [[-0.2, 0.1, 1.05, 0.0], [0.3, -0.2, 0.025, 1.4]], atol=1e-6)
    assert not np.asarray(
        jax.grad(lambda x: kl.kl_in_reward(jnp.zeros((2, 4)), x, REF, MASK, coefficient=0.5).sum())(LOGP)
    ).any()
