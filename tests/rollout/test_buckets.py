"""Buckets change the columns that are computed, and no sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.buckets import bucketed
from jaxrl_llm.rollout.generate import generate
from tests.models_for_tests import small_model

LONG = jnp.asarray(np.random.default_rng(0).integers(3, 20, (3, 12)), jnp.int32)
KEYS, IDS = jax.random.split(jax.random.key(3), 6), jnp.arange(3, dtype=jnp.int32)
SEEN = []


def _rollout(params, tokens, valid, keys, ids):
    SEEN.append(tokens.shape[1])
    return generate(small_model()[0], params, tokens, valid, keys, group_size=2, max_new_tokens=6, eos_ids=(2, 5),
                    problem_ids=ids)  # fmt: skip


def test_the_samples_are_those_of_the_whole_width():
    params = small_model()[1]
    plain, cut = jax.jit(_rollout), jax.jit(bucketed(_rollout, (4, 9, 40)))
    for lengths in ((1, 4, 3), (2, 9, 7), (5, 10, 1), (12, 3, 3)):
        valid = jnp.arange(12)[None, :] >= 12 - jnp.asarray(lengths)[:, None]
        want, got = (run(params, LONG, valid, KEYS, IDS) for run in (plain, cut))
        jax.tree.map(np.testing.assert_array_equal, got._replace(sampler_logp=0), want._replace(sampler_logp=0))
        np.testing.assert_allclose(got.sampler_logp, want.sampler_logp, atol=1e-5)
    assert SEEN == [12, 4, 9, 12]  # each width is traced once, the table's own among them


def test_mistakes():
    with pytest.raises(ValueError, match=r"widths=\[0, 3\] must be at least 1"):
        bucketed(_rollout, (0, 3))
