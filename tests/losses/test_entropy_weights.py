"""Entropy-guided sequence weighting: float64 loop, uniform weights, finished members, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import entropy as terms
from jaxrl_llm.losses.policy import clipped_policy_loss
from tests import close

rng = np.random.default_rng(5)
IDS = np.array([0, 0, 0, 1, 1])
MASK = np.array([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]], bool)
ENTROPY, ADVANTAGES = rng.random((5, 4)), np.repeat(rng.normal(size=(5, 1)), 4, axis=1)


def _arrays(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays]


def _weights(function, **keywords):
    return function(*_arrays(ENTROPY, ADVANTAGES), jnp.asarray(IDS), jnp.asarray(MASK), **keywords)


def test_step_weights_against_float64():
    got = np.asarray(_weights(terms.entropy_guided_weights, alpha=0.7, temperature=0.5))
    for i in range(5):
        for t in range(4):
            raw = {
                j: np.exp((ADVANTAGES[j, t] + 0.7 * ENTROPY[j, t]) / 0.5)
                for j in range(5)
                if IDS[j] == IDS[i] and MASK[j, t]
            }
            want = raw[i] / sum(raw.values()) if MASK[i, t] else 0.0
            close.assert_near(got[i, t], want)
    # where a member has finished, the weights of the others still sum to 1
    close.assert_near(got[:3, 2].sum(), 1.0)
    close.assert_near(got[3:, 3].sum(), 1.0)


def test_sequence_weights_against_float64():
    got = np.asarray(_weights(terms.entropy_guided_sequence_weights, alpha=0.7, temperature=0.5))
    mean = [ENTROPY[i][MASK[i]].mean() for i in range(5)]
    raw = np.exp((ADVANTAGES[:, 0] + 0.7 * np.array(mean)) / 0.5)
    for i in range(5):
        want = raw[i] / raw[IDS == IDS[i]].sum()
        close.assert_near(got[i], np.where(MASK[i], want, 0.0))


def test_equal_weights_times_live_members_are_grpo():
    ids, mask = jnp.asarray(IDS), jnp.asarray(MASK)
    same = jnp.full((5, 4), 0.5)
    weights = terms.entropy_guided_weights(same, same, ids, mask)
    close.assert_near(weights[:3, 1], 1 / 3)
    logp, advantages = _arrays(-rng.random((5, 4)), ADVANTAGES)
    loss = clipped_policy_loss(logp, logp - 0.1, advantages, mask).loss
    rescaled = jnp.where(mask, weights * terms.live_members(ids, mask) * loss, 0.0)
    close.assert_near(reduce.tokens(rescaled, mask), reduce.tokens(loss, mask))
    # a high temperature forgets advantages and entropies
    warm = _weights(terms.entropy_guided_weights, temperature=1e6)
    close.assert_near(warm * terms.live_members(ids, mask), MASK.astype(float))


@pytest.mark.parametrize("function", [terms.entropy_guided_weights, terms.entropy_guided_sequence_weights])
def test_no_gradient_extremes_and_mask(function):
    weights = _weights(function, temperature=1e-3)
    assert np.isfinite(weights).all() and not np.asarray(weights)[~MASK].any()
    gradient = jax.grad(lambda e, a: jnp.sum(function(e, a, jnp.asarray(IDS), jnp.asarray(MASK))), (0, 1))
    for g in gradient(*_arrays(ENTROPY, ADVANTAGES)):
        assert not np.asarray(g).any()
    with pytest.raises(ValueError, match="temperature=0"):
        _weights(function, temperature=0.0)
