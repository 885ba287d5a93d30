"""Soft Bellman consistency: worked numbers, a float64 loop, which terms have a gradient, and zero at the optimum."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import bellman
from tests import close

rng = np.random.default_rng(5)
MASK = (np.arange(7)[None] >= 2) & (np.arange(7)[None] < np.array([7, 4, 3, 6])[:, None])
LOGP, REF = (-2 * rng.random((4, 7)) for _ in range(2))
VALUES, REWARDS = rng.normal(size=(4, 7)), np.array([1.0, 0.0, 1.0, 0.5])
STARTS = rng.random((4, 7)) < 0.4


def _f32(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays]


def test_worked_example():
    values, d, mask = jnp.array([[0.5, 0.8]]), jnp.array([[0.2, -0.4]]), jnp.ones((1, 2), bool)
    zero, paid = jnp.zeros((1, 2)), jnp.ones(1)
    close.assert_near(bellman.sums_from(d, mask), [[-0.2, -0.4]])
    critic = bellman.soft_value_loss(values, d, zero, paid, mask, beta=0.5)
    close.assert_near(critic.loss.mean(), 0.26)
    close.assert_near(critic.aux["residual"], [[0.6, 0.4]])

    def loss(d):
        return bellman.soft_policy_loss(d, zero, values, paid, mask, mask, beta=0.5).loss.mean()

    # the second would be -0.5 if what follows a token were not stopped
    close.assert_near(jax.grad(loss)(d), [[-0.3, -0.2]])
    one = bellman.soft_policy_loss(d, zero, values, paid, bellman.first_tokens(mask), mask, beta=0.5)
    close.assert_near(one.loss, [[0.36, 0.0]])


@pytest.mark.parametrize("kind", ["token", "step", "response"])
def test_against_float64(kind):
    starts = {"token": MASK, "step": STARTS, "response": np.zeros_like(MASK)}[kind]
    logp, ref, values = _f32(LOGP, REF, VALUES)
    args = (logp, ref, values, jnp.asarray(REWARDS, jnp.float32), jnp.asarray(starts), jnp.asarray(MASK))
    found = bellman.soft_policy_loss(*args, beta=0.3)
    loss, advantage, gradient = (np.zeros(MASK.shape) for _ in range(3))
    d = LOGP - REF
    for b in range(4):
        inside = [t for t in range(7) if MASK[b, t]]
        begins = [t for k, t in enumerate(inside) if k == 0 or starts[b, t]]
        for k, t in enumerate(begins):
            end = begins[k + 1] if k + 1 < len(begins) else inside[-1] + 1
            own, later = sum(d[b, t:end]), sum(d[b, end : inside[-1] + 1])
            gap = VALUES[b, t] + 0.3 * (own + later) - REWARDS[b]
            loss[b, t], advantage[b, t] = gap**2, REWARDS[b] - VALUES[b, t] - 0.3 * later
            gradient[b, t:end] += 2 * 0.3 * gap  # what comes after the step has none of it
    close.assert_near(found.loss, loss)
    close.assert_near(found.aux["advantage"], advantage)
    slopes = jax.grad(lambda x: bellman.soft_policy_loss(x, *args[1:], beta=0.3).loss.sum())(logp)
    close.assert_near(slopes, gradient)
    critic = bellman.soft_value_loss(values, logp, ref, args[3], args[5], beta=0.3)
    wanted = [[(VALUES[b, t] + 0.3 * d[b, t:][MASK[b, t:]].sum() - REWARDS[b]) ** 2 if MASK[b, t] else 0.0
               for t in range(7)] for b in range(4)]  # fmt: skip
    close.assert_near(critic.loss, wanted)


def test_both_losses_vanish_at_the_optimum_of_an_enumerated_tree():
    beta, reference = 0.4, np.array([0.2, 0.5, 0.3])
    paths = list(itertools.product(range(3), repeat=3))
    paid = {p: float(sum(p) % 3 == 1) for p in paths}

    def worth(prefix):
        if len(prefix) == 3:
            return paid[prefix]
        return beta * np.log(sum(reference[a] * np.exp(worth((*prefix, a)) / beta) for a in range(3)))

    values = [[worth(p[:t]) for t in range(3)] for p in paths]
    logp = [[np.log(reference[p[t]]) + (worth(p[: t + 1]) - worth(p[:t])) / beta for t in range(3)] for p in paths]
    ref = [[np.log(reference[p[t]]) for t in range(3)] for p in paths]
    logp, ref, values = (jnp.asarray(x, jnp.float32) for x in (logp, ref, values))
    rewards, mask = jnp.asarray([paid[p] for p in paths], jnp.float32), jnp.ones((27, 3), bool)
    close.assert_near(jnp.exp(logp.reshape(9, 3, 3)[::1, :, 2]).sum(1), 1.0)
    for starts in (mask, bellman.first_tokens(mask)):
        actor = bellman.soft_policy_loss(logp, ref, values, rewards, starts, mask, beta=beta)
        close.assert_near(jnp.sqrt(actor.loss), 0.0)  # losses are squares of what vanishes
    critic = bellman.soft_value_loss(values, logp, ref, rewards, mask, beta=beta)
    close.assert_near(jnp.sqrt(critic.loss), 0.0)
    # of the reference itself the critic regresses on the reward
    plain = bellman.soft_value_loss(values, ref, ref, rewards, mask, beta=beta)
    close.assert_near(plain.loss, (values - rewards[:, None]) ** 2)


def test_steps_of_one_token_are_the_token_form_and_wrong_betas_are_refused():
    mask, ends = jnp.asarray(MASK), jnp.asarray(STARTS)
    assert bool((bellman.starts_after(jnp.ones_like(mask), mask) == mask).all())
    assert bool((bellman.starts_after(jnp.zeros_like(mask), mask) == bellman.first_tokens(mask)).all())
    begins = np.asarray(bellman.starts_after(ends, mask))
    for b, t in zip(*np.nonzero(MASK), strict=True):
        assert begins[b, t] == (not MASK[b, t - 1] or STARTS[b, t - 1])
    with pytest.raises(ValueError, match="beta=0"):
        bellman.soft_value_loss(*_f32(VALUES, LOGP, REF), jnp.asarray(REWARDS, jnp.float32), mask, beta=0.0)
