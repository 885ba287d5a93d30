"""Attention as a Pallas kernel for TPUs: scores and weights of a block of queries and keys exist in fast memory alone.

Forward and backward go over blocks of the score matrix and pass over those in which nobody sees anybody, which a map of
blocks says. The mask is any; queries that share a head of keys read the same block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

_MASKED = -1e30
_LANES = 128


class _How(NamedTuple):
    """What is no array."""

    scale: float
    softcap: float | None
    block: int
    interpret: bool


def attend(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    v: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """``models.attention.attend`` without its score matrix; a query that sees nobody gets zeros.

    Args:
      block: queries, and keys, at a time; a multiple of 128 on a TPU. Less where there are fewer.
      interpret: run the kernel as plain operations, on any device.

    Raises:
      ValueError: for a block that is no positive number.
    """
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")
    rows, columns = q.shape[1], k.shape[2]
    block = min(block, -(-max(rows, columns) // _LANES) * _LANES) if block >= _LANES else block
    how = _How(q.shape[3] ** -0.5 if scale is None else scale, softcap, block, interpret)
    heads_first = jnp.swapaxes(q, 1, 2)

    def filled(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, -x.shape[a] % block if a == axis else 0) for a in range(x.ndim)])

    seen = filled(filled(mask.astype(jnp.int8), 1), 2)
    out = _flash(how, filled(heads_first, 2), filled(k, 2), filled(v, 2), seen)
    return jnp.swapaxes(out[:, :, :rows], 1, 2)


def _blocks(how: _How, seen: Array) -> Array:
    """Which blocks of the mask hold anything, as whole numbers ``[B, S / block, C / block]``."""
    b, s, c = seen.shape
    parts = seen.reshape(b, s // how.block, how.block, c // how.block, how.block)
    return jnp.max(parts, axis=(2, 4)).astype(jnp.int32)


def _scores(how: _How, q: Array, k: Array, seen: Array) -> tuple[Array, Array]:
    """Scores of a block in float32 with the masked ones far below, and the slope of the soft cap."""
    scores = _product(q, k, ((1,), (1,))) * jnp.float32(how.scale)
    slope = jnp.ones_like(scores)
    if how.softcap is not None:
        bent = jnp.tanh(scores / jnp.float32(how.softcap))
        scores, slope = jnp.float32(how.softcap) * bent, 1 - bent * bent
    return jnp.where(seen != 0, scores, jnp.float32(_MASKED)), slope


def _product(left: Array, right: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(left, right, (axes, ((), ())), preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """``[1, N]`` as ``[N, 1]``: a whole tile is turned, which is what the hardware can."""
    return jnp.transpose(jnp.broadcast_to(row, (_LANES, row.shape[1])))[:, :1]


def _row(column: Array) -> Array:
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], _LANES)))[:1]


def _forward_kernel(how, blocks, q, k, v, seen, out, lse, top, total, acc):
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full(top.shape, _MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        here = seen[0].astype(jnp.int32)
        scores, _ = _scores(how, q[0, 0], k[0, 0], here)
        before = top[:, :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(here != 0, jnp.exp(scores - highest), jnp.float32(0))
        shrink = jnp.exp(before - highest)
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        acc[...] = acc[...] * shrink + _product(weights.astype(v.dtype), v[0, 0], ((1,), (0,)))
        top[...] = jnp.broadcast_to(highest, top.shape)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        summed = jnp.maximum(total[:, :1], jnp.float32(1e-30))
        out[0, 0] = (acc[...] / summed).astype(out.dtype)
        lse[0, 0] = _row(top[:, :1] + jnp.log(summed))


def _weights(how, q, k, v, seen, lse, delta, grad):
    """Softmax weights of a block, and the gradient of its scores before scale and soft cap."""
    here = seen[0].astype(jnp.int32)
    scores, slope = _scores(how, q[0, 0], k[0, 0], here)
    weights = jnp.where(here != 0, jnp.exp(scores - _column(lse[0, 0])), jnp.float32(0))
    wanted = _product(grad[0, 0], v[0, 0], ((1,), (1,)))
    return weights, weights * (wanted - _column(delta[0, 0])) * slope * jnp.float32(how.scale)


def _queries_kernel(how, blocks, q, k, v, seen, lse, delta, grad, out, acc):
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        _, slopes = _weights(how, q, k, v, seen, lse, delta, grad)
        acc[...] += _product(slopes.astype(k.dtype), k[0, 0], ((1,), (0,)))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        out[0, 0] = acc[...].astype(out.dtype)


def _keys_kernel(how, blocks, q, k, v, seen, lse, delta, grad, out_k, out_v, acc_k, acc_v):
    b, j, r, i = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((r == 0) & (i == 0))
    def _():
        acc_k[...] = jnp.zeros(acc_k.shape, jnp.float32)
        acc_v[...] = jnp.zeros(acc_v.shape, jnp.float32)

    @pl.when(blocks[b, i, j] > 0)
    def _():
        weights, slopes = _weights(how, q, k, v, seen, lse, delta, grad)
        acc_v[...] += _product(jnp.transpose(weights).astype(grad.dtype), grad[0, 0], ((1,), (0,)))
        acc_k[...] += _product(jnp.transpose(slopes).astype(q.dtype), q[0, 0], ((1,), (0,)))

    @pl.when((r == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        out_k[0, 0] = acc_k[...].astype(out_k.dtype)
        out_v[0, 0] = acc_v[...].astype(out_v.dtype)


def _shaped(like: Array, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype or like.dtype)


def _group(head: Array, times: int) -> Array:
    """``head // times`` of what is not negative; the rule for signs asks which TPU is there."""
    return jax.lax.div(head, jnp.int32(times))


def _call(how: _How, kernel, blocks, arrays, *, grid, inside, outside, out, scratch):
    run = pl.pallas_call(
        functools.partial(kernel, how),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=inside, out_specs=outside, scratch_shapes=scratch
        ),
        out_shape=out,
        interpret=how.interpret,
    )
    return run(blocks, *arrays)


def _forward(how: _How, q, k, v, seen):
    (b, h, s, d), (g, c), n = q.shape, k.shape[1:3], how.block
    times = h // g
    query = pl.BlockSpec((1, 1, n, d), lambda b, h, i, j, _: (b, h, i, 0))
    key = pl.BlockSpec((1, 1, n, d), lambda b, h, i, j, _: (b, _group(h, times), j, 0))
    wide = [pltpu.VMEM((n, width), jnp.float32) for width in (_LANES, _LANES, d)]
    # the sums are kept in as many lanes as there are: columns of one are no shape of the hardware's
    return _call(
        how,
        _forward_kernel,
        _blocks(how, seen),
        (q, k, v, seen),
        grid=(b, h, s // n, c // n),
        inside=[query, key, key, pl.BlockSpec((1, n, n), lambda b, h, i, j, _: (b, i, j))],
        outside=[query, pl.BlockSpec((1, 1, 1, n), lambda b, h, i, j, _: (b, h, 0, i))],
        out=[_shaped(q, b, h, s, d), _shaped(q, b, h, 1, s, dtype=jnp.float32)],
        scratch=wide,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(how: _How, q, k, v, seen):
    return _forward(how, q, k, v, seen)[0]


def _flash_forward(how: _How, q, k, v, seen):
    out, lse = _forward(how, q, k, v, seen)
    return out, (q, k, v, seen, out, lse)


def _flash_backward(how: _How, kept, grad):
    q, k, v, seen, out, lse = kept
    (b, h, s, d), (g, c), n = q.shape, k.shape[1:3], how.block
    times = h // g
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, :, None]
    blocks, arrays = _blocks(how, seen), (q, k, v, seen, lse, delta, grad)
    query = pl.BlockSpec((1, 1, n, d), lambda b, h, i, j, _: (b, h, i, 0))
    key = pl.BlockSpec((1, 1, n, d), lambda b, h, i, j, _: (b, _group(h, times), j, 0))
    line = pl.BlockSpec((1, 1, 1, n), lambda b, h, i, j, _: (b, h, 0, i))
    dq = _call(
        how,
        _queries_kernel,
        blocks,
        arrays,
        grid=(b, h, s // n, c // n),
        inside=[query, key, key, pl.BlockSpec((1, n, n), lambda b, h, i, j, _: (b, i, j)), line, line, query],
        outside=query,
        out=_shaped(q, *q.shape),
        scratch=[pltpu.VMEM((n, d), jnp.float32)],
    )
    query = pl.BlockSpec((1, 1, n, d), lambda b, g, j, r, i, _: (b, g * times + r, i, 0))
    key = pl.BlockSpec((1, 1, n, d), lambda b, g, j, r, i, _: (b, g, j, 0))
    line = pl.BlockSpec((1, 1, 1, n), lambda b, g, j, r, i, _: (b, g * times + r, 0, i))
    dk, dv = _call(
        how,
        _keys_kernel,
        blocks,
        arrays,
        grid=(b, g, c // n, times, s // n),
        inside=[query, key, key, pl.BlockSpec((1, n, n), lambda b, g, j, r, i, _: (b, i, j)), line, line, query],
        outside=[key, key],
        out=[_shaped(k, *k.shape), _shaped(v, *v.shape)],
        scratch=[pltpu.VMEM((n, d), jnp.float32)] * 2,
    )
    return dq, dk, dv, None


_flash.defvjp(_flash_forward, _flash_backward)
