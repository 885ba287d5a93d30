"""Weights of a rollout in few bits: the matrices of every layer with a scale for each output, the rest as it is.

Only what is read from memory at every token gets smaller; products are computed in the dtype of the activations. What
samples is then a little off what trains: ``sampler_logp`` is of what sampled, so the gap is in the metrics, and
``losses.correction`` weighs tokens by it. The quantiser is qwix's (extra ``quant``).
"""

from types import ModuleType
from typing import Any

import jax

from jaxrl_llm.errors import extra_module
from jaxrl_llm.models.spec import ModelConfig, matrix_shapes
from jaxrl_llm.types import Params

TYPES = ("int8", "int4", "float8_e4m3fn")
KEPT = ("router",)  # small, and the choice of experts jumps


def _qwix() -> ModuleType:
    return extra_module("qwix", "quantised weights need", "quant")


def check_extra() -> None:
    """Raises UserError without the extra ``quant``."""
    _qwix()


def quantise(config: ModelConfig, params: Params, kind: str) -> Params:
    """``params`` with the matrices of the layers as ``qwix.QArray``: symmetric, a scale for the inputs of each output.

    Embedding, head, norms, biases, routers and adapters stay as they are. Inside ``jit`` the copy is made anew from
    today's weights at every step. Of the parameters of an adapted policy (``models.lora``) the base is quantised.

    Args:
      kind: one of ``TYPES``.

    Raises:
      ValueError: for another kind.
      UserError: without the extra ``quant``.
    """
    if kind not in TYPES:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(TYPES)}")
    if "base" in params:
        return params | {"base": quantise(config, params["base"], kind)}
    return params | {"layers": quantise_layers(config, params["layers"], kind)}


def quantise_layers(config: ModelConfig, layers: dict[str, jax.Array], kind: str) -> dict[str, Any]:
    """What ``quantise`` makes of the layers, of all of them stacked or of one."""
    quantise_one = _qwix().quantize
    found: dict[str, Any] = dict(layers)
    for name in matrix_shapes(config):
        if name not in KEPT:
            # [..., in, out], before it layers and experts: every axis but the inputs has its own scale
            inputs = found[name].ndim - 2
            axes = [axis for axis in range(found[name].ndim) if axis != inputs]
            found[name] = quantise_one(found[name], kind, channelwise_axes=axes)
    return found


def opened(layer: dict[str, Any]) -> dict[str, jax.Array]:
    """One layer's parameters as arrays: what is quantised is multiplied with its scales where it is used."""
    if all(isinstance(x, jax.Array) for x in layer.values()):
        return layer
    dequantise = _qwix().dequantize
    return {name: x if isinstance(x, jax.Array) else dequantise(x) for name, x in layer.items()}
