import dataclasses
import json

import pytest

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.config import ModelConfig, RopeScaling, from_hf, to_hf
from tests.models_for_tests import FAMILIES, small_config

RAW = {"model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
       "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)]
)
@pytest.mark.parametrize("padded", [24, 32])
def test_hugging_face_round_trip(family, scaling, padded):
    config = small_config(family, rope_scaling=scaling, padded_vocab_size=padded, eos_token_ids=(2, 5), rope_theta=5e5)
    raw = json.loads(json.dumps(to_hf(config)))
    assert from_hf(raw) == config


def test_absent_keys_take_the_defaults_of_transformers():
    llama = from_hf(RAW)
    assert (llama.tie_embeddings, llama.num_kv_heads, llama.head_dim, llama.rope_theta) == (False, 4, 4, 10000.0)
    assert from_hf(RAW | {"model_type": "qwen3"}).head_dim == 128
    qwen2 = from_hf(RAW | {"model_type": "qwen2"})
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm


def test_newer_rope_parameters_equal_the_older_keys():
    older = RAW | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    newer = RAW | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}
    assert from_hf(older) == from_hf(newer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size='many' is not a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None is not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_attention_heads": 0}, "must be at least 1"),
        ({"hidden_size": -16}, "hidden_size=-16 must be at least 1"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"unpadded_vocab_size": 25}, "padded_vocab_size=24 is less than vocab_size=25"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_malformed_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(RAW | change)


def test_missing_keys_are_listed():
    with pytest.raises(ValueError, match="config.json lacks hidden_size, num_hidden_layers"):
        from_hf({k: v for k, v in RAW.items() if k not in ("hidden_size", "num_hidden_layers")})


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist"), ("{", "is not JSON"), ("[]", "no JSON object")]
)
def test_unreadable_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        model_config.read_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_number_of_parameters_is_that_of_the_tree(family, bias):
    import jax

    from jaxrl_llm.models.decoder import make_policy

    config = small_config(family, **({"qkv_bias": True, "output_bias": True} if bias else {}))
    tree = jax.eval_shape(make_policy(config).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(tree)) == config.num_parameters


def test_config_is_frozen_and_names_unknown_families():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config().hidden_size = 3
    with pytest.raises(ValueError, match="family='mamba' is not supported; choose one of llama"):
        ModelConfig("mamba", 24, 16, 32, 2, 4, 2, 4)
