"""Trap 21, sampler keys: a sample is a function of (run, step, prompt, sample), of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.rollout.keys import sample_keys
from tests.traps.tables import params, problems, rollout


def _data(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys))]


def test_no_key_repeats_over_steps_prompts_and_samples():
    ids = jnp.arange(5, dtype=jnp.int32)
    seen = [key for step in range(4) for key in _data(sample_keys(jax.random.key(0), step, ids, 3))]
    assert len(set(seen)) == len(seen) == 60
    assert not set(seen) & set(_data(sample_keys(jax.random.key(1), 0, ids, 3)))


def test_a_sample_is_the_same_in_any_order_batch_and_mesh():
    table = problems(8)

    def sample(ids, tokens, valid):
        return rollout(params(), tokens, valid, sample_keys(jax.random.key(0), 2, ids, 4), ids).tokens

    ids = jnp.arange(8, dtype=jnp.int32)
    want = np.asarray(sample(ids, table.tokens, table.valid)).reshape(8, 4, -1)
    assert len({tuple(row) for row in want.reshape(32, -1)}) > 8  # they do differ
    order = jnp.asarray([5, 1, 6], jnp.int32)
    some = np.asarray(sample(order, table.tokens[order], table.valid[order])).reshape(3, 4, -1)
    np.testing.assert_array_equal(some, want[np.asarray(order)])
    for devices in (2, 8):
        rows = meshes.batch_sharding(meshes.parse_mesh(f"data={devices}"))
        spread = jax.jit(sample)(*jax.device_put((ids, table.tokens, table.valid), rows))
        np.testing.assert_array_equal(np.asarray(spread).reshape(8, 4, -1), want)
