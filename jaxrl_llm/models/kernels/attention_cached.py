"""Attention of a few new tokens to a cache that stays where it lies: one layer of a stack, read by its number.

Cut out of its stack (``dynamic_index_in_dim``) the cache of a layer is copied before it is read: twice the traffic of
what bounds decoding. The kernel is given the number of the layer and of the filled columns before it starts
(``num_scalar_prefetch``) and fetches no block beyond them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl_llm.models import attention

CachedFn = Callable[..., Array]  # with the arguments of ``attend_layer``

_MASKED = -1e30
_LANES = 128
TILE = 128  # a cache that the kernel reads has a multiple of so many columns
_ROWS = 16  # queries that share a head of keys are rows of one product, filled up to a tile of bfloat16
_VMEM = 2**22  # bytes of a block of keys and values of all heads


def attend_layer(
    q: Float[Array, "B S H K"],
    k: Num[Array, "N B G C K"],
    v: Num[Array, "N B G C K"],
    mask: Bool[Array, "B S C"],
    layer: Int[Array, ""] | int,
    filled: Int[Array, ""] | int,
    k_scale: Float[Array, "N B G C"] | None = None,
    v_scale: Float[Array, "N B G C"] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """``models.attention.attend`` of layer ``layer`` of a stacked cache; a query that sees nobody gets zeros.

    Args:
      filled: columns from here on hold nothing, or anything, and are not read, whatever the mask says.
      k_scale, v_scale: of keys and values that are whole numbers (``models.cache.quantised``): they are read as such,
        scores and weights are multiplied instead.
      block: columns at a time; less where the heads of so many do not fit into fast memory.
      interpret: run the kernel as plain operations, on any device.
    """
    (b, s, h, d), (g, c) = q.shape, k.shape[2:4]
    r = h // g
    rows = -(-r * s // _ROWS) * _ROWS
    block = _columns(c, block, 2 * g * d * k.dtype.itemsize)
    queries = jnp.transpose(q.reshape(b, s, g, r, d), (0, 2, 3, 1, 4)).reshape(b, g, r * s, d)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, rows - r * s), (0, 0)))
    seen, masks = mask.astype(jnp.int8), 1  # of one new token every query of a row sees the same
    if s > 1:
        seen, masks = jnp.broadcast_to(seen[:, None], (b, r, s, c)).reshape(b, r * s, c), rows
        seen = jnp.pad(seen, ((0, 0), (0, rows - r * s), (0, 0)))
    filled = jnp.asarray(filled, jnp.int32)
    numbers = jnp.stack([jnp.asarray(layer, jnp.int32), (filled - 1) // block, filled])

    def last(j, numbers):
        return jnp.minimum(j, numbers[1])

    one = pl.BlockSpec((1, g, rows, d), lambda b, j, numbers: (b, 0, 0, 0))
    key = pl.BlockSpec((1, 1, g, block, d), lambda b, j, numbers: (numbers[0], b, 0, last(j, numbers), 0))
    of_key = pl.BlockSpec((1, 1, g, block), lambda b, j, numbers: (numbers[0], b, 0, last(j, numbers)))
    scales = [] if k_scale is None else [k_scale, v_scale]
    if not interpret:
        # XLA would keep the scales of all layers in fast memory from token to token, where the next weights come:
        # Qwen3-1.7B in int8, 32 rows of 2,048 on a v5e, takes 10.4 ms a token by the compiler's count, so 7.9
        scales = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in scales]
    run = pl.pallas_call(
        functools.partial(_kernel, d**-0.5 if scale is None else scale, softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, c // block),
            in_specs=[
                one, key, key, pl.BlockSpec((1, masks, block), lambda b, j, numbers: (b, 0, last(j, numbers))),
                *[of_key] * len(scales),
            ],
            out_specs=one,
            scratch_shapes=[pltpu.VMEM((g, rows, width), jnp.float32) for width in (_LANES, _LANES, d)],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * h * s * c * d,
            bytes_accessed=2 * b * g * c * (d * k.dtype.itemsize + 4 * bool(scales)) + b * masks * c,
            transcendentals=b * h * s * c,
        ),
        interpret=interpret,
        name="attend_layer",
    )  # fmt: skip
    out = run(numbers, queries, k, v, seen, *scales)[:, :, : r * s]
    return jnp.transpose(out.reshape(b, g, r, s, d), (0, 3, 1, 2, 4)).reshape(b, s, h, d)


def _columns(columns: int, block: int, size: int) -> int:
    """Columns of a block: at most ``block`` and so many as fit (``size`` bytes each), a divisor of all of them."""
    wanted = min(block, max(_VMEM // size, 1), columns)
    fitting = [n for n in range(1, wanted + 1) if columns % n == 0]
    tiles = [n for n in fitting if n % _LANES == 0]
    return max(tiles or fitting) if wanted < columns else columns


def _kernel(scale, softcap, numbers, q, k, v, seen, *rest):
    *scales, out, top, total, acc = rest
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full(top.shape, _MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def add(ends: bool):
        here = jnp.broadcast_to(seen[0].astype(jnp.int32), (q.shape[2], seen.shape[2])) != 0
        here = here & (_from(j, here, 1) < numbers[2]) if ends else here
        for head in range(q.shape[1]):
            value = v[0, 0, head]
            if ends:  # what lies behind the filled columns may be NaN
                value = jnp.where(_from(j, value, 0) < numbers[2], value.astype(jnp.float32), jnp.float32(0)).astype(
                    v.dtype
                )
            found = (x[0, 0, head : head + 1, :] for x in scales)  # a row: of every column
            _add(
                scale,
                softcap,
                q[0, head],
                k[0, 0, head],
                value,
                here,
                top.at[head],
                total.at[head],
                acc.at[head],
                *found,
            )

    @pl.when(j < numbers[1])
    def _():
        add(ends=False)

    @pl.when(j == numbers[1])
    def _():
        add(ends=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        out[0] = (acc[...] / jnp.maximum(total[:, :, :1], jnp.float32(1e-30))).astype(out.dtype)


def _from(j, like: Array, axis: int) -> Array:
    """Columns of block ``j``, which lie along ``axis``."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, axis) + j * like.shape[axis]


def _wide(x: Array) -> Array:
    """In float32, of whole numbers by way of those of 32 bits, as the hardware has it."""
    return (x.astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.integer) else x).astype(jnp.float32)


def _add(scale, softcap, q, k, v, here, top, total, acc, k_scale=None, v_scale=None):
    """A block of columns to the sums of one head; the softmax goes on from block to block."""
    wide = {"preferred_element_type": jnp.float32}
    k, v = (x if x.dtype == q.dtype else _wide(x).astype(q.dtype) for x in (k, v))
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), **wide) * jnp.float32(scale)
    scores = scores if k_scale is None else scores * k_scale
    if softcap is not None:
        scores = jnp.float32(softcap) * jnp.tanh(scores / jnp.float32(softcap))
    scores = jnp.where(here, scores, jnp.float32(_MASKED))
    before = top[:, :1]
    highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(here, jnp.exp(scores - highest), jnp.float32(0))
    shrink = jnp.exp(before - highest)
    total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    weights = weights if v_scale is None else jnp.where(here, weights * v_scale, jnp.float32(0))
    acc[...] = acc[...] * shrink + jax.lax.dot_general(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), **wide)
    top[...] = jnp.broadcast_to(highest, top.shape)


def repeat_rows(
    x: Num[Array, "N B G C K"], repeats: int, columns: int, *, interpret: bool = False
) -> Num[Array, "N R G L K"]:
    """Each row of a stacked cache ``repeats`` times, side by side: read once, written as often as needed.

    XLA broadcasts at a seventh of the memory's bandwidth (65 ms of the 168 of a prefill, see ``docs/performance.md``).

    Args:
      columns: of what comes out, at least those of ``x``; the others are not written and hold anything, NaN included.
    """
    n, b, g, c, d = x.shape
    whole = columns
    heads = max(h for h in range(1, g + 1) if g % h == 0 and (h == 1 or h * c * d * x.dtype.itemsize <= _VMEM // 2))
    columns = _columns(c, c, 2 * heads * d * x.dtype.itemsize)
    block = (1, 1, heads, columns, d)
    return pl.pallas_call(
        _copy,
        grid=(n, b, g // heads, c // columns, repeats),
        in_specs=[pl.BlockSpec(block, lambda n, b, g, c, r: (n, b, g, c, 0))],
        out_specs=pl.BlockSpec(block, lambda n, b, g, c, r: (n, b * repeats + r, g, c, 0)),
        out_shape=jax.ShapeDtypeStruct((n, b * repeats, g, whole, d), x.dtype),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=(1 + repeats) * x.size * x.dtype.itemsize
        ),
        interpret=interpret,
        name="repeat_rows",
    )(x)


def _copy(x, out):
    out[...] = x[...]


def cut_out(attend_fn: attention.AttendFn) -> CachedFn:
    """``attend_layer`` by an ``attend`` that takes one layer's keys and values: they are cut out of the stack."""

    def cut(x, scales, layer):
        x = jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
        if scales is None:
            return x
        return x.astype(jnp.float32) * jax.lax.dynamic_index_in_dim(scales, layer, 0, keepdims=False)[..., None]

    def run(q, k, v, mask, layer, filled, k_scale=None, v_scale=None, **settings):
        k, v = (cut(*x, layer).astype(q.dtype) for x in ((k, k_scale), (v, v_scale)))
        v = jnp.where((jnp.arange(v.shape[2]) < filled)[None, None, :, None], v, 0)  # what is not seen may be NaN
        return attend_fn(q, k, v, mask, **settings)

    return run
