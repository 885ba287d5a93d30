"""ROVER: float64 loop, equality with REINFORCE at the start, masks, the uniform policy's values by enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.losses import bellman, policy
from tests import close
from tests.reference.losses import each

rng = np.random.default_rng(8)
OLD, MEAN, OLD_MEAN = (-2 * rng.random((4, 6)) for _ in range(3))
LOGP = OLD + 0.3 * rng.normal(size=(4, 6))
ADVANTAGES = np.repeat(rng.normal(size=(4, 1)), 6, axis=1)
MASK = (np.arange(6)[None] >= 1) & (np.arange(6)[None] < np.array([6, 3, 2, 5])[:, None])


def _f32(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays] + [jnp.asarray(MASK)]


def test_against_float64():
    got = bellman.rover_loss(*_f32(LOGP, OLD, MEAN, OLD_MEAN, ADVANTAGES), rho=0.7, bootstrap=0.5)

    def term(b, t):
        value = 0.7 * (MEAN - OLD_MEAN)[b, t + 1] if t + 1 < 6 and MASK[b, t + 1] else 0.0
        return (0.7 * (LOGP - OLD)[b, t] - ADVANTAGES[b, t] - 0.5 * value) ** 2

    close.assert_near(got.loss, each(MASK, term))


def test_it_starts_as_reinforce_and_only_q_has_a_gradient():
    _, old, mean, _, advantages, mask = _f32(LOGP, OLD, MEAN, OLD_MEAN, ADVANTAGES)

    def loss(logp, old_logp, now, before, a):
        return jnp.sum(bellman.rover_loss(logp, old_logp, now, before, a, mask, rho=0.7).loss)

    gradients = jax.grad(loss, (0, 1, 2, 3, 4))(old, old, mean, mean, advantages)
    want = jax.grad(lambda x: jnp.sum(policy.reinforce_loss(x, advantages, mask).loss))(old)
    close.assert_near(gradients[0], 1.4 * want)
    assert not any(np.asarray(g).any() for g in gradients[1:])
    assert np.isfinite(gradients[0]).all()


def test_mean_logprobs_against_numpy():
    logits = rng.normal(size=(2, 4, 5))
    logits[:, :, 4] = -np.inf  # a padded row of the vocabulary
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.log(probabilities[:, :, :4]).mean(-1)
    got = logprobs.mean_logprobs(jnp.asarray(logits, jnp.float32))
    close.assert_near(got[:, 1:], want[:, :-1])
    assert not np.asarray(got[:, 0]).any()
    # the worked example: pi = [.5, .25, .25] and [.4, .4, .2]
    pair = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.4, 0.4, 0.2], [1.0, 1.0, 1.0]]]))
    close.assert_printed(logprobs.mean_logprobs(pair)[0, 1:], [-1.15525, -1.14734], 5)


def test_uniform_values_by_enumeration():
    rewards = rng.integers(0, 2, 27)
    levels = bellman.uniform_policy_values(jnp.asarray(rewards, jnp.float32), 3)
    for depth, q in enumerate(levels):
        for k, path in enumerate(itertools.product(range(3), repeat=depth + 1)):
            below = [r for r, leaf in zip(rewards, itertools.product(range(3), repeat=3), strict=True)
                     if leaf[: depth + 1] == path]  # fmt: skip
            close.assert_near(q.ravel()[k], np.mean(below))
    # greedy over Q^U ends at a right leaf
    node = 0
    for q in levels:
        node = node * 3 + int(jnp.argmax(q[node]))
    assert rewards[node] == 1
    with pytest.raises(ValueError, match="no power"):
        bellman.uniform_policy_values(jnp.ones(6), 2)


def test_refusal():
    with pytest.raises(ValueError, match="rho=0"):
        bellman.rover_loss(*_f32(LOGP, OLD, MEAN, OLD_MEAN, ADVANTAGES), rho=0.0)
