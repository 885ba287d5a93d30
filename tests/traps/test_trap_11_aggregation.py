"""Trap 11, aggregation: one batch of 8, eight of 1, and any number of devices have the same gradient."""

import jax
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss, sampler_anchor
from jaxrl_llm.train.step import accumulate
from tests import close
from tests.traps.tables import params, random_batch, table_policy


def _close(left, right):
    jax.tree.map(lambda a, b: close.assert_near(a, b), left, right)


@pytest.mark.parametrize("mode", reduce.MODES)
def test_parts_and_devices(mode):
    loss = make_policy_loss(table_policy(), clipped_policy_loss, reduction=mode, length_tokens=6, anchor=sampler_anchor)
    batch = random_batch(mode=mode)
    grads, value, _ = accumulate(loss, params(), batch, 1)
    assert np.abs(grads["table"]).max() > 1e-3
    for parts in (2, 8):
        _close((grads, value), accumulate(loss, params(), batch, parts)[:2])
    for devices in (2, 8):
        rows = meshes.batch_sharding(meshes.parse_mesh(f"data={devices}"))
        spread = jax.tree.map(lambda x, to=rows: jax.device_put(x, to) if x.ndim else x, batch)
        _close((grads, value), jax.jit(lambda p, b: accumulate(loss, p, b, 1)[:2])(params(), spread))


def test_modes_differ_as_their_definitions_say():
    batch = random_batch()
    rows, lengths = batch.mask.shape[0], np.asarray(batch.mask).sum(1)
    assert float(reduce.denominator(batch.mask, mode="token_mean")) == lengths.sum()
    assert float(reduce.denominator(batch.mask, mode="seq_mean")) == (lengths > 0).sum()
    assert float(reduce.denominator(batch.mask, mode="constant")) == rows
