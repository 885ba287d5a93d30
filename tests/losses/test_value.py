"""Value losses: float64 loops, gradient facts, planted NaN, the usual definition of clipping."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import value
from tests import close
from tests.reference import losses as reference

VALUES = jnp.array([[0.9, 0.2, -0.3, 0.5], [1.4, 0.1, 0.6, -0.8]])
RETURNS = jnp.array([[1.0, 0.5, -1.0, 0.0], [0.3, 0.3, 1.0, -0.2]])
OLD = jnp.array([[0.5, 0.3, -0.2, 0.0], [1.1, 0.4, 0.5, -0.1]])
MASK = jnp.array([[True, True, True, False], [True, True, True, True]])
LOW, HIGH, BINS = -1.0, 1.0, 5
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, BINS)), jnp.float32)


def test_clipped_value_loss_as_verl_and_trl_define_it():
    def loss(x):
        terms = value.clipped_value_loss(x, OLD, RETURNS, MASK, clip=0.2)
        return reduce.tokens(terms.loss, MASK), terms

    (got, terms), gradient = jax.value_and_grad(loss, has_aux=True)(VALUES)
    # compute_value_loss of verl, token-mean, clip range 0.2
    close.assert_printed(got, 0.17428571, 8)
    close.assert_near(reduce.tokens(terms.aux["value_clipped"], MASK), 1 / 7)
    want = [[0.0, -0.042857, 0.1, 0.0], [0.157143, -0.028571, -0.057143, -0.085714]]
    close.assert_printed(gradient, want, 6)
    loop = reference.each(
        np.asarray(MASK),
        lambda b, t: reference.clipped_value(float(VALUES[b, t]), float(OLD[b, t]), float(RETURNS[b, t]), 0.2),
    )
    close.assert_near(terms.loss, loop)


def test_squared_value_loss_has_the_error_as_gradient():
    gradient = jax.grad(lambda v: value.squared_value_loss(v, RETURNS, MASK).loss.sum())(VALUES)
    close.assert_near(gradient, jnp.where(MASK, VALUES - RETURNS, 0.0))


@pytest.mark.parametrize("sigma", [None, 0.2])
def test_categorical_targets_and_loss_against_float64(sigma):
    two = value.two_hot(RETURNS, low=LOW, high=HIGH, bins=BINS)
    gauss = value.hl_gauss(RETURNS, low=LOW, high=HIGH, bins=BINS, sigma=sigma)
    width = sigma or 0.75 * 0.5
    for b in range(2):
        for t in range(4):
            target = float(RETURNS[b, t])
            close.assert_near(two[b, t], reference.two_hot(target, LOW, HIGH, BINS))
            close.assert_near(gauss[b, t], reference.hl_gauss(target, LOW, HIGH, BINS, width))
    for make, targets in ((value.two_hot, two), (partial(value.hl_gauss, sigma=sigma), gauss)):
        terms = value.categorical_value_loss(LOGITS, RETURNS, MASK, low=LOW, high=HIGH, targets=make)
        loop = reference.each(
            np.asarray(MASK),
            lambda b, t, p=targets: reference.cross_entropy(
                np.asarray(p[b, t], np.float64), np.asarray(LOGITS[b, t], np.float64)
            ),
        )
        close.assert_near(terms.loss, loop)


def test_hl_gauss_by_hand():
    # bins at 0, 1, 2 with sigma 1: mass of N(1, 1) within 0.5 of the mean is 0.3829, then 0.2417 on each side
    got = value.hl_gauss(jnp.array([[1.0]]), low=0.0, high=2.0, bins=3, sigma=1.0)
    total = 0.3829249 + 2 * 0.2417303
    close.assert_printed(got, [[[0.2417303 / total, 0.3829249 / total, 0.2417303 / total]]], 7)


def test_hl_gauss_has_the_target_as_mean_away_from_the_ends():
    targets = jnp.linspace(-5.0, 5.0, 12)[None, :]
    weights = value.hl_gauss(targets, low=-10.0, high=10.0, bins=41)
    close.assert_near(weights.sum(-1), 1.0)
    close.assert_near(value.expected_values(jnp.log(weights + 1e-30), low=-10.0, high=10.0), targets)
    far = value.hl_gauss(jnp.array([[99.0]]), low=-1.0, high=1.0, bins=5)
    assert np.isfinite(far).all() and int(far.argmax()) == 4


@pytest.mark.parametrize("make", [value.two_hot, value.hl_gauss])
def test_cross_entropy_gradient_is_probability_minus_target(make):
    loss = partial(value.categorical_value_loss, low=LOW, high=HIGH, targets=make)
    gradient = jax.grad(lambda x: loss(x, RETURNS, MASK).loss.sum())(LOGITS)
    want = jax.nn.softmax(LOGITS) - make(RETURNS, low=LOW, high=HIGH, bins=BINS)
    close.assert_near(gradient, jnp.where(MASK[..., None], want, 0.0))
    assert not np.asarray(jax.grad(lambda r: loss(LOGITS, r, MASK).loss.sum())(RETURNS)).any()


LOSSES = {
    "squared": lambda v, o, r: value.squared_value_loss(v, r, MASK),
    "clipped": lambda v, o, r: value.clipped_value_loss(v, o, r, MASK),
    "categorical": lambda v, o, r: value.categorical_value_loss(v[..., None] * LOGITS, r, MASK, low=LOW, high=HIGH),
}


@pytest.mark.parametrize("name", LOSSES)
def test_mask_dtype_and_anchors(name):
    clean = LOSSES[name](VALUES, OLD, RETURNS)
    nan = [jnp.where(MASK, x, jnp.nan) for x in (VALUES, OLD, RETURNS)]
    dirty = LOSSES[name](*nan)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    gradients = jax.grad(lambda *a: LOSSES[name](*a).loss.sum(), (0, 1, 2))(*nan)
    assert np.isfinite(gradients[0]).all() and gradients[0][0, 3] == 0
    assert not np.asarray(gradients[1]).any() and not np.asarray(gradients[2]).any()
    if name != "categorical":
        low = LOSSES[name](*(x.astype(jnp.bfloat16) for x in (VALUES, OLD, RETURNS)))
        assert low.loss.dtype == jnp.float32
    jitted = jax.jit(LOSSES[name])(VALUES, OLD, RETURNS)
    jax.tree.map(lambda a, b: close.assert_near(a, b), clean, jitted)


def test_impossible_bins_do_not_poison_the_loss():
    """A head padded with -inf bins: their target is 0 and so is their part."""
    logits = LOGITS.at[..., -1].set(-jnp.inf)
    returns = jnp.full_like(RETURNS, -1.0)
    value_, gradient = jax.value_and_grad(
        lambda x: value.categorical_value_loss(x, returns, MASK, low=LOW, high=HIGH).loss.sum()
    )(logits)
    assert np.isfinite(value_) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: value.clipped_value_loss(VALUES, OLD, RETURNS, MASK, clip=0.0), "clip=0.0"),
        (lambda: value.two_hot(RETURNS, low=1.0, high=1.0, bins=5), "low=1.0"),
        (lambda: value.hl_gauss(RETURNS, low=0.0, high=1.0, bins=1), "bins=1"),
        (lambda: value.hl_gauss(RETURNS, low=0.0, high=1.0, bins=3, sigma=0.0), "sigma=0.0"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
