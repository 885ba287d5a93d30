"""Attention by other hands: values and gradients of the reference, in the kernel's interpret mode."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import model_parallel, rules
from jaxrl_llm.models import attention
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_kernels, attention_pallas
from jaxrl_llm.planning import chips, compiled
from tests import close
from tests.models_for_tests import small_config, small_model

SUMS = close.attention_sums(20, 27, 8, 3)  # of ``_case``


def _case(rows=20, columns=27, dtype=jnp.float32):
    """Queries that see some keys, none, or those of their own segment; six heads on two."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, rows, 6, 8), (2, 2, columns, 8), (2, 2, columns, 8), (2, rows, 6, 8))
    q, k, v, weights = (
        jax.random.normal(key, s, jnp.float32).astype(dtype) for key, s in zip(keys, shapes, strict=True)
    )
    places, lanes = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
    causal = (lanes <= places + columns - rows) & (lanes > places - 9)
    mask = jnp.stack([causal, (lanes // 9 == places // 7) & (lanes != 4)])
    return (q, k, v), mask.at[1, 3].set(False), weights


def _out_and_gradients(attend, arrays, mask, weights, **settings):
    seen = mask.any(axis=2)[:, :, None, None]  # what a query without keys gives is nobody's business

    def loss(arrays):
        out = jnp.where(seen, attend(*arrays, mask, **settings), jnp.zeros((), weights.dtype))
        return jnp.sum((out * weights).astype(jnp.float32)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, gradients


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("block", [8, 128])
def test_the_kernel_is_the_reference(block, softcap):
    case = _case()
    want = _out_and_gradients(attention.attend, *case, softcap=softcap, scale=0.5)
    got = _out_and_gradients(attention_pallas.attend, *case, softcap=softcap, scale=0.5, block=block, interpret=True)
    close.assert_same_sums(got, want, SUMS)


def test_the_kernel_in_bfloat16():
    case = _case(dtype=jnp.bfloat16)
    want = _out_and_gradients(attention.attend, *case)
    got = _out_and_gradients(attention_pallas.attend, *case, block=16, interpret=True)
    # rounded to bfloat16: the probabilities, the outputs, and both on the way back; float32 sums are nothing beside it
    four = 4 * float(jnp.finfo(jnp.bfloat16).eps)
    got, want = jax.tree.map(lambda x: np.asarray(x, np.float32), (got, want))
    atol = four * max(np.abs(x).max() for x in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


@pytest.mark.parametrize("columns", [20, 27])
def test_heads_that_are_blocks_of_lanes(columns):
    """Heads of 128 are read beside each other, without turning; keys too where there are as many as queries."""
    keys = jax.random.split(jax.random.key(4), 4)
    shapes = ((2, 20, 6, 128), (2, 2, columns, 128), (2, 2, columns, 128), (2, 20, 6, 128))
    *arrays, weights = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
    mask = jnp.arange(columns)[None, None, :] <= jnp.arange(20)[None, :, None] + jnp.zeros((2, 1, 1), jnp.int32)
    want = _out_and_gradients(attention.attend, tuple(arrays), mask, weights)
    got = _out_and_gradients(attention_pallas.attend, tuple(arrays), mask, weights, block=8, interpret=True)
    close.assert_same_sums(got, want, close.attention_sums(20, columns, 128, 3))


@pytest.mark.parametrize("rotary", [8, 4])
def test_rotation_by_a_product_is_rotation(rotary):
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 8), jnp.float32)
    places = jnp.asarray([[*range(7)], [0, 0, 3, 4, 900, 5, 6]], jnp.int32)
    inverse = 100.0 ** -(np.arange(0, rotary, 2) / rotary)
    back = jax.random.normal(jax.random.key(1), x.shape, jnp.float32)
    for dtype, sums in ((jnp.float32, 2), (jnp.bfloat16, 0)):  # of two products; bfloat16 is rounded from the same sum
        want, wanted = jax.vjp(lambda x: attention.rotate(x, places, inverse), x.astype(dtype))
        got, gotten = jax.vjp(lambda x: attention.rotate_by_product(x, places, inverse), x.astype(dtype))
        close.assert_same_sums(got.astype(jnp.float32), want.astype(jnp.float32), sums)
        (dgot,), (dwant,) = gotten(back.astype(dtype)), wanted(back.astype(dtype))
        assert dgot.dtype == dtype
        close.assert_same_sums(dgot.astype(jnp.float32), dwant.astype(jnp.float32), sums)


@pytest.mark.parametrize("window", [None, 5])
def test_positions_and_segments_in_place_of_a_mask(window):
    """Packed rows with padding before and behind, queries after the keys: the kernel works the mask out itself."""
    arrays, _, weights = _case()
    key_segments = jnp.asarray([[0] * 3 + [1] * 9 + [2] * 13 + [0] * 2, [1] * 20 + [3] * 7], jnp.int32)
    key_places = jnp.asarray([[0, 0, 0, *range(9), *range(13), 0, 0], [*range(20), *range(7)]], jnp.int32)
    some = slice(27 - 20, None)
    limit = {} if window is None else {"window": window}
    seen = attention.Seen(key_places[:, some], key_segments[:, some], key_places, key_segments, **limit)
    mask = attention.attention_mask(*seen[:4])
    if window:
        mask &= attention.within_window(seen.query_positions, seen.key_positions, window)
    np.testing.assert_array_equal(seen.dense(), mask)
    want = _out_and_gradients(attention.attend, arrays, mask, weights)

    def attend(q, k, v, mask, **settings):
        return attention_pallas.attend(q, k, v, seen, block=8, interpret=True, **settings)

    got = _out_and_gradients(attend, arrays, mask, weights)
    close.assert_same_sums(got, want, SUMS)


def test_a_query_that_sees_nobody_is_zero_and_finite():
    arrays, mask, weights = _case()

    @jax.jit
    def run(q):
        def loss(q):
            out = attention_pallas.attend(q, *arrays[1:], mask, block=32, interpret=True)
            return jnp.sum(out * weights), out

        return jax.value_and_grad(loss, has_aux=True)(q)

    (_, out), gradients = run(arrays[0])
    assert np.isfinite(out).all() and np.isfinite(gradients).all()
    assert not out[1, 3].any() and not gradients[1, 3].any()
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        attention_pallas.attend(*arrays, mask, block=0)


def test_cudnn_is_given_the_reference_s_arguments(monkeypatch):
    """Through the same call with XLA in the place of cuDNN, which is not there without a GPU."""
    monkeypatch.setattr(attention_kernels, "FEW", 1)
    arrays, mask, weights = _case()
    want = _out_and_gradients(attention.attend, arrays, mask, weights, scale=0.3)
    got = _out_and_gradients(attention_kernels.cudnn, arrays, mask, weights, scale=0.3, implementation="xla")
    close.assert_same_sums(got, want, SUMS)
    # float32, soft caps and few queries are no work for it
    jax.tree.map(
        np.testing.assert_array_equal,
        _out_and_gradients(attention_kernels.cudnn, arrays, mask, weights, scale=0.3),
        want,
    )


def test_columns_of_their_own_are_causal_by_cudnn(monkeypatch):
    """As many queries as keys: half of the products need not be made, and what the mask hides stays hidden."""
    monkeypatch.setattr(attention_kernels, "FEW", 1)
    arrays, _, weights = _case(20, 20)
    segments = jnp.stack([jnp.repeat(jnp.array([0, 1]), jnp.array([6, 14])), jnp.arange(20) // 7 + 1])
    places = jnp.broadcast_to(jnp.arange(20)[None], (2, 20))
    mask = attention.attention_mask(places, segments, places, segments)
    want = _out_and_gradients(attention.attend, arrays, mask, weights)
    got = _out_and_gradients(attention_kernels.cudnn, arrays, mask, weights, implementation="xla")
    close.assert_same_sums(got, want, SUMS)
    asked = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, is_causal, **__: asked.append(is_causal) or q)
    attention_kernels.cudnn(*arrays, mask, implementation="xla")
    attention_kernels.cudnn(*_case()[0], _case()[1], implementation="xla")  # more keys than queries
    assert asked == [True, False]


def test_what_cudnn_does_not_take_is_made_to_fit_or_left_to_others(monkeypatch):
    """Odd numbers of queries and keys become even; heads that are too wide, or no multiple of 8, are XLA's."""
    monkeypatch.setattr(attention_kernels, "FEW", 1)
    asked = []
    other = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda q, k, *a, **b: asked.append((q.shape[1], k.shape[1])) or other(q, k, *a, **b),
    )
    arrays, _, weights = _case(19, 19)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((19, 19), bool)), (2, 19, 19))
    want = _out_and_gradients(attention.attend, arrays, mask, weights)
    got = _out_and_gradients(attention_kernels.cudnn, arrays, mask, weights, implementation="xla")
    close.assert_same_sums(got, want, SUMS)
    assert set(asked) == {(20, 20)}
    device = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert [attention_kernels._heads_fit(n) for n in (4, 64, 100, 128, 256)] == [False, True, False, True, False]
    device.compute_capability = "10.0"
    assert [attention_kernels._heads_fit(n) for n in (128, 256, 264)] == [True, True, False]
    for other in ("7.5", "gfx942"):
        device.compute_capability = other
        assert not attention_kernels._heads_fit(64)
    asked.clear()
    narrow = [x[..., :4] for x in arrays]
    for run, given in ((attention_kernels.cudnn, mask), (attention_kernels.cudnn_step, mask[:, 18:])):
        q = narrow[0][:, -given.shape[1] :]
        np.testing.assert_array_equal(
            run(q, *narrow[1:], given, implementation="xla"), attention.attend(q, *narrow[1:], given)
        )
    assert not asked


def test_a_step_by_cudnn_reads_what_is_there():
    """One query of each row to a cache whose columns come first; rows that see nothing do not stop it."""
    (q, k, v), _, _ = _case(1, 27)
    lanes = jnp.arange(27)
    mask = jnp.stack([(lanes > 3) & (lanes < 20), lanes < 0])[:, None]
    got = attention_kernels.cudnn_step(q, k, v, mask, scale=0.4, implementation="xla")
    want = attention.attend(q, k, v, mask, scale=0.4)
    close.assert_same_sums(got[0], want[0], SUMS)
    assert np.isfinite(np.asarray(got)).all()
    hidden = k.at[:, :, 20:].set(jnp.nan)  # of row 0 no column behind the last one seen is read
    again = attention_kernels.cudnn_step(q[:1], hidden[:1, :, :20], v[:1, :, :20], mask[:1, :, :20], scale=0.4,
                                         implementation="xla")  # fmt: skip
    close.assert_same_sums(again, want[:1], SUMS)
    np.testing.assert_array_equal(
        attention_kernels.cudnn_step(q, k, v, mask, softcap=2.0), attention.attend(q, k, v, mask, softcap=2.0)
    )


def test_who_computes_where():
    assert attention_kernels.make_attend("auto", platform="gpu") is attention_kernels.cudnn
    assert attention_kernels.make_attend("xla", platform="tpu") is attention.attend
    assert attention_kernels.make_attend("auto", platform="tpu") is not attention.attend
    assert attention_kernels.make_layout(platform="gpu").step_fn is attention_kernels.cudnn_step
    assert attention_kernels.make_layout(platform="tpu") is None
    with pytest.raises(ValueError, match="attention='flash' is not one of auto, xla, pallas, cudnn"):
        attention_kernels.make_attend("flash")


@pytest.mark.parametrize(
    "family, spec",
    [("gemma2", ""), ("qwen3", "data=2,context=2,tensor=2"), pytest.param("qwen3", "fsdp=8", marks=pytest.mark.slow)],
)
def test_a_decoder_and_a_mesh(monkeypatch, family, spec):
    """Log-probabilities and gradients of the whole decoder; on a mesh each device has its blocks."""
    monkeypatch.setattr(attention_kernels, "FEW", 1)
    config, params = small_config(family), small_model(family)[1]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 12)), jnp.int32)
    segments = jnp.ones((8, 12), jnp.int32).at[1, :3].set(0).at[2, 6:].set(2)
    columns = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (8, 12))
    positions = jnp.where(segments == 2, columns - 6, columns)

    def step(policy, params):
        def loss(params):
            logits = policy.unembed(params, policy.hidden(params, tokens, positions, segments))
            return jnp.sum(jnp.where(segments[..., None] > 0, jnp.sin(logits), 0.0))

        return jax.jit(jax.value_and_grad(loss))(params)

    want = step(make_policy(config), params)
    run = attention_kernels.make_attend("pallas", platform="cpu")
    options = {"attend_fn": run}
    if spec:
        mesh = meshes.parse_mesh(spec)
        params = rules.shard(params, mesh)
        options = {
            "place": rules.make_place(mesh),
            "attend_fn": model_parallel.make_attend(mesh, run, attention.attend),
        }
    got = step(make_policy(config, **options), params)
    close.assert_same_sums(
        got, want, close.gradient_sums(config, *tokens.shape) + tokens.size * config.padded_vocab_size
    )


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
def test_the_kernel_compiles_for_a_tpu():
    """Forward, and the gradients of queries and of keys: three kernels by the TPU's own compiler."""
    device = compiled.devices(chips.parse("v5e:2x4"))[:1]
    sharding = NamedSharding(Mesh(np.asarray(device), ("x",)), PartitionSpec())
    shapes = ((2, 1024, 4, 128), (2, 2, 1024, 128), (2, 2, 1024, 128))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    mask = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bool_, sharding=sharding)

    def loss(q, k, v, mask):
        return jnp.sum(attention_pallas.attend(q, k, v, mask, softcap=30.0).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, mask).compile().as_text()
    assert text.count("tpu_custom_call") >= 3
