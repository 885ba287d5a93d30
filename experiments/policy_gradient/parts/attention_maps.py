"""The attention probabilities of a decoder, layer by layer: an auxiliary pass that keeps what training never forms.

``attention_maps`` keeps all of them, for few and short rows; ``rhythm`` reads the two figures of a batch from them
without ever holding more than some rows, one layer and some queries at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import attention, layer_mask, queries_keys_values, score_scale, visible
from jaxrl_llm.models.decoder import How, block, embed, scanned
from jaxrl_llm.models.spec import ModelConfig
from jaxrl_llm.train.methods.builders import in_row_parts, rows_within
from jaxrl_llm.types import Params


def attention_weights(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B H S C"]:
    """The weights that ``attention.attend`` forms, one map a query head; each row that sees a key sums to 1."""
    b, s, h, d = q.shape
    g = k.shape[1]
    rows = jnp.transpose(q.reshape(b, s, g, h // g, d), (0, 2, 3, 1, 4))
    scores = jnp.einsum("bgrsd,bgcd->bgrsc", rows, k, preferred_element_type=jnp.float32)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None, :, :], scores, -1e30)
    return jax.nn.softmax(scores, axis=-1).reshape(b, h, s, k.shape[2])


def attention_maps(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "L B H T T"]:
    """Who attended to whom: ``out[l, b, h, t, s]`` is the weight of token s for token t, no gradient.

    ``T^2`` numbers a head: meant for short responses or few rows at a time.
    """
    mask, distances = visible(config, positions, segment_ids, positions, segment_ids), (positions, positions)
    numbers = {"scale": score_scale(config), "softcap": config.attention_softcap}

    def step(x, layer):
        maps = []

        def attend(normed):
            q, k, v = queries_keys_values(config, layer, normed, positions)
            maps.append(attention_weights(q, k, layer_mask(layer, mask, distances), **numbers))
            return attention(config, layer, q, k, v, mask, distances)

        x, _ = block(config, How(), layer, x, attend)
        return x, maps[0]

    params = jax.lax.stop_gradient(params)
    x = embed(config, How(), params, tokens, positions, segment_ids)
    return jax.lax.scan(step, x, scanned(config, params))[1]


class _Rows(NamedTuple):
    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


def _in_reach(mask: Bool[Array, "B T"], low: int, high: int) -> Float[Array, "B T"]:
    """How many masked tokens lie ``low`` to ``high`` behind each token."""
    width = mask.shape[1]
    total = jnp.pad(jnp.cumsum(mask.astype(jnp.float32), axis=1), ((0, 0), (1, 0)))
    columns = jnp.arange(width, dtype=jnp.int32)
    first, last = jnp.minimum(columns + low, width), jnp.minimum(columns + high + 1, width)
    return total[:, last] - total[:, first]


def _queries_in_parts(figure: Callable[..., Any], start: Any, most: int, *parts: Array) -> Any:
    """The sum of ``figure(part of the queries of each array, their columns)``, and its rows in order."""
    width = parts[0].shape[1]
    size = min(most, width)
    count = -(-width // size)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * size - width), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(padded.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    columns = jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)

    def step(total, part):
        added, rows = figure(*part)
        return jax.tree.map(jnp.add, total, added), rows

    total, rows = jax.lax.scan(step, start, (*map(cut, parts), columns))
    whole = jnp.moveaxis(rows, 0, 1)
    return total, whole.reshape(whole.shape[0], count * size)[:, :width]


def _pass(
    config: ModelConfig, params: Params, rows: _Rows, near: Array, far: Array, window: int, low: int, high: int,
    most: int,
) -> dict[str, Array]:  # fmt: skip
    """One pass: spans of every head, summed over a row's tokens, and the figures of the weighted heads."""
    tokens, positions, segments, mask = rows
    seen, distances = visible(config, positions, segments, positions, segments), (positions, positions)
    numbers = {"scale": score_scale(config), "softcap": config.attention_softcap}
    keys = jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def figures(q, k, allowed, near, far):
        def of(q, allowed, acting, columns):
            weights = attention_weights(q, k, allowed, **numbers)
            inside = jnp.where((acting[:, :, None] & mask[:, None, :])[:, None], weights, 0.0)
            inside = inside / jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1e-12)
            back = (columns[:, None] - keys[None, :]).astype(jnp.float32)
            span = jnp.sum(inside * back[None, None], axis=(2, 3))
            close = jnp.einsum("h,bhct->bct", near, inside)
            wide = jnp.einsum("h,bhct->bct", far, inside)
            received = jnp.sum(jnp.where(((back >= low) & (back <= high))[None], wide, 0.0), axis=1)
            return (span, received), jnp.sum(close * jnp.clip(back, 0.0, window)[None], axis=-1)

        start = jnp.zeros((q.shape[0], q.shape[2]), jnp.float32), jnp.zeros(mask.shape, jnp.float32)
        return _queries_in_parts(of, start, most, q, allowed, mask)

    def step(carry, scanned_layer):
        x, waad, fai = carry
        layer, near, far = scanned_layer
        found = []

        def attend(normed):
            q, k, v = queries_keys_values(config, layer, normed, positions)
            allowed = layer_mask(layer, seen, distances)
            found.append(figures(q, k, allowed, near, far))
            return attention(config, layer, q, k, v, seen, distances)

        x, _ = block(config, How(), layer, x, attend)
        (span, received), close = found[0]
        return (x, waad + close, fai + received), span

    params = jax.lax.stop_gradient(params)
    x = embed(config, How(), params, tokens, positions, segments)
    zeros = jnp.zeros(mask.shape, jnp.float32)
    (_, waad, fai), spans = jax.lax.scan(step, (x, zeros, zeros), (scanned(config, params), near, far))
    return {
        "span": jnp.moveaxis(spans, 0, 1),
        "waad": jnp.where(mask, waad, 0.0),
        "fai": jnp.where(mask, fai / jnp.maximum(_in_reach(mask, low, high), 1.0), 0.0),
    }


def head_shares(spans: Float[Array, "L H"], fraction: float) -> tuple[Float[Array, "L H"], Float[Array, "L H"]]:
    """Equal weights of the ``fraction`` of heads with the shortest span, and of those with the longest.

    >>> import jax.numpy as jnp
    >>> near, far = head_shares(jnp.array([[3.0, 1.0], [2.0, 4.0]]), 0.5)
    >>> near.tolist(), far.tolist()
    ([[0.0, 0.5], [0.5, 0.0]], [[0.5, 0.0], [0.0, 0.5]])
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie in (0, 1]; it is the share of heads on either side")
    flat = spans.ravel()
    count = max(1, round(fraction * flat.shape[0]))
    order = jnp.argsort(flat)
    chosen = [jnp.zeros(flat.shape, jnp.float32).at[part].set(1.0 / count) for part in (order[:count], order[-count:])]
    return chosen[0].reshape(spans.shape), chosen[1].reshape(spans.shape)


def rhythm(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    window: int = 10,
    low: int = 4,
    high: int = 50,
    fraction: float = 0.3,
    queries: int = 128,
    most_bytes: int = 2**28,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """``(WAAD, FAI)`` of every response token, as ``advantages.attention`` makes them from whole maps.

    Two passes: the first finds how far each head looks back, the second reads the figures of the heads so chosen. At
    once exist the weights of one layer, ``queries`` queries and so many rows as take ``most_bytes``.

    From "Attention Illuminates LLM Reasoning: The Preplan-and-Anchor Rhythm", arXiv:2510.13554, section 3.
    """
    if window < 1 or not 1 <= low <= high:
        raise ValueError(f"window={window} must be at least 1 token, and low={low} from 1 to high={high}")
    rows = _Rows(tokens, positions, segment_ids, mask)
    width = tokens.shape[1]
    at_once = rows_within(most_bytes, 4 * config.num_heads * min(queries, width) * width)
    none = jnp.zeros((config.num_layers, config.num_heads), jnp.float32)

    def run(near, far):
        def of(some):
            return _pass(config, params, some, near, far, window, low, high, queries)

        return in_row_parts(of, rows, at_once=at_once)

    spans = jnp.sum(run(none, none)["span"], axis=0) / jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    found = run(*head_shares(spans, fraction))
    return jax.lax.stop_gradient((found["waad"], found["fai"]))
