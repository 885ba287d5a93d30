"""What sets one family of models apart, as data: constants of its shape, defaults and fixed keys of its config.json."""

from typing import Any, NamedTuple

# A key with another value changes the computation in a way that is not implemented: an error that names the key.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "layer_types": (),
    "quantization_config": (),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "num_kv_shared_layers": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
# What config.json may hold beside: the file itself, training, generation. Names that end or begin as below as well.
_INERT = frozenset(
    """architectures auto_map begin_suppress_tokens bad_words_ids bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range is_llama_config keys_to_ignore_at_inference
    label2id length_penalty max_length max_window_layers min_length model_type n_ctx no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values
    reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate sep_token_id sliding_window
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p use_bfloat16 use_cache""".split()
)
_INERT_ENDS, _INERT_STARTS = ("_pdrop",), ("_", "summary_", "unsloth")
_COMMON = frozenset(
    """vocab_size unpadded_vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias rope_theta
    rope_scaling rope_parameters""".split()
)
_ROTARY_DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6}


class Family(NamedTuple):
    """``shape``: fields of ``ModelConfig`` that never vary. ``defaults``: what transformers takes for absent keys.

    ``fixed``: key -> accepted values (an absent or null key is always accepted); None lifts the common rule.
    ``names``: other spellings of keys. ``window``: which layers see a sliding window: "" none, "all", or "types" for
    ``layer_types``, by default every layer but each ``period``-th. ``written``: constants of a saved config.json.
    ``omitted``: common keys it does not have. ``head_dim``: the default where it is no share of the width.
    """

    architecture: str
    shape: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    fixed: dict[str, tuple[Any, ...] | None] = {}
    names: dict[str, str] = {}
    window: str = ""
    period: int = 0
    head_dim: int | None = None
    written: dict[str, Any] = {"hidden_act": "silu"}
    omitted: tuple[str, ...] = ()


_GEMMA_SHAPE = {"norm": "rms_plus_one", "activation": "gelu_tanh", "output_norms": True, "scale_embedding": True}
_GEMMA_FIXED: dict[str, tuple[Any, ...] | None] = {
    "hidden_act": None,
    "hidden_activation": ("gelu_pytorch_tanh",),
    "layer_types": None,
    "final_logit_softcapping": None,
}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
                   "sliding_window": 4096, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
_QWEN_DEFAULTS = {"max_position_embeddings": 32768}
_GEMMA_WRITTEN = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        "MistralForCausalLM",
        fixed={"attention_bias": (False,)},
        defaults={
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
        },  # fmt: skip
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        shape={"qkv_bias": True, "output_bias": False},
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        shape={"qk_norm": True},
        head_dim=128,
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        shape={"qk_norm": True},
        defaults=_QWEN_DEFAULTS
        | {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "num_key_value_heads": 4,
        },  # fmt: skip
        fixed={
            "mlp_only_layers": ([],),
            "decoder_sparse_step": (1,),
            # what a published file says of the family itself
            "use_qk_norm": (True,),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
        },  # fmt: skip
        names={"num_local_experts": "num_experts"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        shape=_GEMMA_SHAPE,
        defaults=_GEMMA_DEFAULTS
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "max_position_embeddings": 8192,
        },  # fmt: skip
        fixed=_GEMMA_FIXED | {"attn_logit_softcapping": None},
        window="types",
        period=2,
        written=_GEMMA_WRITTEN,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        shape=_GEMMA_SHAPE | {"qk_norm": True},
        defaults=_GEMMA_DEFAULTS
        | {
            "head_dim": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072,
        },  # fmt: skip
        fixed=_GEMMA_FIXED,
        window="types",
        period=6,
        written=_GEMMA_WRITTEN,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        shape={
            "norm": "layer",
            "activation": "gelu_tanh",
            "gated_mlp": False,
            "mlp_bias": True,
            "qkv_bias": True,
            "output_bias": True,
            "learned_positions": True,
        },  # fmt: skip
        defaults={
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        },  # fmt: skip
        fixed={
            "hidden_act": None,
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        names={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
        },  # fmt: skip
        written={"activation_function": "gelu_new"},
        omitted=("rope_theta", "head_dim", "num_key_value_heads", "attention_bias"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={
            "sliding_window": None,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },  # fmt: skip
        fixed={"partial_rotary_factor": None, "attention_bias": (False,)},
        window="all",
    ),
}


def defaults_of(family: Family) -> dict[str, Any]:
    """Values of absent keys, the common ones included."""
    return _ROTARY_DEFAULTS | {"tie_word_embeddings": False} | family.defaults


def check_fixed(family: Family, raw: dict[str, Any]) -> None:
    """Raises ValueError naming the first key whose value changes the computation in an unknown way."""
    types = raw.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"config key layer_types={str(types)[:200]} is no list of texts")
    for key, accepted in (_FIXED | family.fixed).items():
        value = raw.get(key)
        if key == "layer_types" and types is not None and set(types) == {"full_attention"}:
            continue
        if accepted is not None and value is not None and value not in accepted:
            raise ValueError(f"config key {key}={value!r} changes the computation and is not supported")


def check_known(family: Family, raw: dict[str, Any]) -> None:
    """Raises ValueError naming the keys that nothing here reads; an empty, null or false value says nothing."""
    own = {"sliding_window_pattern"} if family.period else set()
    known = _INERT | _COMMON | own | set(family.defaults) | set(_FIXED) | set(family.fixed) | set(family.names)
    unknown = sorted(
        key for key, value in raw.items()
        if value and key not in known and not key.endswith(_INERT_ENDS) and not key.startswith(_INERT_STARTS)
    )  # fmt: skip
    if unknown:
        raise ValueError(
            f"config key {', '.join(f'{key}={raw[key]!r}' for key in unknown)} is not known here; where it does not "
            "change the computation, take it out of config.json"
        )
