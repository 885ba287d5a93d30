"""One decoder for Llama 2/3, Qwen2/2.5 and Qwen3, as pure functions of a parameter tree.

The tree is nested dicts of arrays with the layers stacked on axis 0 and run under ``lax.scan``; the same block
serves scoring, training, prefill and decode. One rule says who attends to whom: same segment, segment > 0, key
position <= query position. Left pads, right pads, packed rows and a cache are all cases of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import Cache, Params, Policy

_MASKED = -1e30  # finite: a row without any visible key (padding) stays free of NaN


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Inverse frequencies ``[head_dim / 2]`` with the configured scaling (float64, cast at use).

    ``llama3`` keeps high frequencies, divides low ones by ``factor`` and interpolates between, as in the Llama 3.1
    release.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inverse = config.rope_theta**-half
    rope = config.rope_scaling
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / inverse
        old = rope.original_max_position_embeddings
        smooth = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(smooth, 0.0, 1.0)
        return inverse / rope.factor * (1 - blend) + inverse * blend
    return inverse


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm in float32, returned in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype)) * jnp.reshape(scale.astype(x.dtype), (1,) * (x.ndim - 1) + (-1,))


def rotate(x: Float[Array, "B S H K"], positions: Int[Array, "B S"], inverse: np.ndarray) -> Array:
    """Rotary embedding (half-split layout), angles in float32."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(inverse, jnp.float32)[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)


def attention_mask(
    query_positions: Int[Array, "B S"],
    query_segments: Int[Array, "B S"],
    key_positions: Int[Array, "B C"],
    key_segments: Int[Array, "B C"],
) -> Bool[Array, "B S C"]:
    """Who attends to whom: same segment, segment > 0, key position <= query position."""
    same = query_segments[:, :, None] == key_segments[:, None, :]
    real = (key_segments > 0)[:, None, :]
    past = key_positions[:, None, :] <= query_positions[:, :, None]
    return same & real & past


def attend(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
) -> Float[Array, "B S H K"]:
    """Grouped-query attention, scores and softmax in float32.

    Keys and values are head-major, and the queries that share a head are rows of one matrix: both products are then
    plain batched matrix products (two to three times faster on a CPU than the five-axis contraction).
    """
    b, s, h, d = q.shape
    g, r = k.shape[1], h // k.shape[1]
    rows = jnp.reshape(jnp.transpose(q.reshape(b, s, g, r, d), (0, 2, 3, 1, 4)), (b, g, r * s, d))
    scores = jnp.einsum("bgsd,bgcd->bgsc", rows, k, preferred_element_type=jnp.float32) * (d**-0.5)
    scores = jnp.where(mask[:, None, None, :, :], scores.reshape(b, g, r, s, -1), _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(b, g, r * s, -1)
    out = jnp.einsum("bgsc,bgcd->bgsd", weights, v)
    return jnp.transpose(out.reshape(b, g, r, s, d), (0, 3, 1, 2, 4)).reshape(b, s, h, d)


def init_params(config: ModelConfig, key: Array) -> Params:
    """Draws a parameter tree: normal(0, initializer_range) matrices, unit norms, zero biases, all float32."""
    d, f, n = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    keys = iter(jax.random.split(key, len(shapes) + 2))
    scale = config.initializer_range

    def draw(shape: tuple[int, ...]) -> Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    layers: dict[str, Array] = {name: draw((n, *shape)) for name, shape in shapes.items()}
    layers["input_norm"] = jnp.ones((n, d), jnp.float32)
    layers["post_norm"] = jnp.ones((n, d), jnp.float32)
    if config.qkv_bias:
        layers |= {f"{m}_bias": jnp.zeros((n, shapes[m][1]), jnp.float32) for m in ("q", "k", "v")}
    if config.output_bias:
        layers["o_bias"] = jnp.zeros((n, d), jnp.float32)
    if config.qk_norm:
        layers |= {f"{m}_norm": jnp.ones((n, config.head_dim), jnp.float32) for m in ("q", "k")}
    params: dict[str, Any] = {
        "embed": draw((config.padded_vocab_size, d)),
        "layers": layers,
        "final_norm": jnp.ones((d,), jnp.float32),
    }
    if not config.tie_embeddings:
        params["head"] = draw((d, config.padded_vocab_size))
    return params


def _project(x: Array, layer: dict[str, Array], name: str) -> Array:
    out = x @ layer[name].astype(x.dtype)
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + bias.astype(x.dtype)[None, None, :]


def _qkv(config: ModelConfig, inverse: np.ndarray, layer: dict[str, Array], x: Array, positions: Array):
    """Rotated queries ``[B, S, H, K]``, rotated keys and values ``[B, G, S, K]``."""
    b, s, _ = x.shape
    q = _project(x, layer, "q").reshape(b, s, config.num_heads, config.head_dim)
    k = _project(x, layer, "k").reshape(b, s, config.num_kv_heads, config.head_dim)
    v = _project(x, layer, "v").reshape(b, s, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    q, k = rotate(q, positions, inverse), rotate(k, positions, inverse)
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _mlp(layer: dict[str, Array], x: Array) -> Array:
    return _project(jax.nn.silu(_project(x, layer, "gate")) * _project(x, layer, "up"), layer, "down")


def _block(config: ModelConfig, layer: dict[str, Array], x: Array, attention: Callable[[Array], Array]) -> Array:
    """Pre-norm block; ``attention`` maps the normed input to the attention output ``[B, S, H, K]``."""
    b, s, _ = x.shape
    heads = attention(rms_norm(x, layer["input_norm"], config.rms_norm_eps))
    x = x + _project(heads.reshape(b, s, config.num_heads * config.head_dim), layer, "o")
    return x + _mlp(layer, rms_norm(x, layer["post_norm"], config.rms_norm_eps))


def _hidden(config, compute_dtype, remat, params, tokens, positions, segment_ids):
    inverse = rope_frequencies(config)
    mask = attention_mask(positions, segment_ids, positions, segment_ids)

    def step(x, layer):
        def attention(normed):
            q, k, v = _qkv(config, inverse, layer, normed, positions)
            return attend(q, k, v, mask)

        return _block(config, layer, x, attention), None

    x = params["embed"][tokens].astype(compute_dtype)  # gathered first: its gradient adds up in float32
    x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def _extend(config, compute_dtype, params, cache, tokens, positions, segment_ids, column):
    inverse = rope_frequencies(config)
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=1)
    key_segments = put(cache["segment_ids"], segment_ids)
    key_positions = put(cache["positions"], positions)
    mask = attention_mask(positions, segment_ids, key_positions, key_segments)

    def step(carry, scanned):
        x, keys, values = carry  # the whole cache is carried, so that only the new columns are written
        layer, index = scanned
        written = []

        def write(array, new):
            start = (index, 0, 0, column, 0)
            written.append(jax.lax.dynamic_update_slice(array, new.astype(array.dtype)[None], start))
            return jax.lax.dynamic_index_in_dim(written[-1], index, 0, keepdims=False).astype(x.dtype)

        def attention(normed):
            q, k, v = _qkv(config, inverse, layer, normed, positions)
            return attend(q, write(keys, k), write(values, v), mask)

        x = _block(config, layer, x, attention)
        return (x, *written), None

    x = params["embed"][tokens].astype(compute_dtype)
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, keys, values), _ = jax.lax.scan(step, (x, cache["k"], cache["v"]), (params["layers"], indices))
    cache = {"k": keys, "v": values, "segment_ids": key_segments, "positions": key_positions}
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), cache


def _repeat_cache(cache: Cache, repeats: int) -> Cache:
    return {name: jnp.repeat(x, repeats, axis=1 if name in ("k", "v") else 0) for name, x in cache.items()}


def _unembed(config, params, hidden):
    """Logits in float32 (the product accumulates in float32); padded vocabulary rows are -inf."""
    if config.tie_embeddings:
        weight = params["embed"].astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
    else:
        weight = params["head"].astype(hidden.dtype)
        logits = jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)
    if config.padded_vocab_size == config.vocab_size:
        return logits
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    return jnp.where(jnp.reshape(real, (1,) * (logits.ndim - 1) + (-1,)), logits, -jnp.inf)


def make_policy(config: ModelConfig, *, compute_dtype: Any = jnp.float32, remat: bool = False) -> Policy:
    """Builds the decoder of ``config`` as a ``Policy``.

    Args:
      config: the shape, see ``ModelConfig``.
      compute_dtype: dtype of activations and of the matrices at use; parameters stay as they are stored
        (float32 masters). Norms, rotary angles, softmax and logits are float32 in any case.
      remat: recompute each block in the backward pass instead of keeping its activations.
    """

    def init_cache(batch: int, length: int) -> Cache:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        return {
            "k": jnp.zeros(shape, compute_dtype),
            "v": jnp.zeros(shape, compute_dtype),
            "segment_ids": jnp.zeros((batch, length), jnp.int32),
            "positions": jnp.zeros((batch, length), jnp.int32),
        }

    return Policy(
        init=partial(init_params, config),
        hidden=partial(_hidden, config, compute_dtype, remat),
        unembed=partial(_unembed, config),
        init_cache=init_cache,
        extend=partial(_extend, config, compute_dtype),
        repeat_cache=_repeat_cache,
        vocab_size=config.padded_vocab_size,
    )
