"""Trap 20, sequence-level ratios in packed rows: each sample has its own, value and gradient as if alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import correction, sequence
from tests import close

LENGTHS = (3, 5, 4)
rng = np.random.default_rng(0)
OLD = -rng.random((3, 5)) * 2
LOGP = OLD + 0.3 * rng.normal(size=(3, 5))
ADVANTAGES = np.repeat(rng.normal(size=(3, 1)), 5, axis=1)
REAL = np.arange(5)[None, :] < np.asarray(LENGTHS)[:, None]


def _alone(x):
    return jnp.asarray(np.where(REAL, x, 0), jnp.float32)


def _pack(x):
    return jnp.pad(jnp.asarray(np.concatenate([x[i, :n] for i, n in enumerate(LENGTHS)]), jnp.float32), (0, 2))[None]


MASK, PACKED_MASK = jnp.asarray(REAL), jnp.asarray([[True] * 12 + [False] * 2])
SEGMENTS = jnp.asarray([[1] * 3 + [2] * 5 + [3] * 4 + [0] * 2], jnp.int32)
WHERE = [slice(0, 3), slice(3, 8), slice(8, 12)]


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss, sequence.gmpo_loss])
def test_packed_equals_alone(loss):
    bounds = {} if loss is sequence.gmpo_loss else {"clip_low": 0.05, "clip_high": 0.05}

    def alone(logp):
        return reduce.tokens(loss(logp, _alone(OLD), _alone(ADVANTAGES), MASK, **bounds).loss, MASK, mode="seq_mean")

    def packed(logp):
        terms = loss(logp, _pack(OLD), _pack(ADVANTAGES), PACKED_MASK, segment_ids=SEGMENTS, **bounds)
        return reduce.tokens(terms.loss, PACKED_MASK, mode="seq_mean", segment_ids=SEGMENTS)

    want, gradient = jax.value_and_grad(alone)(_alone(LOGP))
    got, packed_gradient = jax.value_and_grad(packed)(_pack(LOGP))
    close.assert_near(got, want)
    for row, (where, length) in enumerate(zip(WHERE, LENGTHS, strict=True)):
        close.assert_near(packed_gradient[0, where], gradient[row, :length])


@pytest.mark.parametrize("level", correction.LEVELS)
def test_mismatch_ratios_too(level):
    want = correction.mismatch_ratio(_alone(LOGP), _alone(OLD), MASK, level=level)
    got = correction.mismatch_ratio(_pack(LOGP), _pack(OLD), PACKED_MASK, level=level, segment_ids=SEGMENTS)
    for row, (where, length) in enumerate(zip(WHERE, LENGTHS, strict=True)):
        close.assert_relative(got[0, where], want[row, :length])
