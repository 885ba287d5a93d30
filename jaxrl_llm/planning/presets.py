"""What a training job takes for a model of one's own where no flag says it: by the number of its parameters."""

import pathlib
from typing import Any, NamedTuple

from jaxrl_llm.models.config import ModelConfig, read_config
from jaxrl_llm.models.lora import base_of

LORA = (
    10.0  # Schulman et al., "LoRA Without Regret": the best rate of an adapter is about ten times that of all weights
)


class Preset(NamedTuple):
    """Values for models of fewer than ``below`` parameters; rates are those of Adam on all weights."""

    below: float
    learning_rate: float
    max_new_tokens: int
    compute: str
    remat: bool


# Larger models take smaller rates (1e-6 is what published runs on 0.5 to 32 thousand million parameters take), have
# longer answers, and leave less memory: bfloat16 from a size on where float32 is no longer quick, and recomputation
# where the activations of long rows do not fit beside the weights.
PRESETS = (
    Preset(5e6, 6e-4, 28, "float32", False),  # of the size of the bundled ones, for which the quickstart was tuned
    Preset(1e8, 1e-4, 256, "float32", False),
    Preset(1e9, 3e-6, 1024, "bfloat16", False),
    Preset(1e10, 1e-6, 2048, "bfloat16", True),
    Preset(float("inf"), 5e-7, 4096, "bfloat16", True),
)


def of_size(config: ModelConfig, *, lora: int = 0) -> dict[str, Any]:
    """The values for a model; responses take at most half of its context, an adapter ten times the rate.

    >>> from jaxrl_llm.models.config import ModelConfig
    >>> of_size(ModelConfig(family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1,
    ...     num_heads=2, num_kv_heads=2, head_dim=16, max_positions=40))["max_new_tokens"]
    20
    """
    found = next(one for one in PRESETS if config.num_parameters < one.below)
    values = found._asdict() | {"max_new_tokens": min(found.max_new_tokens, max(1, config.max_positions // 2))}
    del values["below"]
    return values | ({"learning_rate": found.learning_rate * LORA} if lora else {})


def for_model(model: str, *, lora: int = 0) -> tuple[dict[str, Any], int]:
    """``of_size`` of the ``config.json`` of a folder, and its number of parameters; of no such folder nothing, and 0.

    A file that cannot be read gives nothing too: loading the model says what is wrong with it.
    """
    if not any((pathlib.Path(model) / name).is_file() for name in ("config.json", "adapter_config.json")):
        return {}, 0
    try:
        config = read_config(base_of(model))
    except (ValueError, OSError, KeyError, TypeError):
        return {}, 0
    return of_size(config, lora=lora), config.num_parameters
