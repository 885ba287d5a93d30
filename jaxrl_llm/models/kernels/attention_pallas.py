"""Attention as a Pallas kernel for TPUs: scores and weights of a block of queries and keys exist in fast memory alone.

Forward and backward go over blocks of the score matrix and pass over those in which nobody sees anybody, which a map of
blocks says. Who sees whom is worked out inside from positions and segments (``models.attention.Seen``), without a mask
of all queries and keys; or the mask is any. Queries that share a head of keys read the same block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from jaxrl_llm.models.attention import Seen
from jaxrl_llm.models.layers import ATTENDED

_MASKED = -1e30
_LANES = 128


class _How(NamedTuple):
    """What is no array."""

    scale: float
    softcap: float | None
    block: int
    interpret: bool
    heads: int
    groups: int
    lanes: bool = False  # queries are [B, S, H * K], a head so many lanes; else [B, H, S, K]
    key_lanes: bool = False  # keys and values likewise


def attend(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"] | Seen,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """``models.attention.attend`` without its score matrix; a query that sees nobody gets zeros.

    Args:
      mask: dense, or as positions and segments.
      block: queries, and keys, at a time; a multiple of 128 on a TPU. Less where there are fewer.
      interpret: run the kernel as plain operations, on any device.

    Raises:
      ValueError: for a block that is no positive number.
    """
    how, arrays, seen = _prepared(q, k, v, mask, scale, softcap, block, interpret)
    return _returned(how, _flash(how, *arrays, seen), q.shape[1])


def part(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"] | Seen,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"]]:
    """``attend`` to some of the keys, in float32, and the logarithm of each query's sum of weights.

    Parts are put together by these logarithms: see ``distributed.ring``. Has no gradient of its own.
    """
    how, arrays, seen = _prepared(q, k, v, mask, scale, softcap, block, interpret)
    out, lse = _forward(how, *arrays, seen, dtype=jnp.float32)
    return _returned(how, out, q.shape[1]), lse[:, :, 0, : q.shape[1]]


def part_gradients(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"] | Seen,
    lse: Float[Array, "B H S"],
    delta: Float[Array, "B H S"],
    grad: Float[Array, "B S H K"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B G C K"], Float[Array, "B G C K"]]:
    """What some of the keys add to the gradients of queries, keys and values, in float32.

    Args:
      lse: logarithm of the sum of the weights of all keys.
      delta: product of each query's output, of all keys, with its gradient.
    """
    how, arrays, seen = _prepared(q, k, v, mask, scale, softcap, block, interpret)
    (grad,) = _queries_laid(how, grad.astype(q.dtype))
    lse, delta = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % how.block)))[:, :, None] for x in (lse, delta))
    dq, dk, dv = _gradients(how, *arrays, seen, lse, delta, grad, dtype=jnp.float32)
    g, c, d = k.shape[1:]

    def of_keys(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], -1, g, d), 1, 2)[:, :, :c] if how.key_lanes else x[:, :, :c]

    return _returned(how, dq, q.shape[1]), of_keys(dk), of_keys(dv)


def _prepared(q, k, v, mask, scale, softcap, block, interpret) -> tuple[_How, tuple[Array, ...], tuple[Array, ...]]:
    """How, and queries, keys, values and who sees whom as the kernels read them."""
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")
    rows, columns = q.shape[1], k.shape[2]
    block = min(block, -(-max(rows, columns) // _LANES) * _LANES) if block >= _LANES else block
    lanes = q.shape[3] % _LANES == 0  # then nothing has to be turned: a head is a block of lanes
    settings = (q.shape[3] ** -0.5 if scale is None else scale, softcap, block, interpret)
    how = _How(*settings, q.shape[2], k.shape[1], lanes, lanes and rows == columns)
    filled = functools.partial(_filled, block)
    if isinstance(mask, Seen):  # padding has segment 0, which nobody sees and which sees nobody
        seen = tuple(_facts(filled(places, 1), filled(segments, 1)) for places, segments in (mask[:2], mask[2:4]))
        seen = (*seen, jnp.reshape(jnp.asarray(mask.window, jnp.int32), (1,)))
    else:
        seen = (filled(filled(mask.astype(jnp.int8), 1), 2),)
    keys = (_laid(how.key_lanes, jnp.swapaxes(filled(x, 2), 1, 2)) for x in (k, v))
    return how, (*_queries_laid(how, q), *keys), seen


def _filled(block: int, x: Array, axis: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[a] % block if a == axis else 0) for a in range(x.ndim)])


def _queries_laid(how: _How, *arrays: Array) -> tuple[Array, ...]:
    return tuple(_laid(how.lanes, _filled(how.block, x, 1)) for x in arrays)


def _returned(how: _How, out: Array, rows: int) -> Array:
    """Queries as they came, without padding."""
    if not how.lanes:
        return jnp.swapaxes(out[:, :, :rows], 1, 2)
    return out[:, :rows].reshape(out.shape[0], rows, how.heads, -1)


def _laid(lanes: bool, x: Array) -> Array:
    """``[B, S, H, K]`` as the kernels read it."""
    return x.reshape(*x.shape[:2], -1) if lanes else jnp.swapaxes(x, 1, 2)


def _tile(ref) -> Array:
    """What a block holds, without the axes of one."""
    return ref[(0,) * (len(ref.shape) - 2)]


def _set(ref, value: Array) -> None:
    ref[(0,) * (len(ref.shape) - 2)] = value.astype(ref.dtype)


def _facts(places: Array, segments: Array) -> Array:
    """Position and segment of every column as the first two rows of a tile, ``[B, 8, S]``."""
    return jnp.pad(jnp.stack([places, segments], axis=1).astype(jnp.int32), ((0, 0), (0, 6), (0, 0)))


def _blocks(how: _How, seen: tuple[Array, ...]) -> Array:
    """Which blocks of queries and keys hold anything, as whole numbers ``[B, S / block, C / block]``.

    Of positions and segments by their least and largest: a block may be named that holds nothing, none is left out.
    """
    if len(seen) == 1:
        b, s, c = seen[0].shape
        parts = seen[0].reshape(b, s // how.block, how.block, c // how.block, how.block)
        return jnp.max(parts, axis=(2, 4)).astype(jnp.int32)

    def least_and_largest(facts: Array) -> tuple[Array, Array, Array, Array]:
        places, segments = (facts[:, i].reshape(facts.shape[0], -1, how.block) for i in range(2))
        real, huge = segments > 0, jnp.iinfo(jnp.int32).max
        low = (jnp.min(jnp.where(real, x, huge), axis=2) for x in (places, segments))
        high = (jnp.max(jnp.where(real, x, -1), axis=2) for x in (places, segments))
        return *low, *high

    place, segment, last, final = (x[:, :, None] for x in least_and_largest(seen[0]))
    key, key_segment, key_last, key_final = (x[:, None, :] for x in least_and_largest(seen[1]))
    past = (key <= last) & (place - key_last < seen[2][0])
    return (past & (key_segment <= final) & (segment <= key_final)).astype(jnp.int32)


def _here(seen: list) -> Array:
    """Who sees whom within a block: the mask itself, or from positions and segments."""
    if len(seen) == 1:
        return seen[0][0].astype(jnp.int32) != 0
    query, key, window = seen
    place, segment = _column(query[0, 0:1, :]), _column(query[0, 1:2, :])
    key_place, key_segment = key[0, 0:1, :], key[0, 1:2, :]
    near = (key_place <= place) & (place - key_place < window[0])
    return near & (segment == key_segment) & (key_segment > 0)


def _scores(how: _How, q: Array, k: Array, seen: Array) -> tuple[Array, Array]:
    """Scores of a block in float32 with the masked ones far below, and the slope of the soft cap."""
    scores = _product(q, k, ((1,), (1,))) * jnp.float32(how.scale)
    slope = jnp.ones_like(scores)
    if how.softcap is not None:
        bent = jnp.tanh(scores / jnp.float32(how.softcap))
        scores, slope = jnp.float32(how.softcap) * bent, 1 - bent * bent
    return jnp.where(seen, scores, jnp.float32(_MASKED)), slope


def _product(left: Array, right: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(left, right, (axes, ((), ())), preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """``[1, N]`` as ``[N, 1]``: a whole tile is turned, which is what the hardware can."""
    return jnp.transpose(jnp.broadcast_to(row, (_LANES, row.shape[1])))[:, :1]


def _row(column: Array) -> Array:
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], _LANES)))[:1]


def _forward_kernel(how, blocks, q, k, v, *rest):
    *seen, out, lse, top, total, acc = rest
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full(top.shape, _MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        here = _here(seen)
        scores, _ = _scores(how, _tile(q), _tile(k), here)
        before = top[:, :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(here, jnp.exp(scores - highest), jnp.float32(0))
        shrink = jnp.exp(before - highest)
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        acc[...] = acc[...] * shrink + _product(weights.astype(v.dtype), _tile(v), ((1,), (0,)))
        top[...] = jnp.broadcast_to(highest, top.shape)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        summed = jnp.maximum(total[:, :1], jnp.float32(1e-30))
        _set(out, acc[...] / summed)
        lse[0, 0] = _row(top[:, :1] + jnp.log(summed))


def _weights(how, q, k, v, seen, lse, delta, grad):
    """Softmax weights of a block, and the gradient of its scores before scale and soft cap."""
    here = _here(seen)
    scores, slope = _scores(how, _tile(q), _tile(k), here)
    weights = jnp.where(here, jnp.exp(scores - _column(lse[0, 0])), jnp.float32(0))
    wanted = _product(_tile(grad), _tile(v), ((1,), (1,)))
    return weights, weights * (wanted - _column(delta[0, 0])) * slope * jnp.float32(how.scale)


def _queries_kernel(how, blocks, q, k, v, *rest):
    *seen, lse, delta, grad, out, acc = rest
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        _, slopes = _weights(how, q, k, v, seen, lse, delta, grad)
        acc[...] += _product(slopes.astype(k.dtype), _tile(k), ((1,), (0,)))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        _set(out, acc[...])


def _keys_kernel(how, blocks, q, k, v, *rest):
    *seen, lse, delta, grad, out_k, out_v, acc_k, acc_v = rest
    b, j, r, i = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((r == 0) & (i == 0))
    def _():
        acc_k[...] = jnp.zeros(acc_k.shape, jnp.float32)
        acc_v[...] = jnp.zeros(acc_v.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        weights, slopes = _weights(how, q, k, v, seen, lse, delta, grad)
        acc_v[...] += _product(jnp.transpose(weights).astype(grad.dtype), _tile(grad), ((1,), (0,)))
        acc_k[...] += _product(jnp.transpose(slopes).astype(q.dtype), _tile(q), ((1,), (0,)))

    @pl.when((r == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        _set(out_k, acc_k[...])
        _set(out_v, acc_v[...])


def _shaped(like: Array, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype or like.dtype)


def _group(head: Array, times: int) -> Array:
    """``head // times`` of what is not negative; the rule for signs asks which TPU is there."""
    return jax.lax.div(head, jnp.int32(times))


def _masks(how: _How, seen: tuple[Array, ...], turn) -> list[pl.BlockSpec]:
    """Blocks of what says who sees whom; ``turn``: grid indices to row, block of queries, block of keys."""
    n = how.block
    if len(seen) == 1:
        return [pl.BlockSpec((1, n, n), lambda *at: turn(*at))]
    rows = pl.BlockSpec((1, 8, n), lambda *at: (turn(*at)[0], 0, turn(*at)[1]))
    keys = pl.BlockSpec((1, 8, n), lambda *at: (turn(*at)[0], 0, turn(*at)[2]))
    return [rows, keys, pl.BlockSpec(memory_space=pltpu.SMEM)]


def _sizes(how: _How, q: Array, k: Array) -> tuple[int, int, int, int]:
    """Rows, queries, keys, width of a head."""
    queries, keys = q.shape[1 if how.lanes else 2], k.shape[1 if how.key_lanes else 2]
    return q.shape[0], queries, keys, q.size // (q.shape[0] * queries * how.heads)


def _blocked(how: _How, lanes: bool, width: int, turn) -> pl.BlockSpec:
    """A block of one head; ``turn``: grid indices to row, head, block of columns."""
    if not lanes:
        return pl.BlockSpec((1, 1, how.block, width), lambda *at: (*turn(*at), 0))
    return pl.BlockSpec((1, how.block, width), lambda *at: (turn(*at)[0], turn(*at)[2], turn(*at)[1]))


def _cost(how: _How, q: Array, k: Array, products: int, queries: int, keys: int) -> pl.CostEstimate:
    """Operations of so many products with the scores, and bytes of so many times all queries and all keys.

    Of as many queries as keys half see each other.
    """
    b, s, c, d = _sizes(how, q, k)
    pairs = b * how.heads * s * c // (2 if s == c else 1)
    size = q.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * products * pairs * d, transcendentals=pairs, bytes_accessed=(queries * q.size + keys * k.size) * size
    )


def _call(how: _How, kernel, blocks, arrays, *, grid, inside, outside, out, scratch, cost):
    run = pl.pallas_call(
        functools.partial(kernel, how),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=inside, out_specs=outside, scratch_shapes=scratch
        ),
        out_shape=out,
        cost_estimate=cost,
        interpret=how.interpret,
    )
    return run(blocks, *arrays)


def _forward(how: _How, q, k, v, seen, dtype=None):
    (b, s, c, d), h, n = _sizes(how, q, k), how.heads, how.block
    times = h // how.groups
    query = _blocked(how, how.lanes, d, lambda b, h, i, j, _: (b, h, i))
    key = _blocked(how, how.key_lanes, d, lambda b, h, i, j, _: (b, _group(h, times), j))
    wide = [pltpu.VMEM((n, width), jnp.float32) for width in (_LANES, _LANES, d)]
    # the sums are kept in as many lanes as there are: columns of one are no shape of the hardware's
    return _call(
        how,
        _forward_kernel,
        _blocks(how, seen),
        (q, k, v, *seen),
        cost=_cost(how, q, k, 2, 2, 2 * times * (s // n)),
        grid=(b, h, s // n, c // n),
        inside=[query, key, key, *_masks(how, seen, lambda b, h, i, j, _: (b, i, j))],
        outside=[query, pl.BlockSpec((1, 1, 1, n), lambda b, h, i, j, _: (b, h, 0, i))],
        out=[_shaped(q, *q.shape, dtype=dtype), _shaped(q, b, h, 1, s, dtype=jnp.float32)],
        scratch=wide,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(how: _How, q, k, v, seen):
    return _forward(how, q, k, v, seen)[0]


def _flash_forward(how: _How, q, k, v, seen):
    out, lse = (checkpoint_name(x, ATTENDED) for x in _forward(how, q, k, v, seen))
    return out, (q, k, v, seen, out, lse)


def _flash_backward(how: _How, kept, grad):
    q, k, v, seen, out, lse = kept
    (b, s, _, d), h = _sizes(how, q, k), how.heads
    delta = grad.astype(jnp.float32) * out.astype(jnp.float32)
    if how.lanes:
        delta = jnp.swapaxes(jnp.sum(delta.reshape(b, s, h, d), axis=-1), 1, 2)[:, :, None]
    else:
        delta = jnp.sum(delta, axis=-1)[:, :, None]
    return *_gradients(how, q, k, v, seen, lse, delta, grad), tuple(None for _ in seen)


def _gradients(how: _How, q, k, v, seen, lse, delta, grad, dtype=None):
    """Of queries, keys and values."""
    (b, s, c, d), h, n = _sizes(how, q, k), how.heads, how.block
    times = h // how.groups
    blocks, arrays = _blocks(how, seen), (q, k, v, *seen, lse, delta, grad)
    query = _blocked(how, how.lanes, d, lambda b, h, i, j, _: (b, h, i))
    key = _blocked(how, how.key_lanes, d, lambda b, h, i, j, _: (b, _group(h, times), j))
    line = pl.BlockSpec((1, 1, 1, n), lambda b, h, i, j, _: (b, h, 0, i))
    dq = _call(
        how,
        _queries_kernel,
        blocks,
        arrays,
        cost=_cost(how, q, k, 3, 3, 2 * times * (s // n)),
        grid=(b, h, s // n, c // n),
        inside=[query, key, key, *_masks(how, seen, lambda b, h, i, j, _: (b, i, j)), line, line, query],
        outside=query,
        out=_shaped(q, *q.shape, dtype=dtype),
        scratch=[pltpu.VMEM((n, d), jnp.float32)],
    )
    query = _blocked(how, how.lanes, d, lambda b, g, j, r, i, _: (b, g * times + r, i))
    key = _blocked(how, how.key_lanes, d, lambda b, g, j, r, i, _: (b, g, j))
    line = pl.BlockSpec((1, 1, 1, n), lambda b, g, j, r, i, _: (b, g * times + r, 0, i))
    dk, dv = _call(
        how,
        _keys_kernel,
        blocks,
        arrays,
        cost=_cost(how, q, k, 4, 2 * (c // n), 4),
        grid=(b, how.groups, c // n, times, s // n),
        inside=[query, key, key, *_masks(how, seen, lambda b, g, j, r, i, _: (b, i, j)), line, line, query],
        outside=[key, key],
        out=[_shaped(k, *k.shape, dtype=dtype), _shaped(v, *v.shape, dtype=dtype)],
        scratch=[pltpu.VMEM((n, d), jnp.float32)] * 2,
    )
    return dq, dk, dv


_flash.defvjp(_flash_forward, _flash_backward)
