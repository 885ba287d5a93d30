"""Norms and rotations of heads as kernels, in interpret mode, against the plain functions, alone and in a decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import model_parallel, rules
from jaxrl_llm.models import attention
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_kernels, token_rows
from jaxrl_llm.models.kernels.grouped import grouped
from jaxrl_llm.models.kernels.token_rows import Waves
from jaxrl_llm.models.layers import rms_norm
from jaxrl_llm.planning import chips, compiled
from tests import close
from tests.models_for_tests import small_config

ROWS = attention_kernels.make_token_rows("pallas", platform="cpu")
WIDTH = 8
EPS = 1e-6


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of sixteen rows, of which the last of each sequence is not full."""
    monkeypatch.setattr(token_rows, "_NUMBERS", 16 * 24)


def _case(dtype, heads=3):
    """Rows of three heads, a scale of a row and of a head, a slope, positions and frequencies."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, grad, beside = (jax.random.normal(key, (2, 40, heads * WIDTH)).astype(dtype) for key in keys[:3])
    scale = 1.0 + 0.1 * jax.random.normal(keys[3], (heads * WIDTH,))
    return x, scale, grad, beside


def _waves():
    positions = jnp.stack([jnp.arange(40, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)[::-1]])
    cos, sin = attention._waves(positions, 50.0 ** -(np.arange(0, WIDTH, 2) / WIDTH))
    minus = np.where(np.arange(WIDTH) < WIDTH // 2, -1.0, 1.0).astype(np.float32)
    return (cos, sin), Waves(cos[:, :, 0], sin[:, :, 0] * minus[None, None])


def _assert_same(got, want):
    """Every bit of bfloat16; in float32 sums of a row are taken in another order."""
    if got.dtype == jnp.bfloat16:
        np.testing.assert_array_equal(got, want)
    else:
        close.assert_near(got, want, terms=3 * 24)


def test_a_row_by_hand():
    """The mean square of (3, 4) is 12.5; a head of (1, 2), a quarter of a turn on, is (-2, 1)."""
    rows, normed = ROWS.forked(jnp.array([[[3.0, 4.0]]]), jnp.array([1.0, 2.0]), 0.0)
    assert rows.tolist() == [[[3.0, 4.0]]]
    close.assert_near(normed, [[[3 / 12.5**0.5, 8 / 12.5**0.5]]], terms=8)
    quarter = Waves(jnp.zeros((1, 1, 2)), jnp.array([[[-1.0, 1.0]]]))
    assert ROWS.heads(jnp.array([[[1.0, 2.0, 3.0, 0.0]]]), None, quarter, 0.0).tolist() == [[[-2.0, 1.0, 0.0, 3.0]]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norms_and_their_gradients(dtype, short_blocks):
    """Rows and their gradients have the bits of the plain function in bfloat16; the scale's gradient is summed wide."""
    x, scale, grad, beside = _case(dtype)
    got, pull = jax.vjp(lambda x, scale: ROWS.forked(x, scale, EPS), x, scale)
    want, plain = jax.vjp(lambda x, scale: (x, rms_norm(x, scale, EPS)), x, scale)
    (of_x, of_scale), (wanted, _) = pull((beside, grad)), plain((beside, grad))
    _assert_same(got[1], want[1])
    _assert_same(of_x, wanted)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS)
    rounded = np.asarray(jnp.asarray(normed, jnp.float32).astype(dtype), np.float64)
    close.assert_near(of_scale, np.sum(np.asarray(grad, np.float64) * rounded, axis=(0, 1)), terms=80, magnitude=80.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_and_their_gradients(dtype, normed, short_blocks):
    """As norms and ``models.attention.rotate_by_product`` of each head."""
    x, scale, grad, _ = _case(dtype)
    scale = scale[:WIDTH] if normed else None
    (cos, sin), waves = _waves()

    def plain(x, scale):
        heads = x.reshape(2, 40, 3, WIDTH)
        heads = heads if scale is None else rms_norm(heads, scale, EPS)
        return attention._rotated(heads, cos, sin).reshape(x.shape)

    got, pull = jax.vjp(lambda x, scale: ROWS.heads(x, scale, waves, EPS), x, scale)
    want, pulled = jax.vjp(plain, x, scale)
    (of_x, of_scale), (wanted, of_wanted) = pull(grad), pulled(grad)
    _assert_same(got, want)
    _assert_same(of_x, wanted)
    if normed and dtype == jnp.float32:
        close.assert_near(of_scale, of_wanted, terms=3 * 80, magnitude=240.0)


def test_on_a_mesh(short_blocks):
    """Tokens are divided, and heads where they divide; sums of the devices add up to those of one."""
    mesh = meshes.parse_mesh("data=2,fsdp=2,tensor=2", jax.devices()[:8])
    parts = model_parallel.make_token_rows(mesh)
    assert parts.fits(4, 40) and not parts.fits(2, 40)
    x, scale, grad, beside = (jnp.concatenate([x] * 2) if x.ndim == 3 else x for x in _case(jnp.float32, heads=4))
    waves = Waves(*(jnp.concatenate([x] * 2) for x in _waves()[1]))
    for heads in (4, 3):  # three heads do not divide over two devices
        cut = slice(0, heads * WIDTH)

        def run(kernels, x, scale, grad, beside, waves):
            both, pull = jax.vjp(lambda x, scale: kernels.forked(x, scale, EPS), x, scale)
            turned, back = jax.vjp(lambda x, scale: kernels.heads(x, scale, waves, EPS), x, scale[:WIDTH])
            return both, pull((beside, grad)), turned, back(grad)

        given = (x[..., cut], scale[cut], grad[..., cut], beside[..., cut], waves)
        want = run(ROWS, *given)
        got = jax.jit(lambda *given: run(parts, *given))(*given)
        jax.tree.map(lambda a, b: close.assert_near(a, b, terms=4 * 160, magnitude=160.0), got, want)


@pytest.mark.parametrize(
    ("family", "changes", "spec"),
    [
        ("qwen3", {"head_dim": 128}, ""),
        ("llama", {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1}, ""),
        ("qwen3", {}, ""),  # heads too small for lanes: norms alone
        ("gemma3_text", {"head_dim": 128}, ""),
        ("gpt2", {}, ""),
        ("qwen3", {"head_dim": 128}, "data=2,fsdp=2,tensor=2"),
    ],
)
def test_a_decoder_with_them_is_the_decoder_without(family, changes, spec):
    """Hidden states and all gradients, all but products recomputed; what does not fit is left to the compiler."""
    config = small_config(family, **changes)
    plain = make_policy(config)
    params = plain.init(jax.random.key(1))
    options = {"token_rows": ROWS}
    if spec:
        mesh = meshes.parse_mesh(spec, jax.devices()[:8])
        options = model_parallel.on_mesh(mesh, attention.attend, grouped, token_rows=ROWS)
    policy = make_policy(config, **options, remat=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    tokens = jax.random.randint(jax.random.key(2), (8, 11), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(11, dtype=jnp.int32), tokens.shape)
    weights = jax.random.normal(jax.random.key(3), (*tokens.shape, config.hidden_size))

    def run(policy, params):
        def loss(params):
            hidden = policy.hidden(params, tokens, positions, jnp.ones_like(tokens))
            return jnp.sum(hidden * weights), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    slopes, want = run(plain, params)
    found, got = run(policy, rules.shard(params, mesh) if spec else params)
    close.assert_same_forward(got, want, config)
    close.assert_same_sums(found, slopes, close.gradient_sums(config, 8, 11))


def test_which_programs_have_them():
    """Passes over whole rows, not a cache that is extended; none for rows that do not divide over the devices."""
    config = small_config("qwen3", head_dim=128)
    tokens, shape = jnp.ones((2, 11), jnp.int32), (2, 11)

    def kernels(token_rows):
        policy = make_policy(config, token_rows=token_rows)
        params = jax.eval_shape(policy.init, jax.random.key(0))
        hidden = str(jax.make_jaxpr(policy.hidden)(params, tokens, tokens, tokens))
        extended = str(
            jax.make_jaxpr(lambda p: policy.extend(p, policy.init_cache(*shape), tokens, tokens, tokens, 0))(params)
        )
        return hidden.count("pallas_call"), extended.count("pallas_call")

    assert kernels(ROWS) == (4, 0)  # two norms of a layer, its queries and its keys; the layers are a loop
    assert kernels(ROWS._replace(fits=lambda rows, columns: False)) == (0, 0)
    assert attention_kernels.make_token_rows("xla", platform="tpu") is None


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v7x:2x2x1"])
def test_the_compiler_has_them_for_four_generations(name):
    """Forward and backward, tokens and heads divided; the last block of 1,000 rows is not full, and heads are 64."""
    kernels = model_parallel.make_token_rows(meshes.parse_mesh("fsdp=4,tensor=2", compiled.devices(chips.parse(name))))
    x = jax.ShapeDtypeStruct((4, 1000, 64 * 128), jnp.bfloat16)
    row, head = (jax.ShapeDtypeStruct((width,), jnp.float32) for width in (64 * 128, 128))
    waves = Waves(*[jax.ShapeDtypeStruct((4, 1000, 128), jnp.float32)] * 2)

    def loss(x, row, head, waves):
        rows, normed = kernels.forked(x, row, EPS)
        return jnp.sum((rows + kernels.heads(kernels.heads(normed, head, waves, EPS), None, waves, EPS)) ** 2)

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, row, head, waves)
    assert lowered.as_text().count("tpu_custom_call") == 6
    assert lowered.compile().memory_analysis().temp_size_in_bytes > 0
