import dataclasses
import json

import jax
import pytest

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.config import ModelConfig, RopeScaling, from_hf, to_hf
from jaxrl_llm.models.decoder import make_policy
from tests.models_for_tests import ALL_FAMILIES, small_config

RAW = {"model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
       "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)]
)
@pytest.mark.parametrize("padded", [24, 32])
def test_hugging_face_round_trip(family, scaling, padded):
    rope = {} if family == "gpt2" else {"rope_scaling": scaling, "rope_theta": 5e5}
    config = small_config(family, padded_vocab_size=padded, eos_token_ids=(2, 5), **rope)
    raw = json.loads(json.dumps(to_hf(config)))
    assert from_hf(raw) == config


def test_absent_keys_take_the_defaults_of_transformers():
    llama = from_hf(RAW)
    assert (llama.tie_embeddings, llama.num_kv_heads, llama.head_dim, llama.rope_theta) == (False, 4, 4, 10000.0)
    assert from_hf(RAW | {"model_type": "qwen3", "num_key_value_heads": 2}).head_dim == 128
    qwen2 = from_hf(RAW | {"model_type": "qwen2", "num_key_value_heads": 2})
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm


# transformers 5.23, configuration_*.py, as below
POSITIONS = {"llama": 2048, "mistral": 131072, "phi3": 4096, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768,
             "gemma2": 8192, "gemma3_text": 131072, "gpt2": 1024}  # fmt: skip


@pytest.mark.parametrize("family", POSITIONS)
def test_absent_positions_are_those_of_the_family(family):
    raw = RAW | {"model_type": family, "num_key_value_heads": 4}
    assert from_hf(raw).max_positions == from_hf(raw | {"max_position_embeddings": None}).max_positions
    assert from_hf(raw).max_positions == POSITIONS[family]


# transformers 5.23, configuration_*.py: what a config.json without the key stands for; null is one a head everywhere
KEY_VALUE_HEADS = {"llama": 64, "phi3": 64, "mistral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "gemma2": 4,
                   "gemma3_text": 4}  # fmt: skip


@pytest.mark.parametrize("family", KEY_VALUE_HEADS)
def test_absent_key_value_heads_are_those_of_the_family(family):
    raw = RAW | {"model_type": family, "num_attention_heads": 64, "hidden_size": 128, "head_dim": 2}
    assert from_hf(raw).num_kv_heads == KEY_VALUE_HEADS[family]
    assert from_hf(raw | {"num_key_value_heads": None}).num_kv_heads == 64
    if KEY_VALUE_HEADS[family] < 64:
        with pytest.raises(ValueError, match="lacks num_key_value_heads.*write the key"):
            from_hf(raw | {"num_attention_heads": 2 * KEY_VALUE_HEADS[family] + 1})


def test_rope_scaling_that_was_added_to_a_newer_file_counts():
    """As transformers 5.24 reads a file with both, the base of ``rope_parameters`` lost included."""
    newer = {name: value for name, value in RAW.items() if name != "rope_theta"}
    newer |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert from_hf(newer).rope_theta == 5e5 and from_hf(newer).rope_scaling == RopeScaling()
    both = from_hf(newer | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert both.rope_scaling == RopeScaling("linear", 4.0) and both.rope_theta == 10000.0
    with pytest.raises(ValueError, match="rope_scaling type 'yarn' is not supported"):
        from_hf(newer | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


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
        ({"rope_scaling": {"type": ["linear"], "factor": 2}}, r"rope_scaling type \['linear'\] is no text"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 5}, "layer_types=5 is no list of texts"),
        ({"layer_types": "full_attention"}, "layer_types=full_attention is no list of texts"),
        ({"layer_types": [["a"], ["b"]]}, r"layer_types=\[\['a'\], \['b'\]\] is no list of texts"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is neither true nor false"),
        ({"attention_bias": 1}, "attention_bias=1 is neither true nor false"),
        ({"model_type": "qwen3_moe", "num_attention_heads": 4, "norm_topk_prob": "no"}, "norm_topk_prob='no' is neit"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_malformed_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(RAW | change)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope' is not supported"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias=True"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 2}, "experts.per_token=2 is more than the 1 experts"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types=.* for each layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0.0 must be above 0"),
        ("gemma3_text", {"final_logit_softcapping": -30.0}, "final_logit_softcapping=-30.0 must be above 0"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 has no root"),
        ("phi3", {"partial_rotary_factor": 0}, "partial_rotary_factor=0 is no share of the 4 numbers of a head"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 is no share of the 4 numbers"),
        ("phi3", {"partial_rotary_factor": -0.5}, "partial_rotary_factor=-0.5 is no share of the 4 numbers"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 is no share of the 4 numbers"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4.0}},
            "low_freq_factor=4, which must be below high_freq_factor=4",
        ),
        ("qwen3_moe", {"num_experts": None}, "num_experts=None is not a whole number"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True is not known here"),
        ("llama", {"num_experts": 4}, "num_experts=4 is not known here"),
        ("qwen2", {"layer_norm_eps": 1e-3, "alibi": True}, "alibi=True, layer_norm_eps=0.001 is not known here"),
    ],
)
def test_keys_that_change_the_computation_are_named(family, change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(RAW | {"model_type": family} | change)


def test_keys_that_change_nothing_are_let_pass():
    inert = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "_name_or_path": "x", "use_cache": False,
             "use_mrope": False, "resid_pdrop": 0.1, "unsloth_version": "2025.1", "max_window_layers": 2}  # fmt: skip
    assert from_hf(RAW | inert) == from_hf(RAW)
    # Qwen3-Coder-30B-A3B-Instruct names what its family is
    moe, own = RAW | {"model_type": "qwen3_moe"}, {"use_qk_norm": True, "qkv_bias": False}
    assert from_hf(moe | own | {"shared_expert_intermediate_size": 0}) == from_hf(moe)
    assert from_hf(RAW | {"num_experts": 0}) == from_hf(RAW)  # a dense family that has none


def test_windows_of_the_layers():
    mistral = from_hf(RAW | {"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 2})
    assert mistral.windows == (8, 8)
    assert from_hf(RAW | {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2}).windows == ()
    gemma = RAW | {"head_dim": 4, "sliding_window": 8, "num_hidden_layers": 7}
    assert from_hf(gemma | {"model_type": "gemma2"}).windows == (8, 0, 8, 0, 8, 0, 8)
    assert from_hf(gemma | {"model_type": "gemma3_text"}).windows == (8, 8, 8, 8, 8, 0, 8)
    types = ["full_attention"] * 6 + ["sliding_attention"]
    assert from_hf(gemma | {"model_type": "gemma3_text", "layer_types": types}).windows == (0,) * 6 + (8,)


def test_what_config_json_cannot_hold_is_named():
    with pytest.raises(ValueError, match=r"config.json of gpt2 cannot express rope_theta=5.0"):
        to_hf(small_config("gpt2", rope_theta=5.0))
    with pytest.raises(ValueError, match=r"mlp_bias=True"):
        to_hf(small_config("llama", mlp_bias=True))


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


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_number_of_parameters_is_that_of_the_tree(family, bias):
    config = small_config(family, **({"qkv_bias": True, "output_bias": True} if bias else {}))
    tree = jax.eval_shape(make_policy(config).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(tree)) == config.num_parameters


def test_config_is_frozen_and_names_unknown_families():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config().hidden_size = 3
    with pytest.raises(ValueError, match="family='mamba' is not supported; choose one of llama"):
        ModelConfig("mamba", 24, 16, 32, 2, 4, 2, 4)
