"""Model shapes read from and written to a Hugging Face ``config.json``."""

import dataclasses
import json
import pathlib
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")

# Keys that change the computation: value -> accepted settings. Anything else is an error that names the key.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "layer_types": (None,),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequency scaling: ``default``, ``linear`` or ``llama3``."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder of the Llama line (Llama 2/3, Qwen2/2.5, Qwen3).

    ``vocab_size`` is the number of real tokens; ``padded_vocab_size`` (at least that) the rows of the embedding:
    the padding rows get logit -inf in sampler and trainer alike.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 4096
    padded_vocab_size: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is not supported; choose one of {', '.join(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.padded_vocab_size == 0:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size={self.padded_vocab_size} is less than vocab_size={self.vocab_size}")

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the tied head counted once."""
        d, f, q, kv = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        attention = d * self.head_dim * (2 * q + 2 * kv)
        attention += self.head_dim * (q + 2 * kv) if self.qkv_bias else 0
        attention += d if self.output_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        tables = self.padded_vocab_size * d * (1 if self.tie_embeddings else 2)
        return tables + d + self.num_layers * (attention + 3 * d * f + 2 * d)


def _rope(raw: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """Reads both layouts: ``rope_theta`` + ``rope_scaling``, and the newer ``rope_parameters``."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ()):
        if key not in rope:
            raise ValueError(f"rope_scaling of type {kind!r} lacks {key}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config key partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings", max_positions)),
        )
    raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config key {key}={value!r} is not a whole number")
    return value


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Reads the fields of a Hugging Face ``config.json``.

    Raises:
      ValueError: for an unknown ``model_type`` or a key that changes the computation in a way not implemented.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    for key, accepted in _FIXED.items():
        value = raw.get(key)
        if key == "layer_types" and value is not None and set(value) == {"full_attention"}:
            continue
        if value is not None and value not in accepted:
            raise ValueError(f"config key {key}={value!r} changes the computation and is not supported")
    missing = [
        k
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if k not in raw
    ]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    heads, width = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
    max_positions = _integer(raw, "max_position_embeddings", 4096)
    theta, scaling = _rope(raw, max_positions)
    eos = raw.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    bias = bool(raw.get("attention_bias", False))
    # transformers: Qwen3 has a fixed default, the others split the width
    default_head_dim = 128 if family == "qwen3" else width // max(heads, 1)
    return ModelConfig(
        family=family,
        vocab_size=_integer(raw, "unpadded_vocab_size", _integer(raw, "vocab_size")),
        padded_vocab_size=_integer(raw, "vocab_size"),
        hidden_size=width,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer(raw, "head_dim", default_head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),  # the default of all three families
        qkv_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        qk_norm=family == "qwen3",
        max_positions=max_positions,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=eos_ids,
        pad_token_id=raw.get("pad_token_id"),
        initializer_range=float(raw.get("initializer_range", 0.02)),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the fields of a Hugging Face ``config.json`` that ``from_hf`` and transformers read."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    rope = config.rope_scaling
    raw: dict[str, Any] = {
        "architectures": [names[config.family]],
        "model_type": config.family,
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias and config.family != "qwen2",
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "initializer_range": config.initializer_range,
        "torch_dtype": "float32",
    }
    if config.padded_vocab_size != config.vocab_size:
        raw["unpadded_vocab_size"] = config.vocab_size
    if rope.kind != "default":
        raw["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            raw["rope_scaling"] |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position_embeddings,
            }
    return raw


def read_config(folder: str | pathlib.Path) -> ModelConfig:
    """Reads ``config.json`` of a model folder."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; --model wants a folder with config.json and *.safetensors")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object")
    return from_hf(raw)
