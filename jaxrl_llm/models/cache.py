"""The key-value cache of a decoder: in the compute dtype, or as int8 with a scale for every head and column."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.types import Cache

ROWS_FIRST = ("segment_ids", "positions")  # ``[B, C]``; all else has the layers before the rows


def init_cache(config: ModelConfig, dtype, int8: bool, batch: int, length: int) -> Cache:
    """An empty cache: keys and values ``[layers, B, G, C, K]``, with ``int8`` their scales ``[layers, B, G, C]``."""
    shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
    cache = {name: jnp.zeros(shape, jnp.int8 if int8 else dtype) for name in ("k", "v")}
    if int8:
        cache |= {f"{name}_scale": jnp.zeros(shape[:-1], jnp.float32) for name in ("k", "v")}
    return cache | {name: jnp.zeros((batch, length), jnp.int32) for name in ROWS_FIRST}


def repeat_cache(cache: Cache, repeats: int) -> Cache:
    """Each row ``repeats`` times, side by side."""
    return {name: jnp.repeat(x, repeats, axis=0 if name in ROWS_FIRST else 1) for name, x in cache.items()}


def quantised(x: Float[Array, "*A K"]) -> tuple[Int[Array, "*A K"], Float[Array, "*A"]]:
    """``x`` as whole numbers times a scale: ``scale = max |x| / 127`` over a head; entries are off by half of it.

    >>> import jax.numpy as jnp
    >>> whole, scale = quantised(jnp.array([[-12.7, 0.04, 6.4]]))
    >>> whole.tolist(), round(float(scale[0]), 4)
    ([[-127, 0, 64]], 0.1)
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / 127.0
    whole = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[..., None])
    return jnp.clip(whole, -127, 127).astype(jnp.int8), scale


def write(arrays: Cache, name: str, new: Float[Array, "B G S K"], layer: Array, column: Array | int):
    """Keys or values of further columns of one layer: ``(arrays, all of the layer [B, G, C, K] as new's dtype)``."""
    scaled = f"{name}_scale" in arrays
    parts = dict(zip((name, f"{name}_scale"), quantised(new), strict=True)) if scaled else {name: new}
    whole = []
    for part, value in parts.items():
        start = (layer, 0, 0, column, 0)[: arrays[part].ndim]
        kept = jax.lax.dynamic_update_slice(arrays[part], value.astype(arrays[part].dtype)[None], start)
        arrays = arrays | {part: kept}
        whole.append(jax.lax.dynamic_index_in_dim(kept, layer, 0, keepdims=False))
    if scaled:
        return arrays, (whole[0].astype(jnp.float32) * whole[1][..., None]).astype(new.dtype)
    return arrays, whole[0].astype(new.dtype)
