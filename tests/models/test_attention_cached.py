"""Attention to a layer of a stacked cache: the kernel in interpret mode against the plain path, alone, in a decoder."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import model_parallel, rules
from jaxrl_llm.models import attention, cache
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_cached, attention_kernels
from jaxrl_llm.models.kernels.grouped import grouped
from jaxrl_llm.rollout.generate import generate
from tests import close
from tests.models_for_tests import small_config, small_model

PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1], [3, 3, 5, 7]], jnp.int32)
SETTINGS = {"group_size": 2, "max_new_tokens": 6, "eos_ids": (2, 5)}
SUMS = 8 + 2 * 48  # the scores, their softmax and the mix


def _case(queries=1, columns=48, dtype=jnp.float32):
    """Six heads on two, three layers, four rows; the last columns hold what must never be read."""
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (4, queries, 6, 8), dtype)
    k, v = (jax.random.normal(key, (3, 4, 2, columns, 8), dtype) for key in keys[1:3])
    filled = columns - 13
    mask = jax.random.bernoulli(keys[3], 0.6, (4, queries, columns)) & (jnp.arange(columns) < filled)[None, None]
    return q, k, v, mask.at[1, 0, :20].set(False).at[:, :, 0].set(True), filled


@pytest.mark.parametrize("block", [8, 512])
@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (1, 1.5), (5, None)])
def test_the_kernel_is_the_reference_on_a_layer_cut_out(block, queries, softcap):
    q, k, v, mask, filled = _case(queries)
    for layer in (0, 2):
        settings = {"softcap": softcap, "scale": 0.4}
        want = attention.attend(q, k[layer], v[layer], mask, **settings)
        arguments = (q, k, v, mask, jnp.int32(layer), jnp.int32(filled))
        got = attention_cached.attend_layer(*arguments, **settings, block=block, interpret=True)
        close.assert_near(got, want, terms=SUMS)
        cut = attention_cached.cut_out(attention.attend)(*arguments, **settings)
        np.testing.assert_array_equal(cut, want)


def test_in_bfloat16():
    q, k, v, mask, filled = _case(dtype=jnp.bfloat16)
    want = attention.attend(q, k[1], v[1], mask)
    got = attention_cached.attend_layer(q, k, v, mask, jnp.int32(1), jnp.int32(filled), block=16, interpret=True)
    eps = float(jnp.finfo(jnp.bfloat16).eps)  # the weights and the mix are each rounded to it
    largest = float(jnp.abs(v[1]).max())
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=2 * eps * largest)


FEW = [jnp.int8, jnp.float8_e4m3fn]


def _few_bits(k, v, few=jnp.int8):
    """Keys and values as numbers of a byte and scales, and what they stand for."""
    (k, k_scale), (v, v_scale) = (cache.quantised(x, few) for x in (k, v))
    real = (x.astype(jnp.float32) * scale[..., None] for x, scale in ((k, k_scale), (v, v_scale)))
    return (k, v), (k_scale, v_scale), tuple(real)


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_numbers_of_a_byte_are_read_as_such(softcap, few):
    """Alone, on a mesh and cut out: scores and weights are scaled in the place of keys and values."""
    q, k, v, mask, filled = _case()
    (k, v), scales, real = _few_bits(k, v, few)
    want = attention.attend(q, *(x[1] for x in real), mask, softcap=softcap)
    places = (mask, jnp.int32(1), jnp.int32(filled))
    run = partial(attention_cached.attend_layer, block=16, interpret=True)
    for fn in (run, attention_cached.cut_out(attention.attend)):
        close.assert_near(fn(q, k, v, *places, *scales, softcap=softcap), want, terms=SUMS)
    mesh = meshes.parse_mesh("data=2,fsdp=2,tensor=2")
    on_mesh = model_parallel.make_cached(
        mesh, attention_kernels.make_cached("pallas", platform="cpu"), attention.attend
    )
    got = jax.jit(partial(on_mesh, softcap=softcap))(q, k, v, *places, k_scale=scales[0], v_scale=scales[1])
    close.assert_near(got, want, terms=SUMS)
    behind = [x.at[:, :, :, filled:].set(127) for x in (k, v)]
    wild = [x.at[:, :, :, filled:].set(jnp.nan) for x in scales]
    np.testing.assert_array_equal(run(q, *behind, *places, *wild), run(q, k, v, *places, *scales))


@pytest.mark.parametrize("few_bits", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.slow)])
def test_a_rollout_reads_its_cache_of_a_byte_in_place(few_bits):
    """As with a cache that is cut out and made wide, and near that of all bits."""
    _, params, config = small_model("qwen3")
    pallas = {"name": "pallas", "platform": "cpu"}
    options = {"attend_fn": attention_kernels.make_attend(**pallas), "rows_fn": attention_kernels.make_rows(**pallas)}
    read = attention_kernels.make_cached(**pallas)
    few, cut = (make_policy(config, cache_dtype=few_bits, cached_fn=fn, **options)
                for fn in (read, attention_cached.cut_out(attention.attend)))  # fmt: skip
    assert jax.eval_shape(lambda: few.init_cache(2, 9))["k"].dtype == few_bits
    got, want, wide = (
        _rollout(policy, params) for policy in (few, cut, make_policy(config, cached_fn=read, **options))
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    close.assert_same_forward(got.sampler_logp, want.sampler_logp, config)
    gap = np.abs(got.sampler_logp - wide.sampler_logp)[:, PROMPTS.shape[1]]
    assert gap.max() == 0.0  # a prompt sees its own keys with all bits
    jaxpr = str(jax.make_jaxpr(lambda p: _rollout(few, p))(params))
    assert "attend_layer" in jaxpr


def test_beside_the_kernel_a_pass_without_a_gradient_takes_layers_in_a_loop():
    """Those of a pass with one are apart, as a loop would copy what they keep; the values are the same."""
    config = dataclasses.replace(small_config("qwen3"), num_layers=cache.UNROLLED + 1)
    pallas = {"name": "pallas", "platform": "cpu"}
    kernels = {
        "attend_fn": attention_kernels.make_attend(**pallas),
        "cached_fn": attention_kernels.make_cached(**pallas),
    }
    policy = make_policy(config, **kernels)
    assert make_policy(config).for_scores().hidden_alone is None
    params = policy.init(jax.random.key(0))
    rows = PROMPTS, jnp.maximum(jnp.cumsum(PROMPTS > 0, axis=1) - 1, 0), (PROMPTS > 0).astype(jnp.int32)
    apart, looped = (jax.make_jaxpr(p.hidden)(params, *rows) for p in (policy, policy.for_scores()))
    turns = [next(e.params["unroll"] for e in x.eqns if e.primitive.name == "scan") for x in (apart, looped)]
    assert turns == [config.num_layers, 1]
    there = np.asarray(rows[2], bool)
    got, want = (np.asarray(p.hidden(params, *rows))[there] for p in (policy.for_scores(), policy))
    close.assert_same_forward(got, want, config)


def test_who_sees_nobody_gets_zeros():
    q, k, v, mask, filled = _case()
    out = attention_cached.attend_layer(
        q, k, v, mask.at[2].set(False), jnp.int32(0), jnp.int32(filled), block=16, interpret=True
    )
    assert not out[2].any() and np.isfinite(out).all() and out[0].any()


@pytest.mark.parametrize("run", [partial(attention_cached.attend_layer, block=16, interpret=True),
                                 attention_cached.cut_out(attention.attend)])  # fmt: skip
def test_what_lies_behind_the_filled_columns_may_be_anything(run):
    """Neither in the block in which they end nor in those that follow, and whatever the mask says."""
    q, k, v, mask, filled = _case()
    mask = mask & (jnp.arange(k.shape[3]) < filled)[None, None]
    want = run(q, k, v, mask, jnp.int32(1), jnp.int32(filled))
    k, v = (x.at[:, :, :, filled:].set(jnp.nan) for x in (k, v))
    np.testing.assert_array_equal(run(q, k, v, mask, jnp.int32(1), jnp.int32(filled)), want)


def test_blocks_divide_the_columns_and_fit():
    assert attention_cached._columns(2048, 512, 4096) == 512
    assert attention_cached._columns(1152, 512, 4096) == 384  # a multiple of 128 that divides
    assert attention_cached._columns(2048, 512, 2 * 32 * 256 * 2) == 128  # many heads: less
    assert attention_cached._columns(48, 512, 64) == 48


def test_rows_are_repeated_side_by_side():
    x = jax.random.normal(jax.random.key(0), (3, 4, 2, 24, 8), jnp.float32)
    want = jnp.repeat(x, 3, axis=1)
    np.testing.assert_array_equal(attention_cached.repeat_rows(x, 3, 24, interpret=True), want)
    run = attention_kernels.make_rows("pallas", platform="cpu")
    mesh = meshes.parse_mesh("data=4,tensor=2")
    got = jax.jit(lambda x: model_parallel.make_rows(mesh, run)(x, 3, 72))(x)
    assert got.shape == (3, 12, 2, 72, 8)
    np.testing.assert_array_equal(got[:, :, :, :24], want)
    few = x[:, :3]  # do not divide over four devices
    np.testing.assert_array_equal(model_parallel.make_rows(mesh, run)(few, 3, 72)[:, :, :, :24], want[:, :9])
    assert attention_kernels.make_rows("auto", platform="cpu") is None


def test_who_takes_the_kernel():
    assert attention_kernels.make_cached("auto", platform="cpu") is None
    assert attention_kernels.make_cached("auto", platform="gpu") is None
    assert attention_kernels.make_cached("xla", platform="tpu") is None
    assert attention_kernels.make_cached("auto", platform="tpu") is not None


def _rollout(policy, params):
    keys = jax.random.split(jax.random.key(3), 8)
    return jax.jit(lambda p: generate(policy, p, PROMPTS, PROMPTS > 0, keys, **SETTINGS))(params)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_rollout_with_the_kernel_is_one_without(family):
    """Gemma's layers differ in their windows, and cap their scores."""
    policy, params, config = small_model(family)
    pallas = {"name": "pallas", "platform": "cpu"}
    other = make_policy(
        config, attend_fn=attention_kernels.make_attend(**pallas), cached_fn=attention_kernels.make_cached(**pallas),
        rows_fn=attention_kernels.make_rows(**pallas),
    )  # fmt: skip
    cache = jax.eval_shape(lambda: other.init_cache(2, 9))
    assert cache["k"].shape == (config.num_layers, 2, config.num_kv_heads, attention_cached.TILE, config.head_dim)
    want, got = _rollout(policy, params), _rollout(other, params)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    close.assert_same_forward(got.sampler_logp, want.sampler_logp, config)


@pytest.mark.parametrize("kernel", [True, False])
def test_columns_that_are_written_in_a_ring_are_all_seen(kernel):
    """As ``rollout.slots`` writes them: a token in an early column sees those that lie behind it."""
    policy, params, config = small_model("qwen3")
    attend_fn = attention_kernels.make_attend("pallas", platform="cpu")
    by_kernel = attention_kernels.make_cached("pallas", platform="cpu")
    cached_fn = by_kernel if kernel else attention_cached.cut_out(attend_fn)
    other = make_policy(config, attend_fn=attend_fn, cached_fn=cached_fn)

    @partial(jax.jit, static_argnums=0)
    def last(policy):
        places, line = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), PROMPTS.shape), PROMPTS[:, :1]
        _, cache = policy.extend(params, policy.init_cache(4, 12), PROMPTS, places, jnp.ones_like(PROMPTS), 0)
        for place, column in ((4, 9), (5, 6)):
            given = line, jnp.full_like(line, place), jnp.ones_like(line)
            hidden, cache = policy.extend(params, cache, *given, column)
        return hidden

    close.assert_same_forward(last(other), last(policy), config)


def test_the_kernel_on_a_mesh_is_the_kernel_alone():
    q, k, v, mask, filled = _case()
    run = attention_kernels.make_cached("pallas", platform="cpu")
    mesh = meshes.parse_mesh("data=2,fsdp=2,tensor=2")
    on_mesh = model_parallel.make_cached(mesh, run, attention.attend)
    want = run(q, k, v, mask, jnp.int32(1), jnp.int32(filled))
    stacked = NamedSharding(mesh, PartitionSpec(None, meshes.BATCH, "tensor"))
    k, v = (jax.device_put(x, stacked) for x in (k, v))
    close.assert_near(jax.jit(on_mesh)(q, k, v, mask, 1, filled), want, terms=SUMS)
    # three rows do not divide over four: the compiler's own way
    got = jax.jit(on_mesh)(q[:3], k[:, :3], v[:, :3], mask[:3], 1, filled)
    close.assert_near(got, want[:3], terms=SUMS)


def test_a_decoder_on_a_mesh_reads_its_cache_in_place():
    config = small_config("llama", num_layers=8)
    mesh = meshes.parse_mesh("data=2,tensor=2", jax.devices()[:4])
    makers = (attention_kernels.make_attend, attention_kernels.make_cached, attention_kernels.make_rows)
    attend_fn, *others = (make("pallas", platform="cpu") for make in makers)
    options = model_parallel.on_mesh(mesh, attend_fn, grouped, attention.attend, *others)
    policy = make_policy(config, **options)
    params = policy.init(jax.random.key(1))
    want = _rollout(make_policy(config), params)
    got = _rollout(policy, rules.shard(params, mesh))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    close.assert_same_forward(got.sampler_logp, want.sampler_logp, config)
