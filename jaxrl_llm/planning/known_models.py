"""Shapes of well-known models as their ``config.json`` has them, so that a plan needs no files."""

import pathlib
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig, from_hf, read_config
from jaxrl_llm.models.io import weights
from jaxrl_llm.models.lora import base_of

BUNDLED = ("nano", "tiny", "nano_1")

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 40960, "num_key_value_heads": 8}  # fmt: skip
_QWEN25 = {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
           "max_position_embeddings": 8192, "num_key_value_heads": 8}  # fmt: skip
_LLAMA31 = _LLAMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_LLAMA32 = _LLAMA31 | {"rope_scaling": _LLAMA31["rope_scaling"] | {"factor": 32.0}}


def _shape(base: dict[str, Any], width: int, inner: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return base | {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
                   "num_attention_heads": heads} | rest  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _shape(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _shape(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _shape(_QWEN3, 4096, 12288, 36, 32),
    "Qwen3-14B": _shape(_QWEN3, 5120, 17408, 40, 40),
    "Qwen3-32B": _shape(_QWEN3, 5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _shape(
        _QWEN3 | {"model_type": "qwen3_moe", "num_key_value_heads": 4}, 2048, 6144, 48, 32,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "Qwen2.5-0.5B": _shape(
        _QWEN25, 896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-1.5B": _shape(
        _QWEN25, 1536, 8960, 28, 12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-3B": _shape(
        _QWEN25, 2048, 11008, 36, 16, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _shape(_QWEN25, 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
    "Qwen2.5-14B": _shape(_QWEN25, 5120, 13824, 48, 40, num_key_value_heads=8, vocab_size=152064),
    "Qwen2.5-32B": _shape(_QWEN25, 5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=152064),
    "Llama-3-8B": _shape(_LLAMA3, 4096, 14336, 32, 32),
    "Llama-3-70B": _shape(_LLAMA3, 8192, 28672, 80, 64),
    "Llama-3.1-8B": _shape(_LLAMA31, 4096, 14336, 32, 32),
    "Llama-3.2-1B": _shape(_LLAMA32, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": _shape(_LLAMA32, 3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "Mistral-7B": {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                   "max_position_embeddings": 32768, "sliding_window": 4096},
    "Gemma-2-2B": {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                   "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                   "max_position_embeddings": 8192},
    "Gemma-3-1B": {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
                   "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                   "sliding_window": 512, "max_position_embeddings": 32768},
    "GPT-2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
}  # fmt: skip


def shape_of(model: str, flag: str = "--model") -> ModelConfig:
    """The shape of a known model (any case, with its organisation or without), of a bundled one, of a folder or file.

    A folder has a ``config.json``; a file is one.

    Args:
      flag: that names it.

    Raises:
      UserError: for an unknown name or an unreadable file.
    """
    known, path = {name.lower(): raw for name, raw in KNOWN.items()}, pathlib.Path(model)
    name = model.rpartition("/")[2].lower()
    if name in known and not path.exists():  # a folder of that name may hold another shape
        return from_hf(known[name])
    try:
        if path.is_dir():
            return read_config(base_of(path))
        if path.name == "config.json":
            return read_config(path.parent)
        if model in BUNDLED:
            return read_config(weights.bundled(model))
    except ValueError as error:
        raise UserError(f"{flag} {model}: {error}") from error
    raise UserError(f"{flag} {model} is no folder with config.json and none of {', '.join([*KNOWN, *BUNDLED])}")
