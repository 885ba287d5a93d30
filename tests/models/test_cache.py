"""Caches of a byte: what they save, and how far off they sample."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.cache import quantised
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_kernels
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


def test_small_numbers_keep_their_digits_in_float8():
    """Three bits behind the leading one: off by a sixteenth of themselves, down to where the exponents end."""
    x = jax.random.normal(jax.random.key(0), (4, 2, 5, 16)) * jnp.array([1e-3, 1.0, 50.0, 1e6])[:, None, None, None]
    x = x.at[0, 0, 0].set(0.0)
    few, scale = quantised(x, jnp.float8_e4m3fn)
    assert few.dtype == jnp.float8_e4m3fn and scale.shape == (4, 2, 5)
    back = np.asarray(few, np.float64) * np.asarray(scale, np.float64)[..., None]
    least = 2.0**-10 * np.asarray(scale)[..., None]  # half the least of float8
    assert (np.abs(back - np.asarray(x)) <= np.maximum(np.abs(np.asarray(x)) / 16, least) * 1.0001).all()
    largest = np.abs(np.asarray(few, np.float64)).max(-1).reshape(-1)
    assert largest[0] == 0 and (largest[1:] == 448).all() and np.isfinite(back).all()


def test_other_numbers_are_refused():
    with pytest.raises(ValueError, match="cache_dtype=float16 is not one of int8, float8_e4m3fn"):
        make_policy(small_config(), cache_dtype=jnp.float16).init_cache(1, 4)


@functools.cache
def _rows(rollout=generate, few=jnp.int8, **options):
    _, params, config = small_model()
    policy = make_policy(config, cache_dtype=few)
    keys = jax.random.split(jax.random.key(3), 12)
    return jax.jit(lambda p: rollout(policy, p, PROMPTS, VALID, keys, **SETTINGS, **options))(params)


@pytest.mark.parametrize(("few", "mean", "most"), [(jnp.int8, 0.02, 0.1), (jnp.float8_e4m3fn, 0.05, 0.3)])
def test_the_sampled_distribution_is_a_little_off_the_trained_one(few, mean, most):
    policy, params, _ = small_model()
    rows = _rows(few=few)
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    logp = logprobs.token_logprobs(policy.unembed(params, hidden), rows.tokens, segment_ids=rows.segment_ids)
    gap = np.abs(np.asarray(logp - rows.sampler_logp))[np.asarray(rows.mask)]
    assert 0 < gap.mean() < mean and gap.max() < most, (gap.mean(), gap.max())


@pytest.mark.slow
def test_slots_sample_the_same():
    found = _rows(generate_in_slots, slots=5)
    np.testing.assert_array_equal(found.tokens, _rows().tokens)
    close.assert_same_forward(found.sampler_logp, _rows().sampler_logp)


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_and_columns_lie_as_they_may(int8):
    """A stack of layers, layers apart, and the columns of a GPU sample the same."""
    _, params, config = small_model()
    keys, found = jax.random.split(jax.random.key(3), 12), []
    for layout in (None, caches.DeviceLayout(1), caches.ON_GPU):
        policy = make_policy(config, cache_dtype=jnp.int8 if int8 else None, layout=layout)
        assert isinstance(policy.init_cache(2, 5)["k"], tuple) == (layout is None or layout.apart > 1)
        found.append(jax.jit(lambda p, policy=policy: generate(policy, p, PROMPTS, VALID, keys, **SETTINGS))(params))
    assert policy.init_cache(2, 65)["v"][0].shape[2] == 128
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].tokens, other.tokens)
        close.assert_same_forward(found[0].sampler_logp, other.sampler_logp)


def test_columns_first_for_a_kernel_of_steps():
    """A cache [B, C, G, K] in bfloat16, read by the kernel's own function, says what a cache of heads first says."""
    config = small_config()

    def step_fn(*given, **settings):
        with jax.numpy_dtype_promotion("standard"):  # jax.nn's own
            return attention_kernels.cudnn_step(*given, implementation="xla", **settings)

    heads = make_policy(config, compute_dtype=jnp.bfloat16, layout=caches.ON_GPU)
    columns = make_policy(config, compute_dtype=jnp.bfloat16, layout=caches.ON_GPU._replace(step_fn=step_fn))
    params, found = heads.init(jax.random.key(0)), []
    for policy in (heads, columns):
        cache, at = policy.init_cache(3, 10), 0
        positions, logits = jnp.maximum(jnp.cumsum(VALID, axis=1) - 1, 0), []
        for width in (4, 1, 1):  # the prompts, two tokens
            given = (PROMPTS, positions, VALID.astype(jnp.int32)) if width == 4 else (
                jnp.full((3, 1), 5 + at), positions[:, -1:] + at - 3, jnp.ones((3, 1), jnp.int32)
            )  # fmt: skip
            hidden, cache = policy.extend(policy.for_steps(params), cache, *given, at)
            logits.append(policy.unembed(params, hidden[:, -1]))
            at += width
        found.append(jnp.stack(logits))
    first, turned = columns.init_cache(3, 10), heads.init_cache(3, 10)
    assert first["k"][0].shape == first["v"][0].shape == (3, 64, config.num_kv_heads, config.head_dim)
    assert turned["k"][0].shape == (3, config.num_kv_heads, config.head_dim, 64)
    rounded = 10 * config.num_layers  # times that a number is rounded to bfloat16 on its way
    atol = rounded * float(jnp.finfo(jnp.bfloat16).eps) * float(jnp.abs(found[0]).max())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=atol)
    for numbers in ({"compute_dtype": jnp.float32}, {"compute_dtype": jnp.bfloat16, "cache_dtype": jnp.int8}):
        policy = make_policy(config, layout=caches.ON_GPU._replace(step_fn=step_fn), **numbers)
        assert policy.init_cache(3, 10)["k"][0].shape == turned["k"][0].shape  # the kernel takes 16 bits alone


def test_bytes():
    """A byte an entry and four a head: with 64 entries a head, little more than half of bfloat16."""
    config = small_config(head_dim=64)

    def size(**options):
        cache = jax.eval_shape(lambda: make_policy(config, compute_dtype=jnp.bfloat16, **options).init_cache(4, 32))
        return sum(x.size * x.dtype.itemsize for name in cache if name[0] in "kv" for x in cache[name])

    for few in (jnp.int8, jnp.float8_e4m3fn):
        assert size(cache_dtype=few) / size() == (64 + 4) / 128
