"""Weights in few bits: those of a rollout, and the frozen base of an adapter (QLoRA).

Of a rollout the matrices of every layer have a scale for each output, the rest is as it is.

Only what is read from memory at every token gets smaller; products are computed in the dtype of the activations. What
samples is then a little off what trains: ``sampler_logp`` is of what sampled, so the gap is in the metrics, and
``losses.correction`` weighs tokens by it. A base is quantised once, in blocks of inputs with a scale each: what samples
and what trains read the same numbers, and there is no gap. The quantiser is qwix's (extra ``quant``).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import extra_module
from jaxrl_llm.models.spec import ModelConfig, matrix_shapes
from jaxrl_llm.types import Params

TYPES = ("int8", "int4", "float8_e4m3fn")
BASES = (*TYPES, "nf4")  # what the base of an adapter may be kept in; nf4: 16 quantiles of a normal distribution
BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "nf4": 4}  # of a number of each
BLOCK = 64  # inputs of one output that share a scale, of a base
KEPT = ("router",)  # small, and the choice of experts jumps


def _qwix() -> ModuleType:
    return extra_module("qwix", "quantised weights need", "quant")


def check_extra() -> None:
    """Raises UserError without the extra ``quant``."""
    _qwix()


def quantise(config: ModelConfig, params: Params, kind: str, *, block: int = 0) -> Params:
    """``params`` with the matrices of the layers as ``qwix.QArray``: symmetric, a scale for the inputs of each output.

    Embedding, head, norms, biases, routers and adapters stay as they are. Inside ``jit`` the copy is made anew from
    today's weights at every step. Of the parameters of an adapted policy (``models.lora``) the base is quantised.

    Args:
      kind: one of ``BASES``.
      block: inputs that share a scale, where they divide those of a matrix; 0, or where they do not: all of an output.

    Raises:
      ValueError: for another kind.
      UserError: without the extra ``quant``.
    """
    if kind not in BASES:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(BASES)}")
    if "base" in params:
        return params | {"base": quantise(config, params["base"], kind, block=block)}
    return params | {"layers": quantise_layers(config, params["layers"], kind, block=block)}


def quantise_layers(config: ModelConfig, layers: dict[str, jax.Array], kind: str, *, block: int = 0) -> dict[str, Any]:
    """What ``quantise`` makes of the layers, of all of them stacked or of one."""
    quantise_one = _qwix().quantize
    found: dict[str, Any] = dict(layers)
    for name in matrix_shapes(config):
        if name not in KEPT:
            # [..., in, out], before it layers and experts: every axis but the inputs has its own scale
            inputs = found[name].ndim - 2
            axes = [axis for axis in range(found[name].ndim) if axis != inputs]
            tiles = {inputs: block} if block and found[name].shape[inputs] % block == 0 else None
            # levels and scales in float32, as the levels of nf4 are; what is made of them again is of the matrix's type
            whole, kept = found[name].astype(jnp.float32), found[name].dtype
            found[name] = quantise_one(whole, kind, channelwise_axes=axes, tiled_axes=tiles, scale_dtype=kept)
    return found


def on_host(params: Params) -> Params:
    """Parameters of which some may be in few bits as float32 in the host's memory, one after another."""

    def of(x: Any) -> np.ndarray:
        return np.asarray(x if _is_array(x) else _qwix().dequantize(jax.tree.map(jnp.asarray, x)), np.float32)

    return params | {"layers": {name: of(x) for name, x in params["layers"].items()}}


def in_few_bits(params: Params) -> bool:
    """Whether some of the layers' matrices are."""
    return not all(map(_is_array, params["layers"].values()))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _whole(layers: dict[str, Any]) -> bool:
    return all(isinstance(x, jax.Array) for x in layers.values())


def opened(layer: dict[str, Any]) -> dict[str, jax.Array]:
    """One layer's parameters as arrays: what is quantised is multiplied with its scales where it is used."""
    if _whole(layer):
        return layer
    dequantise = _qwix().dequantize
    return {name: x if isinstance(x, jax.Array) else dequantise(x) for name, x in layer.items()}


def opened_for_steps(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers, stacked or one, for a loop that reads them at every step.

    What has several scales to an output is opened, once for all steps: a TPU would do so at every step, ten times what
    the product takes. So are experts, whose products read no few bits. What has one stays in few bits, of which a step
    reads fewer.
    """
    if _whole(layers):
        return layers
    dequantise = _qwix().dequantize

    def stays(name: str, x: Any) -> bool:
        return isinstance(x, jax.Array) or (x.scale.shape[-2] == 1 and not name.startswith("experts_"))

    return {name: x if stays(name, x) else dequantise(x) for name, x in layers.items()}


def multiplied(product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, matrix: Any) -> jax.Array:
    """``product(x, matrix)`` of a matrix that may be in few bits: what has one scale to an output is scaled after it.

    So a product on a TPU reads few bits; scaled before it, what is opened would be written and read again. A backward
    pass opens a matrix again: kept between the two, what is opened would be all of the model in the type that computes.
    """
    if isinstance(matrix, jax.Array):
        return product(x, matrix)
    dequantise = _qwix().dequantize

    def opened_here(x: jax.Array, few: Any) -> jax.Array:
        if few.scale.shape[-2] > 1:
            return product(x, dequantise(few))
        out = product(x, dequantise(few.replace(scale=jnp.ones_like(few.scale))))
        scale = few.scale.astype(out.dtype)
        return out * jnp.reshape(scale, (1,) * (out.ndim - 1) + (-1,))

    return jax.checkpoint(opened_here)(x, matrix)


def opening(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``product(layer, *arrays)`` of matrices that may be in few bits, which it sees ``opened``; as in ``multiplied``
    a backward pass opens them again, and computes the product again where it needs that.
    """

    def run(layer: dict[str, Any], *arrays: Any) -> jax.Array:
        if _whole(layer):
            return product(layer, *arrays)
        return jax.checkpoint(lambda few, *given: product(opened(few), *given))(layer, *arrays)

    return run
