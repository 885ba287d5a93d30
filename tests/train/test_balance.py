"""The learned share of imitation: exact for one step of gradient descent, bounded, zero where nothing differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import balance
from tests import close
from tests.close import singles

rng = np.random.default_rng(5)
A, B, C = (jnp.asarray(rng.normal(size=(3, 3)) + 2 * np.eye(3), jnp.float32) for _ in range(3))
THETA = {"x": jnp.asarray(rng.normal(size=3), jnp.float32)}


def _rl(theta):
    return 0.5 * jnp.sum((A @ theta["x"] - 1.0) ** 2)


def _sft(theta):
    return 0.5 * jnp.sum((B @ theta["x"]) ** 2)


def _utility(theta):
    return -jnp.sum(jnp.tanh(C @ theta["x"]) ** 2)


def _after(mu, eta=0.05):
    gradient = jax.grad(lambda t: (1 - mu) * _rl(t) + mu * _sft(t))(THETA)
    return jax.tree.map(lambda t, g: t - eta * g, THETA, gradient)


def _size(eta, theta):
    """Of the terms of a meta-gradient: each product by its absolute values, the slope of ``tanh^2`` at most 1."""
    a, b, c, x = (np.abs(np.asarray(x)) for x in (A, B, C, theta["x"]))
    direction = a.T @ (a @ x + 1.0) + b.T @ (b @ x)
    return eta * float((c.T @ np.ones(3)) @ direction)


# gradients of a utility and of two losses, each three products of threes one behind another, and their own product
TERMS = 3 * 3 * 3 + 3


@pytest.mark.parametrize("mu", [0.1, 0.5, 0.9])
def test_it_is_the_derivative_through_a_step(mu):
    direction = jax.tree.map(jnp.subtract, jax.grad(_sft)(THETA), jax.grad(_rl)(THETA))
    got = balance.meta_gradient(jax.grad(_utility)(_after(mu)), direction, learning_rate=0.05)
    _, exact = jax.jvp(lambda m: _utility(_after(m)), (jnp.float32(mu),), (jnp.float32(1.0),))
    close.assert_near(got, exact, terms=TERMS, magnitude=_size(0.05, THETA))
    # the error of a central difference grows with the square of its width: of twice the width it is four times as large
    one, two = (
        float(_utility(_after(mu + width)) - _utility(_after(mu - width))) / (2 * width) for width in (0.01, 0.02)
    )
    rounding = close.near(0.0, 0.0, terms=TERMS, magnitude=3.0) / 0.01  # of three squares of a tanh
    assert abs(float(got) - one) < abs(two - one) + rounding < 0.1 * abs(float(got))


def test_equal_gradients_ask_for_nothing():
    zero = jax.tree.map(jnp.zeros_like, THETA)
    assert float(balance.meta_gradient(jax.grad(_utility)(THETA), zero, learning_rate=0.1)) == 0
    still = balance.moved(balance.first_balance(THETA, 0.6), jnp.float32(0.0), jnp.float32(1.3))
    assert float(still.share) == singles(0.6) and float(still.target) == singles(1.3)


def test_moves_against_a_loop_and_within_bounds():
    state, share, pull, size = balance.first_balance({}, 0.9), 0.9, 0.0, 0.0
    slopes, entropies = rng.normal(size=60) - 0.5, 1.0 + 0.3 * rng.normal(size=60)
    for slope, entropy in zip(slopes, entropies, strict=True):
        state = balance.moved(state, jnp.float32(slope), jnp.float32(entropy), rate=0.05, entropy_rate=0.03)
        pull, size = 0.9 * pull + 0.1 * slope, 0.9 * size + 0.1 * abs(slope)
        wish = 0.05 * pull / size + 0.03 * (entropy - entropies[0]) / entropies[0]
        assert abs(pull) <= size  # the same sums, rounded alike
        share = min(max(share + wish, 0.05), 0.95)
        # sixty steps, one behind another, of one formula each
        close.assert_near(state.share, share, terms=60 * close.OPERATIONS)
    assert share < 0.5, "slopes that fall on average lower the share"
    # the scale of the gradients does not matter
    large, small = (
        balance.moved(balance.first_balance({}, 0.5), jnp.float32(x), jnp.float32(1.0)) for x in (9e3, 9e-6)
    )
    close.assert_near([large.share, small.share], [0.52, 0.52])
    with pytest.raises(ValueError, match="low=0.9"):
        balance.moved(state, jnp.float32(0.0), jnp.float32(1.0), low=0.9, high=0.1)
    with pytest.raises(ValueError, match="learning_rate=0"):
        balance.meta_gradient(THETA, THETA, learning_rate=0.0)


def test_the_balance_learns_from_the_batch_after_the_step():
    """Gradients of a batch belong to the parameters that sampled it; the slope joins them with the last direction."""

    def reinforce(theta, scale):
        return scale * _rl(theta), {"policy/entropy": jnp.float32(1.0)}

    def imitate(theta, scale):
        return scale * _sft(theta)

    old = balance.first_balance(THETA, 0.5)
    rates = {"learning_rate": 0.1, "rate": 0.02, "entropy_rate": 0.0}
    moved = _after(0.5)
    first = balance.learned(old, reinforce, imitate, moved, jnp.float32(1.0), **rates)
    assert float(first.share) == 0.5 and float(first.pull) == 0  # no direction yet
    want = jax.tree.map(jnp.subtract, jax.grad(_sft)(THETA), jax.grad(_rl)(THETA))
    size = max(float(jnp.abs(x).max()) for f in (_rl, _sft) for x in jax.tree.leaves(jax.grad(f)(THETA)))
    jax.tree.map(lambda a, b: close.assert_near(a, b, magnitude=size), first.direction, want)
    second = balance.learned(first, reinforce, imitate, _after(0.2), jnp.float32(2.0), **rates)
    uphill = jax.tree.map(lambda g: -2.0 * g, jax.grad(_rl)(moved))
    slope = balance.meta_gradient(uphill, first.direction, learning_rate=0.1)
    close.assert_near(second.pull, 0.1 * slope, terms=TERMS, magnitude=0.1 * 2.0 * _uphill(moved))


def _uphill(theta):
    """The size of the terms of ``slope`` above, whose utility is the loss itself."""
    a, b, x = (np.abs(np.asarray(x)) for x in (A, B, THETA["x"]))
    there = np.abs(np.asarray(theta["x"]))
    return 0.1 * float((a.T @ (a @ there + 1.0)) @ (a.T @ (a @ x + 1.0) + b.T @ (b @ x)))


def test_schedules():
    done = jnp.array([0.0, 0.25, 0.5, 1.0])
    for schedule, want in (
        (balance.never, [0, 0, 0, 0]), (balance.always, [1, 1, 1, 1]), (balance.half, [0.5] * 4),
        (balance.falling, [0.9, 0.6875, 0.475, 0.05]), (balance.at_first, [1, 1, 0, 0]),
    ):  # fmt: skip
        close.assert_near([schedule(x) for x in done], want)
