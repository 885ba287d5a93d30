"""Model shapes read from and written to a Hugging Face ``config.json``."""

import dataclasses
import pathlib
from typing import Any

from jaxrl_llm.errors import read_json_object
from jaxrl_llm.models.families import FAMILIES, Family, check_fixed, check_known, defaults_of
from jaxrl_llm.models.spec import NO_WINDOW
from jaxrl_llm.models.spec import Experts as Experts
from jaxrl_llm.models.spec import ModelConfig as ModelConfig
from jaxrl_llm.models.spec import RopeScaling as RopeScaling

MOST_SIZE = 1 << 31  # of anything that a config.json counts
_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 1 << 20, "num_experts": 1 << 20}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _rope_tables(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary settings of full and of local layers, in either layout: flat keys or ``rope_parameters``."""
    # of both, transformers takes rope_scaling and nothing of the other: what somebody has added to a file of version 5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    tables = (rope, {})
    if isinstance(rope, dict) and ("full_attention" in rope or "sliding_attention" in rope):
        tables = (rope.get("full_attention") or {}, rope.get("sliding_attention") or {})
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"config key rope_scaling or rope_parameters holds {str(rope)[:80]}, which is no table")
    return tables


def _scaling(raw: dict[str, Any], rope: dict[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope_scaling type {str(kind)[:80]} is no text")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ()):
        if key not in rope:
            raise ValueError(f"rope_scaling of type {kind!r} lacks {key}")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind, _positive(rope, "factor"))
    if kind == "llama3":
        low, high = (_positive(rope, name) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise ValueError(f"rope_scaling of type llama3 has low_freq_factor={low:g}, which must be below "
                             f"high_freq_factor={high:g}")  # fmt: skip
        return RopeScaling(
            kind,
            _positive(rope, "factor"),
            low,
            high,
            _integer(rope, "original_max_position_embeddings", _integer(raw, "max_position_embeddings")),
        )
    raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _rotary(family: Family, raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    rope, local = _rope_tables(raw)
    if (local.get("rope_type") or "default") != "default":
        raise ValueError(f"rope_scaling type {local['rope_type']!r} of sliding_attention is not supported")
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    share = 1.0 if share is None else _number({"partial_rotary_factor": share}, "partial_rotary_factor")
    if share != 1.0 and "partial_rotary_factor" not in family.fixed:
        raise ValueError(f"config key partial_rotary_factor={share!r} is not supported")
    if not 0.0 < share <= 1.0 or 0 < head_dim * share < 1:
        raise ValueError(
            f"config key partial_rotary_factor={share:g} is no share of the {head_dim} numbers of a head that are "
            "rotated; it lies above 0 and at most at 1"
        )
    fields = {
        "rope_theta": _positive(rope if "rope_theta" in rope else raw, "rope_theta"),
        "rope_scaling": _scaling(raw, rope),
        "rotary_dim": int(head_dim * share),
    }
    base = local.get("rope_theta", raw.get("rope_local_base_freq"))
    return fields if base is None else fields | {"local_rope_theta": _positive({"rope_theta": base}, "rope_theta")}


def _windows(family: Family, raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    if not family.window or raw.get("sliding_window") is None:
        return ()
    width = _integer(raw, "sliding_window")
    if family.window == "all":
        return (width,) * layers
    period = max(_integer(raw, "sliding_window_pattern", family.period), 1)
    types = raw.get("layer_types") or ["full_attention" if (i + 1) % period == 0 else "" for i in range(layers)]
    known = ("full_attention", "sliding_attention", "")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(
            f"config key layer_types={str(types)[:200]} wants full_attention or sliding_attention for each layer"
        )
    return tuple(NO_WINDOW if kind == "full_attention" else width for kind in types)


def _experts(family: Family, raw: dict[str, Any]) -> Experts | None:
    if "num_experts" not in family.defaults:  # a dense family, whose 0 says nothing
        return None
    return Experts(
        number=_integer(raw, "num_experts"),
        per_token=_integer(raw, "num_experts_per_tok"),
        size=_integer(raw, "moe_intermediate_size"),
        normalise=_flag(raw, "norm_topk_prob"),
        balance_weight=_number(raw, "router_aux_loss_coef"),
    )


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config key {key}={repr(value)[:80]} is not a whole number")
    most = _MOST.get(key, MOST_SIZE)
    if value > most:
        raise ValueError(f"config key {key}={value} is beyond {most}, more than any model has; is config.json damaged?")
    return value


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"config key {key}={repr(value)[:80]} is neither true nor false")
    return bool(value)


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:  # and no nan
        raise ValueError(f"config key {key}={repr(value)[:80]} is not a finite number")
    return float(value)


def _positive(raw: dict[str, Any], key: str) -> float:
    value = _number(raw, key)
    if value <= 0.0:
        raise ValueError(f"config key {key}={value} must be above 0")
    return value


def _ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_integer({key: x}, key) for x in values)


def _cap(raw: dict[str, Any], key: str) -> float | None:
    return None if raw.get(key) is None else _positive(raw, key)


def _id(raw: dict[str, Any], key: str) -> int | None:
    return None if raw.get(key) is None else _integer(raw, key)


def _check_heads(name: str, defaults: dict[str, Any], raw: dict[str, Any]) -> None:
    """Raises ValueError where the key-value heads that transformers takes for an absent key do not fit the model."""
    heads, taken = raw["num_attention_heads"], defaults.get("num_key_value_heads")
    if "num_key_value_heads" not in raw and taken and isinstance(heads, int) and heads % taken:
        raise ValueError(
            f"config.json lacks num_key_value_heads: for {name} transformers takes {taken}, which does not "
            f"divide num_attention_heads={heads}; write the key"
        )


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Reads the fields of a Hugging Face ``config.json``; dropout of training runs (``*_pdrop``) is not read.

    Raises:
      ValueError: for an unknown ``model_type`` or a key that changes the computation in a way not implemented.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type={repr(name)[:80]} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    raw = {family.names.get(key, key): value for key, value in raw.items()}
    check_fixed(family, raw)
    check_known(family, raw)
    if "n_inner" in family.names and raw.get("intermediate_size") is None and "hidden_size" in raw:
        raw["intermediate_size"] = 4 * _integer(raw, "hidden_size")
    missing = [k for k in _REQUIRED if k not in raw]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    defaults = defaults_of(family)
    _check_heads(name, defaults, raw)
    raw = defaults | raw
    raw |= {key: defaults[key] for key in ("max_position_embeddings", "rope_theta", "rms_norm_eps")
            if key in defaults and raw[key] is None}  # fmt: skip
    heads, width, layers = (_integer(raw, k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    head_dim = _integer(raw, "head_dim", family.head_dim or width // max(heads, 1))
    bias, scalar = _flag(raw, "attention_bias"), _number(raw, "query_pre_attn_scalar", 0.0)
    if scalar < 0.0:
        raise ValueError(f"config key query_pre_attn_scalar={scalar:g} has no root; it must not be negative")
    fields: dict[str, Any] = {
        "vocab_size": _integer(raw, "unpadded_vocab_size", _integer(raw, "vocab_size")),
        "padded_vocab_size": _integer(raw, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": _integer(raw, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _integer(raw, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _positive(raw, "rms_norm_eps"),
        "tie_embeddings": _flag(raw, "tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "max_positions": _integer(raw, "max_position_embeddings"),
        "bos_token_id": _id(raw, "bos_token_id"),
        "eos_token_ids": _ids(raw, "eos_token_id"),
        "pad_token_id": _id(raw, "pad_token_id"),
        "initializer_range": _number(raw, "initializer_range", 0.02),
        "windows": _windows(family, raw, layers),
        "query_scalar": scalar,
        "attention_softcap": _cap(raw, "attn_logit_softcapping"),
        "final_softcap": _cap(raw, "final_logit_softcapping"),
        "experts": _experts(family, raw),
    }
    if not family.shape.get("learned_positions"):
        fields |= _rotary(family, raw, head_dim)
    return ModelConfig(family=name, **(fields | family.shape))


def _special(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Keys that only some families have."""
    raw: dict[str, Any] = dict(family.written)
    if family.window:
        raw["sliding_window"] = max(config.windows, default=None)
    if family.window == "types":
        raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
        raw["layer_types"] = raw["layer_types"] or ["full_attention"] * config.num_layers
        whole = config.query_scalar == int(config.query_scalar)
        raw["query_pre_attn_scalar"] = int(config.query_scalar) if whole else config.query_scalar
        raw["attn_logit_softcapping"] = config.attention_softcap
        raw["final_logit_softcapping"] = config.final_softcap
    if config.local_rope_theta is not None:
        raw["rope_local_base_freq"] = config.local_rope_theta
    if config.rotary_dim != config.head_dim:
        raw["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if config.experts is not None:
        e = config.experts
        raw |= {"num_experts": e.number, "num_experts_per_tok": e.per_token, "moe_intermediate_size": e.size,
                "norm_topk_prob": e.normalise, "router_aux_loss_coef": e.balance_weight, "decoder_sparse_step": 1,
                "mlp_only_layers": []}  # fmt: skip
    rope = config.rope_scaling
    if rope.kind != "default":
        raw["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        raw["rope_scaling"] |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return raw


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the fields of a Hugging Face ``config.json`` that ``from_hf`` and transformers read.

    Raises:
      ValueError: naming fields that the family's ``config.json`` cannot express.
    """
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias and "qkv_bias" not in family.shape,
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "initializer_range": config.initializer_range,
        "torch_dtype": "float32",
    }
    if config.padded_vocab_size != config.vocab_size:
        raw["unpadded_vocab_size"] = config.vocab_size
    raw |= _special(config, family)
    theirs = {ours: name for name, ours in family.names.items() if name != "num_local_experts"}
    raw = {theirs.get(key, key): value for key, value in raw.items() if key not in family.omitted}
    again = from_hf(raw)
    lost = [f.name for f in dataclasses.fields(config) if getattr(again, f.name) != getattr(config, f.name)]
    if lost:
        raise ValueError(f"config.json of {config.family} cannot express " + ", ".join(
            f"{name}={getattr(config, name)!r}" for name in lost))  # fmt: skip
    return raw


def read_config(folder: str | pathlib.Path) -> ModelConfig:
    """Reads ``config.json`` of a model folder."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; --model wants a folder with config.json and *.safetensors")
    return from_hf(read_json_object(path))
