"""KL values against a float64 loop; the gradient each differentiable form has, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import kl
from tests import close
from tests.close import doubles
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
    close.assert_printed(got, LITERAL[name], 6)
    a, b = np.asarray(LOGP, np.float64), np.asarray(REF, np.float64)
    want = reference.each(np.asarray(MASK), lambda i, t: reference.KL[name](a[i, t] - b[i, t]))
    close.assert_near(got, want)
    assert not np.asarray(VALUES[name](LOGP, LOGP, MASK)).any()


def test_gradients_token_by_token():
    def gradient(terms):
        return jax.grad(lambda x: terms(x).sum())(LOGP)

    d = np.where(MASK, LOGP - REF, 0.0)
    # verl's "k3+" form has this gradient too: [[0.4, -0.2, -0.1, 0], [-0.6, 0.4, -0.05, 1.2]]
    close.assert_near(gradient(lambda x: kl.kl_gradient_terms(x, REF, MASK)), d)
    # verl's k3 in the loss: 1 - e^-d = 0.32968, -0.221403, -0.105171; -0.822119, 0.32968, -0.051271, 0.698806
    want = [[0.32968, -0.221403, -0.105171, 0], [-0.822119, 0.32968, -0.051271, 0.698806]]
    close.assert_printed(gradient(lambda x: kl.k3_gradient_terms(x, REF, MASK)), want, 6)
    old = LOGP - math.log(2.0)  # every token is now twice as likely as when it was drawn
    got = gradient(lambda x: kl.weighted_kl_gradient_terms(x, old, REF, MASK))
    close.assert_near(got, 2 * d)


FORMS = {
    "k1": lambda x, old, ref, mask: kl.k1_gradient_terms(x, ref, mask),
    "corrected_k3": kl.corrected_k3_gradient_terms,
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
    close.assert_near(got, [[-0.2, 0.1, 1.05, 0.0], [0.3, -0.2, 0.025, 1.4]])
    assert not np.asarray(
        jax.grad(lambda x: kl.kl_in_reward(jnp.zeros((2, 4)), x, REF, MASK, coefficient=0.5).sum())(LOGP)
    ).any()


@pytest.mark.parametrize("distance", [-60.0, 60.0])
def test_values_do_not_saturate(distance):
    """Nothing of k1, k2 and the distance can overflow: 60 nats are 60 nats. k3 is held only in its exponential."""
    logp, ref, mask = jnp.array([[distance - 70.0]]), jnp.array([[-70.0]]), jnp.ones((1, 1), bool)
    want = {"k1": distance, "k2": distance**2 / 2, "absolute": 60.0, "k3": distance - 1 + math.exp(min(-distance, 20))}
    for name, value in want.items():
        close.assert_relative(VALUES[name](logp, ref, mask)[0, 0], value, err_msg=name)
    paid = kl.kl_in_reward(jnp.zeros((1, 1)), logp, ref, mask, coefficient=0.5)
    assert float(paid[0, 0]) == doubles(-distance / 2)


# a policy of five tokens, enumerated: expectations are exact sums, no samples
POLICY = jnp.array([0.9, -0.3, 0.2, -1.0, 0.0])
REFERENCE = jnp.array([0.1, 0.4, -0.6, 0.3, -1.5])
BEHAVIOUR = jnp.array([-0.2, 0.8, 0.0, 0.5, 0.3])
ONES = jnp.ones((1, 5), bool)


def _expected_gradient(terms, behaviour):
    """Gradient by the logits of ``sum_a behaviour(a) terms(a)``, the sampling probabilities held."""
    chance = jax.nn.softmax(behaviour)
    old, ref = (jax.nn.log_softmax(x)[None] for x in (behaviour, REFERENCE))
    return jax.grad(lambda x: jnp.sum(chance * terms(jax.nn.log_softmax(x)[None], old, ref)[0]))(POLICY)


def _divergence(x, y):
    p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
    return jnp.sum(jnp.exp(p) * (p - q))


REVERSE = jax.grad(lambda x: _divergence(x, REFERENCE))(POLICY)
FORWARD = jax.grad(lambda x: _divergence(REFERENCE, x))(POLICY)
GRADIENT_TERMS = {  # terms, what they descend on-policy, whether they do so off-policy too
    "k1": (lambda x, old, ref: kl.k1_gradient_terms(x, ref, ONES), REVERSE, False),
    "k2": (lambda x, old, ref: kl.kl_gradient_terms(x, ref, ONES), REVERSE, False),
    "k3": (lambda x, old, ref: kl.k3_gradient_terms(x, ref, ONES), FORWARD, False),
    "weighted": (lambda x, old, ref: kl.weighted_kl_gradient_terms(x, old, ref, ONES), REVERSE, True),
    "corrected_k3": (lambda x, old, ref: kl.corrected_k3_gradient_terms(x, old, ref, ONES), REVERSE, True),
}


@pytest.mark.parametrize("name", GRADIENT_TERMS)
def test_expected_gradients_on_an_enumerated_policy(name):
    terms, wanted, off_policy = GRADIENT_TERMS[name]
    close.assert_near(_expected_gradient(terms, POLICY), wanted)
    assert np.abs(REVERSE - FORWARD).max() > 0.05 and np.abs(REVERSE).max() > 0.1
    away = np.abs(_expected_gradient(terms, BEHAVIOUR) - REVERSE).max()
    assert away <= close.near(REVERSE, REVERSE) if off_policy else away > 0.02


def test_k1_in_a_loss_has_no_expected_gradient():
    """Why the values stop their gradients and the terms have names of their own."""
    naive = _expected_gradient(lambda x, old, ref: x - ref, POLICY)
    close.assert_near(naive, 0.0)
    for value in (kl.k1, kl.k2, kl.k3, kl.absolute):
        assert not np.asarray(_expected_gradient(lambda x, old, ref, v=value: v(x, ref, ONES), POLICY)).any()


def test_the_corrected_k3_is_an_unbiased_value_off_policy_and_shares_the_weighted_gradient():
    chance, x = jax.nn.softmax(BEHAVIOUR), jax.nn.log_softmax(POLICY)[None]
    old, ref = (jax.nn.log_softmax(y)[None] for y in (BEHAVIOUR, REFERENCE))
    value = jnp.sum(chance * kl.corrected_k3_gradient_terms(x, old, ref, ONES)[0])
    close.assert_near(value, _divergence(POLICY, REFERENCE))
    slopes = [
        jax.grad(lambda y, f=f: f(y, old, ref, ONES).sum())(x)
        for f in (kl.corrected_k3_gradient_terms, kl.weighted_kl_gradient_terms)
    ]
    close.assert_relative(*slopes)
    # the loop: rho k3 at each token, as TRL multiplies per_token_kl by coef_1
    a, b, c = (np.asarray(z, np.float64)[0] for z in (x, old, ref))
    want = [math.exp(p - q) * reference.KL["k3"](p - r) for p, q, r in zip(a, b, c, strict=True)]
    close.assert_relative(kl.corrected_k3_gradient_terms(x, old, ref, ONES)[0], want)


def test_the_corrected_k3_keeps_its_digits_close_to_the_reference():
    """``exp(-d) - 1 + d`` in float32 is 5.96e-8 or 0 there, and negative for some of the tokens."""
    for d, want in {1e-3: 4.9983337e-7, 1e-4: 4.9998333e-9, -1e-4: 5.0001667e-9}.items():
        x = jnp.array([[0.0]])
        got = kl.corrected_k3_gradient_terms(x, x, x - d, ONES[:1, :1])
        close.assert_near(got / d**2, [[want / d**2]], magnitude=1 / abs(d))  # rounded like d, not like 1
    rng = np.random.default_rng(0)
    x, moved = (jnp.asarray(y, jnp.float32)[None] for y in (-rng.random(4000), 1e-4 * rng.normal(size=4000)))
    assert (np.asarray(kl.corrected_k3_gradient_terms(x, x, x + moved, x < 1)) >= 0).all()


def test_the_adaptive_coefficient():
    """OpenRLHF and verl: 0.2 (1 + clip(12 / 6 - 1, -0.2, 0.2) * 256 / 10000) and so on, by hand."""
    step = {"target": 6.0, "horizon": 10000.0, "steps": 256.0}
    for seen, want in {12.0: 0.201024, 6.0: 0.2, 6.6: 0.200512, 0.0: 0.198976}.items():
        got = kl.adapted_kl_coefficient(jnp.float32(0.2), jnp.float32(seen), **step)
        close.assert_printed(got, want, 6)
    for bad in ({"target": 0.0}, {"horizon": -1.0}, {"steps": 60000.0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            kl.adapted_kl_coefficient(jnp.float32(0.2), jnp.float32(1.0), **(step | bad))
