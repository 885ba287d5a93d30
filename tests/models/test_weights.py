import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from tests.models_for_tests import ALL_FAMILIES, dense_rows, small_config, small_model


@pytest.fixture
def folder(tmp_path):
    _, params, config = small_model()
    weights.save(tmp_path, config, params)
    return tmp_path


def _rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(change(tensors), path)


BIASED = {"qkv_bias": True, "output_bias": True}


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, {}) for family in ALL_FAMILIES]
    + [("llama", BIASED), ("qwen3", BIASED), ("gemma2", BIASED), ("gpt2", {"tie_embeddings": False})]
    + [(family, {"padded_vocab_size": 32}) for family in ("llama", "qwen2", "gpt2")],
)
def test_every_shape_of_tree_survives(tmp_path, family, change):
    config = small_config(family, **change)
    params = make_policy(config).init(jax.random.key(3))
    weights.save(tmp_path, config, params)
    policy, again, read = weights.pretrained(tmp_path)
    assert read.padded_vocab_size == config.padded_vocab_size and policy.vocab_size == config.padded_vocab_size
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in jax.tree.leaves(again))


def test_stored_bfloat16_halves_the_file_and_loads_as_float32(tmp_path, folder):
    _, params, config = small_model()
    weights.save(tmp_path / "half", config, params, dtype="bfloat16")
    sizes = [(f / "model.safetensors").stat().st_size for f in (folder, tmp_path / "half")]
    assert sizes[1] < 0.7 * sizes[0]
    assert weights.load(tmp_path / "half", config)["embed"].dtype == jnp.float32
    assert weights.load(folder, config, dtype=jnp.bfloat16)["embed"].dtype == jnp.bfloat16


def test_a_tree_in_host_memory_is_sharded_from_there(folder):
    _, params, _ = weights.pretrained(folder, place=np.asarray)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
    sharded = rules.shard(params, meshes.parse_mesh("fsdp=4,tensor=2"))
    assert sharded["layers"]["up"].addressable_shards[0].data.size * 8 == sharded["layers"]["up"].size
    jax.tree.map(np.testing.assert_array_equal, sharded, small_model()[1])


def test_unknown_precision(tmp_path):
    _, params, config = small_model()
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16"):
        weights.save(tmp_path, config, params, dtype="int8")


def test_tensor_of_another_shape_is_named(folder):
    _rewrite(folder, lambda t: t | {"model.norm.weight": np.zeros((3,), np.float32)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), the config wants \(16,\)"):
        weights.pretrained(folder)


def test_missing_tensors_are_named(folder):
    _rewrite(folder, lambda t: {k: v for k, v in t.items() if "layers.1.mlp" not in k})
    with pytest.raises(ValueError, match=r"lacks 3 tensors of the config, the first: model.layers.1.mlp"):
        weights.pretrained(folder)


def test_tensors_that_nothing_reads_are_named(folder):
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros((16,), np.float32)}
    _rewrite(folder, lambda t: t | extra)
    with pytest.raises(
        ValueError, match="1 tensors that the config does not use, the first: model.layers.0.self_attn.q"
    ):
        weights.pretrained(folder)


def test_stored_rotary_table_is_harmless(folder):
    _rewrite(folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones((2,), np.float32)})
    weights.pretrained(folder)


def test_head_of_a_tied_model_must_equal_the_embedding(folder):
    _rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    weights.pretrained(folder)
    _rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        weights.pretrained(folder)


@pytest.mark.parametrize("wide", ["head", "embed"])
def test_a_tied_head_of_another_type_is_compared_row_by_row(tmp_path, wide):
    """float32 beside bfloat16: a block of so many bytes holds twice the rows of one of them."""
    config = small_config("llama", tie_embeddings=True)
    weights.save(tmp_path, config, make_policy(config).init(jax.random.key(0)), dtype="bfloat16")
    narrow = safetensors.numpy.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    both = {"lm_head.weight": narrow, "model.embed_tokens.weight": narrow}
    name = {"head": "lm_head.weight", "embed": "model.embed_tokens.weight"}[wide]
    _rewrite(tmp_path, lambda t: t | both | {name: narrow.astype(np.float32)})
    shapes = jax.eval_shape(make_policy(config).init, jax.random.key(0))
    wanted = rules.shardings(shapes, mesh=meshes.parse_mesh("data=1"))
    weights.stream(tmp_path, config, wanted, block_bytes=256)
    _rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["lm_head.weight"][::-1].copy()})
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        weights.stream(tmp_path, config, wanted, block_bytes=256)


@pytest.mark.parametrize("content", [b"", b"junk, no safetensors at all"])
def test_unreadable_file(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is no readable safetensors file"):
        weights.pretrained(folder)


def test_absent_files(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model.safetensors nor"):
        weights.pretrained(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ValueError, match="lacks model-00001-of-00002.safetensors"):
        weights.pretrained(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        weights.pretrained(folder)


def test_bundled_names():
    assert (weights.bundled("nano") / "config.json").is_file()
    with pytest.raises(ValueError, match="no bundled model 'huge'; bundled are tiny, nano and nano_1"):
        weights.bundled("huge")
    with pytest.raises(ValueError, match="no bundled model"):
        weights.bundled(str(weights.bundled("nano")))  # a folder of the user's own, wherever it lies


def test_bundled_model_prefers_its_own_text():
    """A trained model, read back through the tokenizer's ids, is far from uniform."""
    policy, params, config = weights.pretrained(weights.bundled("nano"))
    segments, positions = dense_rows(1, 4)
    logits = policy.unembed(params, policy.hidden(params, jnp.array([[1, 5, 6, 7]], jnp.int32), positions, segments))
    assert bool(jnp.all(jnp.isfinite(logits)))
    best = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
    assert float(jnp.mean(best)) > 3 / config.vocab_size


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2", "qwen3_moe"])
def test_weights_that_never_train_are_kept_as_they_are_computed(tmp_path, family):
    """Half the memory and the same numbers; norms, of which Gemma's add 1 in float32, and biases stay as they are."""
    config = small_config(family)
    weights.save(tmp_path, config, make_policy(config).init(jax.random.key(3)))
    numbers = {"compute_dtype": jnp.bfloat16}
    policy, wide, _ = weights.pretrained(tmp_path, **numbers)
    _, kept, _ = weights.pretrained(tmp_path, frozen=True, **numbers)
    kinds = {name: x.dtype for name, x in kept["layers"].items()}
    assert kinds["q"] == kept["embed"].dtype == jnp.bfloat16 and kinds["input_norm"] == jnp.float32
    assert sum(x.nbytes for x in jax.tree.leaves(kept)) < 0.6 * sum(x.nbytes for x in jax.tree.leaves(wide))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 6)), jnp.int32)
    segments, positions = dense_rows(2, 6)

    @jax.jit
    def said(params):
        hidden = policy.hidden(params, tokens, positions, segments)
        step, _ = policy.extend(params, policy.init_cache(2, 6), tokens, positions, segments, 0)
        return policy.unembed(params, hidden), policy.unembed(params, step)

    jax.tree.map(np.testing.assert_array_equal, said(kept), said(wide))
    _, plain, _ = weights.pretrained(tmp_path, frozen=True)
    assert {x.dtype for x in jax.tree.leaves(plain)} == {jnp.dtype("float32")}


def test_streamed_weights_are_kept_so_too(folder):
    mesh = meshes.parse_mesh("fsdp=2")
    options = {"compute_dtype": jnp.bfloat16, "frozen": True}
    _, here, _ = weights.pretrained(folder, **options)
    _, there, _ = weights.pretrained(folder, shardings=lambda tree: rules.shardings(tree, mesh), **options)
    jax.tree.map(np.testing.assert_array_equal, there, here)
    assert jax.tree.map(lambda x: x.dtype, there) == jax.tree.map(lambda x: x.dtype, here)
