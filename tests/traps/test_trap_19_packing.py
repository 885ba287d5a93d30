"""Trap 19, packing: packed rows give the loss and the gradient of the same sequences alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_config, small_model
from tests.traps.tables import random_batch

ALONE = random_batch(3, 5, seed=2)
LENGTHS = (3, 5, 4)


def _unpacked() -> Batch:
    real = jnp.arange(5)[None, :] < jnp.asarray(LENGTHS)[:, None]
    return ALONE._replace(
        segment_ids=real.astype(jnp.int32), mask=real & (jnp.arange(5)[None, :] > 0),
        positions=jnp.where(real, ALONE.positions, 0),
    )  # fmt: skip


def _packed() -> Batch:
    """All three in one row of 14, two columns of padding at the end."""

    def join(x):
        row = jnp.concatenate([x[i, :n] for i, n in enumerate(LENGTHS)])
        return jnp.pad(row, (0, 2))[None]

    segments = jnp.pad(jnp.repeat(jnp.arange(1, 4, dtype=jnp.int32), jnp.asarray(LENGTHS)), (0, 2))[None]
    source = _unpacked()
    return source._replace(
        tokens=join(source.tokens), positions=join(source.positions), mask=join(source.mask), segment_ids=segments
    )


@pytest.mark.parametrize("mode", reduce.MODES)
def test_packed_equals_unpacked(mode):
    policy, params, _ = small_model()

    def loss(params, batch):
        logp, entropy = score_tokens(policy, params, batch)
        return reduce.tokens(
            -logp + 0.1 * entropy, batch.mask, mode=mode, length_tokens=5, segment_ids=batch.segment_ids
        )

    run = jax.jit(jax.value_and_grad(loss))
    packed, unpacked = run(params, _packed()), run(params, _unpacked())
    close.assert_same_sums(packed, unpacked, close.gradient_sums(small_config(), *_packed().tokens.shape))


def test_the_first_token_of_a_sample_is_not_scored_by_the_sample_before():
    policy, params, _ = small_model()
    logp, entropy = score_tokens(policy, params, _packed())
    firsts = np.array([0, 3, 8, 12, 13])  # and the padding
    assert not np.asarray(logp)[0, firsts].any() and not np.asarray(entropy)[0, firsts].any()
