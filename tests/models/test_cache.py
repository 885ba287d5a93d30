"""The int8 cache: what it saves, and how far off it samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.cache import quantised
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.slots import generate_in_slots
from tests import close
from tests.models_for_tests import small_config, small_model

PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1]], jnp.int32)
VALID = PROMPTS > 0
SETTINGS = {"group_size": 4, "max_new_tokens": 8, "eos_ids": (2, 5)}


def test_entries_are_off_by_half_a_scale():
    x = jax.random.normal(jax.random.key(0), (3, 2, 5, 16)) * jnp.array([1e-3, 1.0, 50.0])[:, None, None, None]
    whole, scale = quantised(x.at[0, 0, 0].set(0.0))
    assert whole.dtype == jnp.int8 and scale.shape == (3, 2, 5)
    back = np.asarray(whole, np.float64) * np.asarray(scale, np.float64)[..., None]
    assert np.abs(back - np.asarray(x.at[0, 0, 0].set(0.0))).max(-1).max() > 0
    assert (np.abs(back - np.asarray(x.at[0, 0, 0].set(0.0))) <= 0.5001 * np.asarray(scale)[..., None] + 1e-12).all()
    assert (np.abs(np.asarray(whole)).max(-1).reshape(-1)[1:] == 127).all() and not whole[0, 0, 0].any()


@functools.cache
def _rows(rollout=generate, **options):
    _, params, config = small_model()
    policy = make_policy(config, int8_cache=True)
    keys = jax.random.split(jax.random.key(3), 12)
    return jax.jit(lambda p: rollout(policy, p, PROMPTS, VALID, keys, **SETTINGS, **options))(params)


def test_the_sampled_distribution_is_a_little_off_the_trained_one():
    policy, params, _ = small_model()
    rows = _rows()
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    logp = logprobs.token_logprobs(policy.unembed(params, hidden), rows.tokens, segment_ids=rows.segment_ids)
    gap = np.abs(np.asarray(logp - rows.sampler_logp))[np.asarray(rows.mask)]
    assert 0 < gap.mean() < 0.02 and gap.max() < 0.1, (gap.mean(), gap.max())


@pytest.mark.slow
def test_slots_sample_the_same():
    found = _rows(generate_in_slots, slots=5)
    np.testing.assert_array_equal(found.tokens, _rows().tokens)
    np.testing.assert_allclose(found.sampler_logp, _rows().sampler_logp, atol=1e-5)


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_in_a_stack_sample_as_layers_apart(monkeypatch, int8):
    _, params, config = small_model()
    policy = make_policy(config, int8_cache=int8)
    keys, found = jax.random.split(jax.random.key(3), 12), []
    for most in (caches.UNROLLED, 1):
        monkeypatch.setattr(caches, "UNROLLED", most)
        found.append(jax.jit(lambda p: generate(policy, p, PROMPTS, VALID, keys, **SETTINGS))(params))
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    close.assert_same_forward(found[0].sampler_logp, found[1].sampler_logp)


def test_bytes():
    """A byte an entry and four a head: with 64 entries a head, little more than half of bfloat16."""
    config = small_config(head_dim=64)

    def size(**options):
        cache = jax.eval_shape(lambda: make_policy(config, compute_dtype=jnp.bfloat16, **options).init_cache(4, 32))
        return sum(x.size * x.dtype.itemsize for name in cache if name[0] in "kv" for x in cache[name])

    assert size(int8_cache=True) / size() == (64 + 4) / 128
