import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.models import quantised
from jaxrl_llm.models.attention import rope_frequencies
from jaxrl_llm.models.cache import ON_GPU
from jaxrl_llm.models.config import RopeScaling
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_kernels
from tests import close
from tests.models_for_tests import ALL_FAMILIES, dense_rows, small_config, small_model


def _tokens(shape, vocab=24, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, shape), jnp.int32)


def _logits(policy, params, tokens, positions, segments):
    return policy.unembed(params, policy.hidden(params, tokens, positions, segments))


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 2), (1, 2)])
def test_padding_changes_nothing(family, left, right):
    policy, params, _ = small_model(family)
    tokens = _tokens((2, 6))
    segments, positions = dense_rows(2, 6)
    plain = _logits(policy, params, tokens, positions, segments)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (left, right)), constant_values=fill)  # noqa: E731
    padded = _logits(policy, params, pad(tokens, 7), pad(positions, 0), pad(segments, 0))
    close.assert_same_forward(padded[:, left : left + 6], plain, family, columns=6 + left + right)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_packed_equals_alone(family):
    policy, params, _ = small_model(family)
    tokens = _tokens((1, 9))
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = _logits(policy, params, tokens, positions, segments)
    for part in (slice(0, 4), slice(4, 9)):
        alone = _logits(policy, params, tokens[:, part], positions[:, part], jnp.ones_like(segments[:, part]))
        close.assert_same_forward(packed[:, part], alone, family, columns=9)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("cuts", [(1,), (4,), (3, 1, 1)])
def test_cache_equals_full_forward_on_ragged_rows(family, cuts):
    policy, params, _ = small_model(family)
    tokens = _tokens((3, 8))
    valid = jnp.arange(8)[None, :] >= jnp.array([0, 2, 5])[:, None]  # left padding
    segments = valid.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    full = _logits(policy, params, tokens, positions, segments)
    cache, start, parts = policy.init_cache(3, 8), 0, []
    for width in (*cuts, 8 - sum(cuts)):
        part = slice(start, start + width)
        hidden, cache = policy.extend(params, cache, tokens[:, part], positions[:, part], segments[:, part], start)
        parts.append(policy.unembed(params, hidden))
        start += width
    got = jnp.concatenate(parts, axis=1)
    keep = np.asarray(valid)
    close.assert_same_forward(np.asarray(got)[keep], np.asarray(full)[keep], family, columns=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [True, pytest.param(jax.checkpoint_policies.dots_with_no_batch_dims_saveable, marks=pytest.mark.slow)]
)
def test_remat_changes_neither_value_nor_gradient(remat):
    config = small_config()
    plain, recomputed = make_policy(config), make_policy(config, remat=remat)
    params, tokens = plain.init(jax.random.key(0)), _tokens((2, 5))
    segments, positions = dense_rows(2, 5)

    def loss(policy):
        return lambda p: logprobs.token_logprobs(_logits(policy, p, tokens, positions, segments), tokens).sum()

    a, b = (jax.value_and_grad(loss(policy))(params) for policy in (plain, recomputed))
    close.assert_same_sums(b, a, close.gradient_sums(config, 2, 5))


def test_what_is_kept_beside_kernels_goes_into_no_stack():
    """So few layers are compiled one by one, unless they are recomputed; nothing of value and gradient changes."""
    config = small_config(num_layers=8)
    pallas = {"name": "pallas", "platform": "cpu"}  # of so few columns attention itself is XLA's
    kernels = {
        "attend_fn": attention_kernels.make_attend(**pallas),
        "cached_fn": attention_kernels.make_cached(**pallas),
    }
    tokens, (segments, positions) = _tokens((2, 5)), dense_rows(2, 5)
    params = make_policy(config).init(jax.random.key(0))

    def run(**options):
        policy = make_policy(config, **options)

        def loss(params):
            return logprobs.token_logprobs(_logits(policy, params, tokens, positions, segments), tokens).sum()

        return jax.jit(jax.value_and_grad(loss)).lower(params)

    kept, again, plain = run(**kernels), run(**kernels, remat=True), run()
    assert "while" not in kept.as_text() and "while" in again.as_text() and "while" in plain.as_text()
    want = again.compile()(params)
    close.assert_same_sums(kept.compile()(params), want, close.gradient_sums(config, *tokens.shape))


@pytest.mark.slow
def test_what_a_policy_keeps_costs_memory():
    """All activations, the products with weights, or only what goes from block to block."""
    config = small_config(num_layers=8, hidden_size=64, intermediate_size=256, head_dim=16)
    segments, positions = dense_rows(8, 64)

    def temporaries(remat):
        policy = make_policy(config, remat=remat)
        shapes = jax.eval_shape(policy.init, jax.random.key(0))

        def loss(params, tokens):
            return jnp.sum(policy.hidden(params, tokens, positions, segments))

        program = jax.jit(jax.grad(loss)).lower(shapes, jax.ShapeDtypeStruct((8, 64), jnp.int32)).compile()
        return program.memory_analysis().temp_size_in_bytes

    everything, products, nothing = (
        temporaries(r) for r in (False, jax.checkpoint_policies.dots_with_no_batch_dims_saveable, True)
    )
    assert nothing < 0.8 * products and products < 0.8 * everything, (nothing, products, everything)


def test_padded_vocabulary_rows_cannot_be_drawn():
    config = small_config(padded_vocab_size=32)
    policy = make_policy(config)
    params = policy.init(jax.random.key(0))
    segments, positions = dense_rows(1, 3)
    logits = _logits(policy, params, _tokens((1, 3)), positions, segments)
    assert logits.shape[-1] == 32 and bool(jnp.all(logits[..., 24:] == -jnp.inf))
    cut = dict(params, embed=params["embed"][:24])
    plain = _logits(make_policy(small_config()), cut, _tokens((1, 3)), positions, segments)
    close.assert_same_forward(logits[..., :24], plain, config)


def test_bfloat16_compute_keeps_float32_logits_close():
    policy, params, config = small_model()
    segments, positions = dense_rows(2, 6)
    args = (params, _tokens((2, 6)), positions, segments)
    rough = _logits(make_policy(config, compute_dtype=jnp.bfloat16), *args)
    exact = _logits(policy, *args)
    assert rough.dtype == jnp.float32
    # eight bits of mantissa through two layers
    assert float(jnp.max(jnp.abs(rough - exact))) < 0.05 * float(jnp.max(jnp.abs(exact))) + 0.05


def test_linear_rope_scaling_divides_positions():
    scaled = small_config("llama", rope_scaling=RopeScaling("linear", 2.0))
    np.testing.assert_array_equal(rope_frequencies(scaled) * 2, rope_frequencies(small_config("llama")))


@pytest.mark.slow
def test_seeds_are_an_axis_of_the_parameters():
    """Decode under vmap over parameters equals each model alone."""
    policy = make_policy(small_config())
    many = jax.vmap(policy.init)(jax.random.split(jax.random.key(0), 3))
    tokens = _tokens((2, 4))
    segments, positions = dense_rows(2, 4)

    def run(params):
        _, cache = policy.extend(
            params, policy.init_cache(2, 4), tokens[:, :3], positions[:, :3], segments[:, :3], jnp.int32(0)
        )
        hidden, _ = policy.extend(params, cache, tokens[:, 3:], positions[:, 3:], segments[:, 3:], jnp.int32(3))
        return policy.unembed(params, hidden)

    together = jax.jit(jax.vmap(run))(many)
    for i in range(3):
        alone = run(jax.tree.map(lambda x, i=i: x[i], many))
        close.assert_same_forward(together[i], alone, columns=4)


def test_repeated_cache_continues_every_copy_alike():
    policy, params, _ = small_model()
    tokens = _tokens((2, 4))
    segments, positions = dense_rows(2, 4)
    _, cache = policy.extend(params, policy.init_cache(2, 5), tokens, positions, segments, 0)
    step = lambda rows, cache: policy.extend(  # noqa: E731
        params, cache, jnp.full((rows, 1), 3), jnp.full((rows, 1), 4), jnp.ones((rows, 1), jnp.int32), 4
    )
    one, _ = step(2, cache)
    many, _ = step(6, policy.repeat_cache(cache, 3))
    close.assert_same_forward(many, jnp.repeat(one, 3, axis=0), columns=5)


@pytest.mark.slow
def test_embedding_gradient_of_bfloat16_compute_adds_up_in_float32():
    """A token that occurs 512 times: a bfloat16 sum would stop growing at 256 ones."""
    config = small_config(num_layers=1)
    policy = make_policy(config, compute_dtype=jnp.bfloat16)
    params = policy.init(jax.random.key(0))
    # a block without effect: only the embedding and the final norm are left
    params["layers"] = {k: jnp.zeros_like(v) if k in ("o", "down") else v for k, v in params["layers"].items()}

    def gradient(rows):
        tokens = jnp.full((rows, 2), 5, jnp.int32)
        segments, positions = dense_rows(rows, 2)
        loss = lambda p: policy.hidden(p, tokens, positions, segments)[..., 0].astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss)(params)["embed"][5]

    close.assert_relative(gradient(512), gradient(1) * 512, terms=2 * 512)


@pytest.mark.parametrize("filler", [2, 60])
def test_what_padding_holds_does_not_matter(filler):
    """Any token id and any position in the padded columns."""
    policy, params, _ = small_model()
    tokens = _tokens((2, 6))
    segments = jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    positions = jnp.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0]])
    real = segments > 0
    other = jnp.where(real, tokens, 23)
    moved = jnp.where(real, positions, jnp.int32(filler))
    plain, changed = (
        np.asarray(_logits(policy, params, t, p, segments)) for t, p in ((tokens, positions), (other, moved))
    )
    assert np.isfinite(changed).all()
    close.assert_same_forward(changed[np.asarray(real)], plain[np.asarray(real)], columns=6)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_matrices_of_one_input_are_one_in_steps(family):
    """Of a GPU: queries, keys and values of one product, with their biases; a part without a gate stays as it is."""
    config = small_config(family)
    policy, joined = make_policy(config), make_policy(config, layout=ON_GPU)
    params = policy.init(jax.random.key(0))
    steps = joined.for_steps(params)["layers"][0]
    assert "qkv" in steps and not {"q", "k", "v"} & set(steps)
    assert ("up_gate" in steps) == config.gated_mlp and ("qkv_bias" in steps) == ("q_bias" in params["layers"])
    parts = (jnp.array([[3, 4, 5]]), jnp.arange(3, dtype=jnp.int32)[None], jnp.ones((1, 3), jnp.int32), jnp.int32(0))
    want, _ = policy.extend(params, policy.init_cache(1, 3), *parts)
    got, _ = joined.extend(joined.for_steps(params), joined.init_cache(1, 3), *parts)
    close.assert_same_forward(got, want, family)
    pytest.importorskip("qwix")
    kept = joined.for_steps(quantised.quantise(config, params, "int8"))["layers"][0]  # no plain arrays
    assert {"q", "k", "v"} <= set(kept) and {n for n in kept if n.endswith("_bias")} >= {
        n for n in params["layers"] if n in ("q_bias", "k_bias", "v_bias")
    }


@pytest.mark.parametrize("layers", [2, 7])  # beside each other, stacked
def test_parameters_laid_out_for_a_loop_give_the_same(layers):
    config = small_config(num_layers=layers)
    policy = make_policy(config)
    params, tokens = policy.init(jax.random.key(0)), jnp.array([[3, 4, 5]], jnp.int32)
    parts = (tokens, jnp.arange(3, dtype=jnp.int32)[None], jnp.ones((1, 3), jnp.int32), jnp.int32(0))
    apart = policy.for_steps(params)
    assert isinstance(apart["layers"], tuple) == (layers == 2)
    assert policy._replace(unstack=None).for_steps(params) is params
    for given in (apart, policy.for_steps(apart)):
        jax.tree.map(
            np.testing.assert_array_equal,
            policy.extend(given, policy.init_cache(1, 3), *parts),
            policy.extend(params, policy.init_cache(1, 3), *parts),
        )
