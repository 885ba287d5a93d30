"""Attention of every family: rotary angles, who sees whom, grouped-query scores with an optional soft cap."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.kernels.token_rows import LANES, TokenRows, Waves
from jaxrl_llm.models.layers import Layer, ProductFn, norm, plain_product, projections
from jaxrl_llm.models.spec import NO_WINDOW, ModelConfig

AttendFn = Callable[..., Array]  # with the arguments of ``attend``
RotateFn = Callable[..., Array]  # with those of ``rotate``
HeadsFn = Callable[[Array, Array | None], Array]  # heads side by side [B, S, H * K], the scale of their norm or None

_MASKED = -1e30  # finite: a row without any visible key (padding) stays free of NaN


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Inverse frequencies ``[rotary_dim / 2]`` with the configured scaling (float64, cast at use).

    ``llama3`` keeps high frequencies, divides low ones by ``factor`` and interpolates between, as in the Llama 3.1
    release.
    """
    inverse = _unscaled(config, config.rope_theta)
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


def _unscaled(config: ModelConfig, theta: float) -> np.ndarray:
    return theta ** -(np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim)


def per_layer(config: ModelConfig) -> dict[str, np.ndarray]:
    """What differs between layers and is no parameter, layers on axis 0, scanned beside the parameters.

    ``window``: how many positions back a layer sees. ``inverse``: its rotary frequencies. Families whose layers are
    all alike scan neither.
    """
    arrays: dict[str, np.ndarray] = {}
    if len(set(config.windows)) > 1:
        unlimited = np.iinfo(np.int32).max
        arrays["window"] = np.asarray([unlimited if w == NO_WINDOW else w for w in config.windows], np.int32)
    if config.local_rope_theta is not None:
        local, full = _unscaled(config, config.local_rope_theta), rope_frequencies(config)
        windows = config.windows or (NO_WINDOW,) * config.num_layers
        arrays["inverse"] = np.stack([full if w == NO_WINDOW else local for w in windows]).astype(np.float32)
    return arrays


def rotate(x: Float[Array, "B S H K"], positions: Int[Array, "B S"], inverse: Array | np.ndarray) -> Array:
    """Rotary embedding (half-split layout) of the first ``2 len(inverse)`` entries of a head, angles in float32."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(inverse, jnp.float32)[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    half = inverse.shape[0]
    wide = x.astype(jnp.float32)
    first, second, *rest = jnp.split(wide, [half, 2 * half][: 1 + (2 * half < x.shape[-1])], axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, *rest]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


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


def within_window(
    query_positions: Int[Array, "B S"], key_positions: Int[Array, "B C"], window: Int[Array, ""] | int
) -> Bool[Array, "B S C"]:
    """Keys less than ``window`` positions back: the token itself and the ``window - 1`` before it."""
    return query_positions[:, :, None] - key_positions[:, None, :] < window


def _turned(x: Array, cos: Array, sin: Array, forward: bool = True) -> Array:
    """``x cos + T x sin``, where ``T`` changes the halves of a head, and the sign of the first, by a product.

    Args:
      forward: else with ``T`` transposed, the rotation back.
    """
    half, width = cos.shape[-1] // 2, x.shape[-1]
    turn = np.zeros((width, width), np.float32)
    turn[np.arange(half, 2 * half), np.arange(half)] = -1.0
    turn[np.arange(half), np.arange(half, 2 * half)] = 1.0
    rest = [(0, 0), (0, 0), (0, 0), (0, width - 2 * half)]
    cos, sin = jnp.pad(cos, rest, constant_values=1.0), jnp.pad(sin, rest)
    turned = jax.lax.dot_general(
        x, jnp.asarray(turn if forward else turn.T, x.dtype), (((3,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


@jax.custom_vjp
def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    return _turned(x, cos, sin)


def _rotated_forward(x, cos, sin):
    return _turned(x, cos, sin), (cos, sin)


def _rotated_backward(kept, grad):
    """A product of ``grad`` as it came: differentiated by JAX it is one of float32, in six parts on a TPU."""
    cos, sin = kept
    return _turned(grad, cos, sin, forward=False), jnp.zeros_like(cos), jnp.zeros_like(sin)  # positions do not train


_rotated.defvjp(_rotated_forward, _rotated_backward)


def rotate_by_product(x: Float[Array, "B S H K"], positions: Int[Array, "B S"], inverse: Array | np.ndarray) -> Array:
    """``rotate`` where halves of a head are dear to cut: they change places by a product with 0, 1 and -1, exactly."""
    return _rotated(x, *_waves(positions, inverse))


def _waves(positions: Int[Array, "B S"], inverse: Array | np.ndarray) -> tuple[Array, Array]:
    """Cosines and sines ``[B, S, 1, 2 len(inverse)]``, of both halves of a head."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(inverse, jnp.float32)[None, None, :]
    cos, sin = (jnp.concatenate([f(angles)] * 2, axis=-1)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    return cos, sin


def before_layers(config: ModelConfig, rotate_fn: RotateFn, positions: Int[Array, "B S"]) -> RotateFn:
    """``rotate_fn`` of all layers: by a product its waves are made once, where no layer has frequencies of its own."""
    if rotate_fn is not rotate_by_product or config.learned_positions or config.local_rope_theta is not None:
        return rotate_fn
    cos, sin = _waves(positions, rope_frequencies(config))
    return lambda x, *_: _rotated(x, cos, sin)


def heads_before_layers(
    config: ModelConfig, token_rows: TokenRows | None, positions: Int[Array, "B S"]
) -> HeadsFn | None:
    """What norms and rotates heads in all layers by a kernel; None without one, or for heads that it does not take."""
    whole = config.rotary_dim == config.head_dim and config.head_dim % LANES == 0
    alike = not config.learned_positions and config.local_rope_theta is None
    if token_rows is None or not whole or not alike or (config.qk_norm and config.norm != "rms"):
        return None
    cos, sin = (wave[:, :, 0] for wave in _waves(positions, rope_frequencies(config)))
    first = jnp.arange(config.head_dim, dtype=jnp.int32) < config.head_dim // 2
    waves = Waves(cos, jnp.where(first[None, None], -sin, sin))
    return lambda x, scale: token_rows.heads(x, scale, waves, config.rms_norm_eps)


class Seen(NamedTuple):
    """Who sees whom as positions and segments, for a kernel that needs no mask of all queries and keys."""

    query_positions: Int[Array, "B S"]
    query_segments: Int[Array, "B S"]
    key_positions: Int[Array, "B C"]
    key_segments: Int[Array, "B C"]
    window: Int[Array, ""] | int = np.iinfo(np.int32).max  # less than so many positions back

    def dense(self) -> Bool[Array, "B S C"]:
        """As a mask."""
        return attention_mask(*self[:4]) & within_window(self.query_positions, self.key_positions, self.window)


def visible(
    config: ModelConfig,
    query_positions: Int[Array, "B S"],
    query_segments: Int[Array, "B S"],
    key_positions: Int[Array, "B C"],
    key_segments: Int[Array, "B C"],
) -> Bool[Array, "B S C"]:
    """The mask that all layers share, the window included where it is the same in each."""
    mask = attention_mask(query_positions, query_segments, key_positions, key_segments)
    if len(set(config.windows)) == 1:
        return mask & within_window(query_positions, key_positions, config.windows[0])
    return mask


def attend(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
) -> Float[Array, "B S H K"]:
    """Grouped-query attention, scores and softmax in float32; ``softcap tanh(scores / softcap)`` where one is given.

    More than ``2 block`` queries go ``block`` at a time, forward and backward, so that the scores of all of them,
    ``[B, H, S, C]``, never exist at once.
    """
    return _in_blocks(lambda q, mask: _attend(q, k, v, mask, scale, softcap), block, q, mask)


def _in_blocks(run: Callable[..., Array], block: int, *parts: Array) -> Array:
    """``run`` on arrays that share axis 1: at once, or where they are long ``block`` columns at a time."""
    rows = parts[0].shape[1]
    if rows <= 2 * block:
        return run(*parts)
    count = -(-rows // block)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * block - rows), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(padded.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    one = jax.checkpoint(run)
    _, out = jax.lax.scan(lambda _, part: (None, one(*part)), None, tuple(map(cut, parts)))
    whole = jnp.moveaxis(out, 0, 1)
    return whole.reshape(whole.shape[0], count * block, *whole.shape[3:])[:, :rows]


def _attend(q: Array, k: Array, v: Array, mask: Array, scale: float | None, softcap: float | None) -> Array:
    """All queries at once.

    Keys and values are head-major, and the queries that share a head are rows of one matrix: both products are then
    plain batched matrix products (two to three times faster on a CPU than the five-axis contraction).
    """
    b, s, h, d = q.shape
    g, r = k.shape[1], h // k.shape[1]
    rows = jnp.reshape(jnp.transpose(q.reshape(b, s, g, r, d), (0, 2, 3, 1, 4)), (b, g, r * s, d))
    scores = jnp.einsum("bgsd,bgcd->bgsc", rows, k, preferred_element_type=jnp.float32)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None, :, :], scores.reshape(b, g, r, s, -1), _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(b, g, r * s, -1)
    out = jnp.einsum("bgsc,bgcd->bgsd", weights, v)
    return jnp.transpose(out.reshape(b, g, r, s, d), (0, 3, 1, 2, 4)).reshape(b, s, h, d)


def attend_part(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"]]:
    """``attend`` to some of the keys, in float32, and the logarithm of each query's sum of weights.

    Parts are put together by these logarithms: ``out = sum_i exp(lse_i - lse) out_i``, ``lse = logsumexp_i lse_i``. A
    query that sees nobody gets zeros and -1e30. Made to run forward alone; ``part_gradients`` is its backward pass.
    """

    def some(_, part):
        q, mask = part
        scores, _ = _part_scores(q, k, mask, scale, softcap)
        top = jnp.max(scores, axis=-1)
        weights = jnp.where(_of_heads(mask, scores), jnp.exp(scores - top[..., None]), 0.0)
        total = jnp.maximum(jnp.sum(weights, axis=-1), 1e-30)
        out = jnp.einsum("bgmc,bgcd->bgmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return None, (_by_column(out / total[..., None], q.shape), (top + jnp.log(total)).reshape(*q.shape[::2], -1))

    q, mask = _cut_in_blocks(block, q, mask)
    out, lse = jax.lax.scan(some, None, (q, mask))[1]
    return _whole(out), jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1)


def part_gradients(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    lse: Float[Array, "B H S"],
    delta: Float[Array, "B H S"],
    grad: Float[Array, "B S H K"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B G C K"], Float[Array, "B G C K"]]:
    """What some of the keys add to the gradients of queries, keys and values, in float32.

    Args:
      lse: logarithm of the sum of the weights of all keys.
      delta: product of each query's output, of all keys, with its gradient.
      grad: of the output.
    """
    wide = {"preferred_element_type": jnp.float32}

    def some(carry, part):
        q, mask, lse, delta, grad = part
        scores, slope = _part_scores(q, k, mask, scale, softcap)
        lse, delta = (jnp.swapaxes(x, 1, 2).reshape(scores.shape[:3])[..., None] for x in (lse, delta))
        weights = jnp.where(_of_heads(mask, scores), jnp.exp(scores - lse), 0.0)
        queries, grad = (_by_head(x.astype(v.dtype), v.shape[1]) for x in (q, grad))
        wanted = jnp.einsum("bgmd,bgcd->bgmc", grad, v, **wide)
        slopes = (weights * (wanted - delta) * slope).astype(q.dtype)
        of_queries = jnp.einsum("bgmc,bgcd->bgmd", slopes, k, **wide)
        of_keys = jnp.einsum("bgcm,bgmd->bgcd", jnp.swapaxes(slopes, 2, 3), queries, **wide)
        of_values = jnp.einsum("bgcm,bgmd->bgcd", jnp.swapaxes(weights.astype(v.dtype), 2, 3), grad, **wide)
        return (carry[0] + of_keys, carry[1] + of_values), _by_column(of_queries, q.shape)

    turned = (jnp.swapaxes(x, 1, 2) for x in (lse, delta))
    parts = _cut_in_blocks(block, q, mask, *turned, grad)
    nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (dk, dv), dq = jax.lax.scan(some, nothing, parts)
    return _whole(dq), dk, dv


def _cut_in_blocks(block: int, *arrays: Array) -> tuple[Array, ...]:
    """``[B, S, ...]`` as ``[N, B, S / N, ...]``, the fewest equal parts of at most ``block``."""
    rows = arrays[0].shape[1]
    count = next(n for n in range(-(-rows // block), rows + 1) if rows % n == 0)
    return tuple(jnp.moveaxis(x.reshape(x.shape[0], count, rows // count, *x.shape[2:]), 1, 0) for x in arrays)


def _whole(parts: Array) -> Array:
    """``[N, B, S / N, ...]`` as ``[B, S, ...]``."""
    return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1, *parts.shape[3:])


def _by_head(x: Array, groups: int) -> Array:
    """``[B, S, H, K] -> [B, G, (H / G) S, K]``: the queries that share a head are rows of one matrix."""
    b, s, h, d = x.shape
    return jnp.transpose(x.reshape(b, s, groups, h // groups, d), (0, 2, 3, 1, 4)).reshape(b, groups, -1, d)


def _by_column(x: Array, shape: tuple[int, ...]) -> Array:
    """``_by_head`` undone."""
    b, s, h, d = shape
    return jnp.transpose(x.reshape(b, h, s, d), (0, 2, 1, 3))


def _of_heads(mask: Array, scores: Array) -> Array:
    """``[B, S, C]`` as ``[B, G, (H / G) S, C]``."""
    times = scores.shape[2] // mask.shape[1]
    return jnp.broadcast_to(jnp.tile(mask, (1, times, 1))[:, None], scores.shape)


def _part_scores(
    q: Array, k: Array, mask: Array, scale: float | None, softcap: float | None
) -> tuple[Array, Array | float]:
    """Scores ``[B, G, (H / G) S, C]`` in float32, and their slope by the plain product."""
    times = q.shape[3] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bgmd,bgcd->bgmc", _by_head(q, k.shape[1]), k, preferred_element_type=jnp.float32) * times
    slope = times
    if softcap is not None:
        bent = jnp.tanh(scores / softcap)
        scores, slope = softcap * bent, times * (1.0 - bent * bent)
    return jnp.where(_of_heads(mask, scores), scores, _MASKED), slope


def attend_after(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    before_k: Float[Array, "P G L K"],
    before_v: Float[Array, "P G L K"],
    before_mask: Bool[Array, "B S L"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
) -> Float[Array, "B S H K"]:
    """``attend`` to keys that ``B / P`` rows in a row share and then to their own; what is shared is never repeated.

    The queries of a group are the rows of one product with the shared keys; one softmax goes over both parts.
    """

    def run(q: Array, mask: Array, before_mask: Array) -> Array:
        return _attend_after(q, (before_k, before_v, before_mask), (k, v, mask), scale, softcap)

    return _in_blocks(run, block, q, mask, before_mask)


def _attend_after(q: Array, before: tuple, own: tuple, scale: float | None, softcap: float | None) -> Array:
    b, s, h, d = q.shape
    p, g = before[0].shape[:2]
    n, r = b // p, h // g

    def grouped(x: Array) -> Array:
        """``[B, G, ...] -> [P, G, B / P, ...]``"""
        return jnp.swapaxes(x.reshape(p, n, *x.shape[1:]), 1, 2)

    def scored(scores: Array, mask: Array) -> Array:
        scores = scores.reshape(p, g, n, r, s, -1) * (d**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        return jnp.where(mask.reshape(p, 1, n, 1, s, -1), scores, _MASKED)

    wide = {"preferred_element_type": jnp.float32}
    rows = grouped(jnp.transpose(q.reshape(b, s, g, r, d), (0, 2, 3, 1, 4)).reshape(b, g, r * s, d))
    k, v = grouped(own[0]), grouped(own[1])
    far = scored(jnp.einsum("pgmd,pgcd->pgmc", rows.reshape(p, g, n * r * s, d), before[0], **wide), before[2])
    near = scored(jnp.einsum("pgnmd,pgncd->pgnmc", rows, k, **wide), own[2])
    top = jnp.maximum(jnp.max(far, axis=-1, keepdims=True), jnp.max(near, axis=-1, keepdims=True))
    far, near = (jnp.exp(x - jax.lax.stop_gradient(top)) for x in (far, near))
    total = jnp.sum(far, axis=-1) + jnp.sum(near, axis=-1)
    far, near = far.astype(v.dtype), near.astype(v.dtype)
    out = jnp.einsum("pgmc,pgcd->pgmd", far.reshape(p, g, n * r * s, -1), before[1], **wide).reshape(p, g, n, r, s, d)
    out = out + jnp.einsum("pgnmc,pgncd->pgnmd", near.reshape(p, g, n, r * s, -1), v, **wide).reshape(out.shape)
    out = (out / total[..., None]).astype(q.dtype)
    return jnp.transpose(out, (0, 2, 4, 1, 3, 5)).reshape(b, s, h, d)


def repeated(attend_fn: AttendFn) -> AttendFn:
    """An ``attend_after`` out of another ``attend``: what is shared is repeated for every row."""

    def run(q, k, v, mask, before_k, before_v, before_mask, **settings):
        times = q.shape[0] // before_k.shape[0]
        k, v = (jnp.concatenate([jnp.repeat(x, times, axis=0), y], axis=2) for x, y in ((before_k, k), (before_v, v)))
        return attend_fn(q, k, v, jnp.concatenate([before_mask, mask], axis=2), **settings)

    return run


def queries_keys_values(
    config: ModelConfig,
    layer: Layer,
    x: Array,
    positions: Array,
    rotate_fn: RotateFn = rotate,
    product_fn: ProductFn = plain_product,
    heads_fn: HeadsFn | None = None,
) -> tuple[Array, Array, Array]:
    """Rotated queries ``[B, S, H, K]``, rotated keys and values ``[B, G, S, K]``.

    Args:
      heads_fn: norms and rotates the heads of queries and keys, ``heads_before_layers``; None: ``rotate_fn`` does.
    """
    b, s, _ = x.shape
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    found = projections(x, layer, "qkv", tuple(n * config.head_dim for n in heads), product_fn)
    if heads_fn is not None:
        q, k, v = found
        found = heads_fn(q, layer.get("q_norm")), heads_fn(k, layer.get("k_norm")), v
    q, k, v = (y.reshape(b, s, n, config.head_dim) for y, n in zip(found, heads, strict=True))
    if heads_fn is None and config.qk_norm:
        q, k = norm(config, q, layer, "q_norm"), norm(config, k, layer, "k_norm")
    if heads_fn is None and not config.learned_positions:
        inverse = layer["inverse"] if "inverse" in layer else rope_frequencies(config)
        q, k = rotate_fn(q, positions, inverse), rotate_fn(k, positions, inverse)
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def score_scale(config: ModelConfig) -> float:
    """What scores are multiplied with."""
    return (config.query_scalar or config.head_dim) ** -0.5


def seen(config: ModelConfig, *places: Array) -> Seen:
    """``visible`` of the same arguments, not made dense."""
    return Seen(*places, config.windows[0]) if len(set(config.windows)) == 1 else Seen(*places)


def layer_mask(layer: Layer, mask: Array | Seen, distances: tuple[Array, Array]) -> Array | Seen:
    """``visible`` with the layer's own window, where layers differ; ``distances``: positions of queries and keys."""
    if isinstance(mask, Seen):
        return mask._replace(window=layer["window"]) if "window" in layer else mask
    return mask & within_window(*distances, layer["window"]) if "window" in layer else mask


def attention(
    config: ModelConfig,
    layer: Layer,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | Seen,
    distances: tuple,
    attend_fn: AttendFn = attend,
) -> Float[Array, "B S H K"]:
    """``attend_fn`` with the family's scale and soft cap, and the layer's own window where layers differ."""
    mask = layer_mask(layer, mask, distances)
    return attend_fn(q, k, v, mask, scale=score_scale(config), softcap=config.attention_softcap)
