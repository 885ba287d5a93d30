"""Preference, reward, distillation and supervised losses: worked numbers, float64 forms, gradient facts, contract."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import distill, reward, supervised
from jaxrl_llm.losses import preference as pref
from tests import close
from tests.close import doubles, singles


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def odds(p):
    return p - math.log1p(-math.exp(p))


# (function, options, float64 form of one pair)
WITH_REFERENCE = {
    "dpo": (pref.dpo_loss, {"beta": 0.3}, lambda w, y, rw, ry: -log_sigmoid(0.3 * (w - rw - y + ry))),
    "cdpo": (
        pref.dpo_loss,
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda w, y, rw, ry: -0.9 * log_sigmoid(0.3 * (w - rw - y + ry)) - 0.1 * log_sigmoid(-0.3 * (w - rw - y + ry)),
    ),
    "robust": (
        pref.robust_dpo_loss,
        {"beta": 0.3, "flip_rate": 0.2},
        lambda w, y, rw, ry: (
            -(0.8 * log_sigmoid(0.3 * (w - rw - y + ry)) - 0.2 * log_sigmoid(-0.3 * (w - rw - y + ry))) / 0.6
        ),
    ),
    "hinge": (pref.hinge_loss, {"beta": 0.1}, lambda w, y, rw, ry: max(0.0, 1 - 0.1 * (w - rw - y + ry))),
    "ipo": (pref.ipo_loss, {"tau": 0.5}, lambda w, y, rw, ry: (w - rw - y + ry - 1) ** 2),
    "apo_zero": (
        pref.apo_zero_loss,
        {"beta": 0.3},
        lambda w, y, rw, ry: 1 - sigmoid(0.3 * (w - rw)) + sigmoid(0.3 * (y - ry)),
    ),
    "apo_down": (
        pref.apo_down_loss,
        {"beta": 0.3},
        lambda w, y, rw, ry: sigmoid(0.3 * (w - rw)) + 1 - sigmoid(0.3 * (w - rw - y + ry)),
    ),
    "rpo": (
        pref.rpo_loss,
        {"beta": 0.3, "eta": 0.2},
        lambda w, y, rw, ry: -log_sigmoid(0.3 * (w - rw - y + ry)) - 0.06 * w,
    ),
}
WITHOUT = {
    "orpo": (pref.orpo_loss, {"weight": 0.2}, lambda w, y: -w - 0.2 * log_sigmoid(odds(w) - odds(y))),
    "simpo": (pref.simpo_loss, {"beta": 2.0, "gamma": 0.5}, lambda w, y: -log_sigmoid(2 * (w - y) - 0.5)),
    "cpo": (pref.cpo_loss, {"beta": 0.3}, lambda w, y: -log_sigmoid(0.3 * (w - y)) - w),
    "bradley_terry": (reward.bradley_terry_loss, {}, lambda w, y: -log_sigmoid(w - y)),
    "centred": (
        reward.bradley_terry_loss,
        {"centering": 0.1},
        lambda w, y: -log_sigmoid(w - y) + 0.1 * (w + y) ** 2,
    ),
}
ALL = WITH_REFERENCE | WITHOUT


def _case(name, n=6):
    rng = np.random.default_rng(0)
    return [-0.2 - 3 * rng.random(n) for _ in range(4 if name in WITH_REFERENCE else 2)]


def _jax(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("name", ALL)
def test_against_float64(name):
    function, options, form = ALL[name]
    want = [form(*row) for row in zip(*_case(name), strict=True)]
    close.assert_near(function(*_jax(_case(name)), **options).loss, want)


@pytest.mark.parametrize("name", ALL)
def test_contract(name):
    function, options, _ = ALL[name]
    args = _jax(_case(name))
    terms = function(*args, **options)
    order = np.random.default_rng(1).permutation(6)
    close.assert_near(function(*(x[order] for x in args), **options).loss, terms.loss[order])
    assert function(*(x.astype(jnp.bfloat16) for x in args), **options).loss.dtype == jnp.float32
    jitted = jax.jit(lambda *a: function(*a, **options))(*args)
    close.assert_near(jitted.loss, terms.loss)
    np.testing.assert_array_equal(terms.aux["accuracy"], (terms.aux["margin"] > 0).astype(jnp.float32))
    for far in (-80.0, 80.0):
        value, gradient = jax.value_and_grad(lambda c, f=far: function(c + f, *args[1:], **options).loss.sum())(args[0])
        if name != "orpo" or far < 0:  # a mean log-probability cannot be positive
            assert np.isfinite(value) and np.isfinite(gradient).all()
    if name in WITH_REFERENCE:
        for gradient in jax.grad(lambda *a: function(*a, **options).loss.sum(), (2, 3))(*args):
            assert not np.asarray(gradient).any()


@pytest.mark.parametrize("name", ALL)
def test_raising_the_chosen_lowers_the_loss(name):
    if name in ("apo_down", "ipo", "centred"):
        pytest.skip("lowers both, or has a target")
    function, options, _ = ALL[name]
    gradient = jax.grad(lambda *a: function(*a, **options).loss.sum(), (0, 1))(*_jax(_case(name)))
    assert (gradient[0] < 0).all() and (gradient[1] > 0).all()


def test_zero_margin_and_swap():
    z, one = jnp.zeros(1), jnp.ones(1)
    assert float(pref.dpo_loss(z, z, z, z).loss[0]) == singles(math.log(2))
    a, b = pref.dpo_loss(one, z, z, z, beta=0.5), pref.dpo_loss(z, one, z, z, beta=0.5)
    # -log sigmoid(h) + log sigmoid(-h) = -h
    assert float((a.loss - b.loss)[0]) == doubles(-0.5)
    np.testing.assert_array_equal(a.aux["margin"], -b.aux["margin"])


def test_rpo_by_the_sheet():
    """h = 0.5, chosen -40, beta 0.05, eta 0.005: 0.474077 + 0.01; eta = 0 is DPO; the rejected gradient is DPO's."""
    w, y, rw, ry = (jnp.array([x]) for x in (-40.0, -50.0, -40.0, -40.0))
    close.assert_printed(pref.rpo_loss(w, y, rw, ry, beta=0.05, eta=0.005).loss[0], 0.484077, 6)
    assert pref.rpo_loss(w, y, rw, ry, eta=0.0).loss == pref.dpo_loss(w, y, rw, ry, beta=0.01).loss
    slope = [jax.grad(lambda x, e=e: pref.rpo_loss(w, x, rw, ry, eta=e).loss[0])(y) for e in (0.0, 0.5)]
    close.assert_relative(*slope)


def test_kto_against_float64():
    logp, ref, good, kl = [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0], [True, False, True], 0.2
    got = pref.kto_loss(*_jax([logp, ref]), jnp.asarray(good), jnp.float32(kl), beta=0.5, weight_undesirable=1.3)
    want = [
        (1 - sigmoid(0.5 * (p - q - kl))) if g else 1.3 * (1 - sigmoid(-0.5 * (p - q - kl)))
        for p, q, g in zip(logp, ref, good, strict=True)
    ]
    close.assert_near(got.loss, want)
    low = pref.kto_loss(*_jax([logp, ref]), jnp.asarray(good), jnp.float32(-5.0))
    zero = pref.kto_loss(*_jax([logp, ref]), jnp.asarray(good), jnp.float32(0.0))
    np.testing.assert_array_equal(low.loss, zero.loss)  # the estimate is floored at 0


def test_margin_shifts_the_reward_loss():
    got = reward.bradley_terry_loss(jnp.array([2.0]), jnp.array([0.5]), margin=jnp.array([1.0]))
    close.assert_near(got.loss[0], -log_sigmoid(0.5))


MASK = jnp.array([[True, True, False], [True, False, False]])


def test_distillation_against_float64_and_masks():
    rng = np.random.default_rng(0)
    s, t = rng.normal(size=(2, 2, 3, 5))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (s, t))
    keep = np.asarray(MASK)
    forward = np.where(keep, (q * (np.log(q) - np.log(p))).sum(-1), 0)
    reverse = np.where(keep, (p * (np.log(p) - np.log(q))).sum(-1), 0)
    student, teacher = (jnp.where(MASK[..., None], jnp.asarray(x, jnp.float32), jnp.nan) for x in (s, t))
    close.assert_near(distill.forward_kl_loss(student, teacher, MASK).loss, forward)
    close.assert_near(distill.reverse_kl_loss(student, teacher, MASK).loss, reverse)
    m = 0.3 * q + 0.7 * p
    jsd = 0.3 * (q * np.log(q / m)).sum(-1) + 0.7 * (p * np.log(p / m)).sum(-1)
    got = distill.jsd_loss(student, teacher, MASK, beta=0.3).loss
    close.assert_near(got, np.where(keep, jsd, 0))
    for loss in (distill.forward_kl_loss, distill.reverse_kl_loss, distill.jsd_loss):
        gradient = jax.grad(lambda x, f=loss: f(x, teacher, MASK).loss.sum())(student)
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[~keep].any()
        same = jax.grad(lambda x, f=loss: f(x, student, MASK).loss.sum())(student)
        close.assert_near(same, 0.0)  # a student equal to its teacher stays
    # a hot softmax is nearly even, whatever the logits: half of the variance of what they differ by, over T^2
    flat = 50.0
    each = (student - teacher)[MASK]
    allowed = 0.5 * float(jnp.ptp(each, axis=-1).max() / flat) ** 2
    assert 0 < float(distill.forward_kl_loss(student, teacher, MASK, temperature=flat).loss.max()) <= allowed


def test_jsd_between_the_kls_and_with_impossible_tokens():
    """Bounded by the entropy of beta; its ends, divided by beta and 1 - beta, are the two KLs; padding of V is safe."""
    s, t = jnp.array([[[0.0, 3.0, -jnp.inf]]]), jnp.array([[[4.0, 0.0, -jnp.inf]]])
    one = jnp.ones((1, 1), bool)
    far = distill.jsd_loss(10 * s, 10 * t, one).loss
    close.assert_near(far[0, 0], math.log(2))
    beta = 1e-3  # the limits hold to first order in it, times the chi-square distance of the two
    p, q = (np.asarray(jax.nn.softmax(x[..., :2])) for x in (s, t))
    second = beta * max((p**2 / q).sum(), (q**2 / p).sum())
    small = distill.jsd_loss(s, t, one, beta=beta).loss / beta
    np.testing.assert_allclose(small, distill.forward_kl_loss(s, t, one).loss, rtol=0, atol=second)
    large = distill.jsd_loss(s, t, one, beta=1 - beta).loss / beta
    np.testing.assert_allclose(large, distill.reverse_kl_loss(s, t, one).loss, rtol=0, atol=second)
    gradient = jax.grad(lambda x: distill.jsd_loss(x, t, one).loss.sum())(s)
    assert np.isfinite(gradient).all() and float(gradient[0, 0, 2]) == 0.0


def test_robust_dpo_is_unbiased_under_flips():
    """(1 - e) rDPO(pair) + e rDPO(swapped pair) = DPO(pair)."""
    args = _jax(_case("robust"))
    swapped = [args[i] for i in (1, 0, 3, 2)]
    right, wrong = (pref.robust_dpo_loss(*x, flip_rate=0.3).loss for x in (args, swapped))
    close.assert_near(0.7 * right + 0.3 * wrong, pref.dpo_loss(*args).loss)


def test_hinge_stops_at_the_margin():
    zero = jnp.zeros(2)
    slope = jax.grad(lambda c: pref.hinge_loss(c, zero, zero, zero, beta=0.1).loss.sum())(jnp.array([5.0, 20.0]))
    close.assert_near(slope, [-0.1, 0.0])


def test_sampled_reverse_kl_gradient_is_the_gap():
    logp, teacher = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-0.5, -3.0, jnp.nan]])
    mask = jnp.array([[True, True, False]])
    gradient = jax.grad(lambda x: distill.sampled_reverse_kl_loss(x, teacher, mask).loss.sum())(logp)
    assert gradient.tolist() == [[-0.5, 1.0, 0.0]]


def test_sft():
    terms = supervised.sft_loss(jnp.array([[-1.0, jnp.nan]]), jnp.array([[True, False]]))
    assert terms.loss.tolist() == [[1.0, 0.0]]


def test_the_weight_of_a_sequence_without_tokens_does_not_matter():
    mask, weights = jnp.array([[True, True], [False, False]]), jnp.array([2.0, jnp.nan])

    def value(logp):
        return reduce.tokens(supervised.weighted_sft_loss(logp, weights, mask).loss, mask, mode="seq_mean")

    found, slope = jax.value_and_grad(value)(jnp.array([[-1.0, -2.0], [jnp.nan, -1.0]]))
    assert float(found) == 3.0 and slope.tolist() == [[-1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda z: pref.dpo_loss(z, z, z, z, beta=0.0), "beta"),
        (lambda z: pref.dpo_loss(z, z, z, z, label_smoothing=0.6), "label_smoothing"),
        (lambda z: pref.robust_dpo_loss(z, z, z, z, flip_rate=0.5), "flip_rate"),
        (lambda z: pref.hinge_loss(z, z, z, z, beta=-1.0), "beta"),
        (lambda z: distill.jsd_loss(z[None, None], z[None, None], z[None] > 0, beta=1.0), "beta"),
        (lambda z: pref.ipo_loss(z, z, z, z, tau=0.0), "tau"),
        (lambda z: reward.bradley_terry_loss(z, z, centering=-1.0), "centering"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=f"{name}="):
        call(jnp.zeros(1))
