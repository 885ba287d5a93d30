"""Norms, and norms and rotations of heads, as Pallas kernels for TPUs: a token's row is read once and written once.

Left to the compiler, sums of squares, slopes and what a norm adds up over tokens are passes of their own over rows of
bfloat16, and heads change the order of their axes between the product that makes them and the kernel that reads them.
Here a head stays the lanes that it is. Results and gradients of rows have the bits of the plain functions in bfloat16;
the gradient of a scale is summed in float32, where JAX sums products that it has rounded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES = 128
_TILE = 16  # rows of a tile of numbers of two bytes
_NUMBERS = 2**18  # of a block of rows

# how an argument or a result lies: rows of tokens, rows of heads, waves, the same everywhere, a sum of each device
ROWS, HEADS, WAVES, SAME, SUMS = "rows", "heads", "waves", "same", "sums"
Split = Callable[[Callable[..., Any], Sequence[str], Sequence[str]], Callable[..., Any]]


class Waves(NamedTuple):
    """Cosines and sines by which whole heads are rotated, float32; sines of the first half of a head with a minus."""

    cos: Float[Array, "B S K"]
    sin: Float[Array, "B S K"]


def _everywhere(rows: int, columns: int) -> bool:
    return True


class TokenRows(NamedTuple):
    """The kernels, as ``models.decoder`` calls them; made by ``make_token_rows``."""

    forked: Callable[..., tuple[Array, Array]]  # (x [B, S, D], scale [D], eps) -> (x, RMS norm of x)
    heads: Callable[..., Array]  # (x [B, S, H * K], scale [K] or None, waves, eps) -> normed where a scale is, rotated
    fits: Callable[[int, int], bool] = _everywhere  # whether rows and columns divide over the devices


def on_one_device(run: Callable[..., Any], given: Sequence[str], found: Sequence[str]) -> Callable[..., Any]:
    """The ``split`` of ``make_token_rows`` without a mesh."""
    return run


def make_token_rows(*, interpret: bool = False, split: Split = on_one_device) -> TokenRows:
    """Both kernels with their gradients.

    Args:
      interpret: run the kernels as plain operations, on any device.
      split: ``(kernel, how arguments lie, how results lie) -> `` a function that runs the kernel on each device;
        a result that lies as ``SUMS`` is returned with those of all devices on axis 0.
    """
    call = partial(_call, interpret)

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def forked(x: Array, scale: Array, eps: float) -> tuple[Array, Array]:
        (normed,) = split(partial(call, partial(_norm_kernel, eps), "norm"), (ROWS, SAME), (ROWS,))(x, scale)
        return x, normed

    def forked_forward(x, scale, eps):
        return forked(x, scale, eps), (x, scale)

    def forked_backward(eps, kept, grads):
        run = partial(call, partial(_norm_slopes_kernel, eps), "norm_slopes", sums=True)
        of_x, of_scale = split(run, (ROWS, SAME, ROWS, ROWS), (ROWS, SUMS))(*kept, *grads)
        return of_x, jnp.sum(of_scale, axis=0).astype(kept[1].dtype)

    forked.defvjp(forked_forward, forked_backward)

    @partial(jax.custom_vjp, nondiff_argnums=(3,))
    def heads(x: Array, scale: Array | None, waves: Waves, eps: float) -> Array:
        run = partial(call, partial(_heads_kernel, None if scale is None else eps), "heads")
        return split(run, (HEADS, SAME, WAVES, WAVES), (HEADS,))(x, _any(scale, waves), *waves)[0]

    def heads_forward(x, scale, waves, eps):
        return heads(x, scale, waves, eps), (x if scale is not None else None, scale, waves)

    def heads_backward(eps, kept, grad):
        x, scale, waves = kept
        nothing = jax.tree.map(jnp.zeros_like, waves)  # positions do not train
        if scale is None:
            return heads(grad, None, waves._replace(sin=-waves.sin), eps), None, nothing
        run = partial(call, partial(_heads_slopes_kernel, eps), "heads_slopes", sums=True)
        given = (HEADS, SAME, WAVES, WAVES, HEADS)
        of_x, of_scale = split(run, given, (HEADS, SUMS))(x, scale, *waves, grad)
        return of_x, jnp.sum(of_scale, axis=0).astype(scale.dtype), nothing

    heads.defvjp(heads_forward, heads_backward)
    return TokenRows(forked, heads)


def _any(scale: Array | None, waves: Waves) -> Array:
    """A scale, or what stands where nobody reads one."""
    return jnp.ones(waves.cos.shape[2:], jnp.float32) if scale is None else scale


def _call(interpret: bool, kernel, name: str, *arrays: Array, sums: bool = False) -> tuple[Array, ...]:
    """A kernel over blocks of rows; one array ``[N]`` among them is given whole to each.

    Args:
      sums: of the scale's gradient, eight rows of them, are a second result.
    """
    b, s, width = arrays[0].shape
    rows = min(max(_NUMBERS // width // _TILE * _TILE, _TILE), -(-s // _TILE) * _TILE)

    def block(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        if x.ndim == 2:
            return pl.BlockSpec(x.shape, lambda b, i: (0, 0))
        return pl.BlockSpec((1, rows, x.shape[2]), lambda b, i: (b, i, 0))

    given = [x[None] if x.ndim == 1 else x for x in arrays]
    found = (jax.ShapeDtypeStruct(given[0].shape, given[0].dtype),)
    found += (jax.ShapeDtypeStruct((8, given[1].shape[1]), jnp.float32),) * sums
    return pl.pallas_call(
        partial(kernel, s) if sums else kernel,
        grid=(b, pl.cdiv(s, rows)),
        in_specs=list(map(block, given)),
        out_specs=tuple(map(block, found)),
        out_shape=found,
        cost_estimate=pl.CostEstimate(
            flops=8 * given[0].size,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, *found)),
        ),
        interpret=interpret,
        name=name,
    )(*given)


def _normed(x: Array, eps: float) -> tuple[Array, Array]:
    """Rows in float32 over the root of their mean square, and one over that root."""
    wide = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return wide * factor, factor


def _times(a: Array, b: Array, dtype: Any) -> Array:
    """The product of both in ``dtype``, rounded to it once: exact before, for numbers of two bytes."""
    return (a.astype(dtype).astype(jnp.float32) * b.astype(dtype).astype(jnp.float32)).astype(dtype)


def _slopes(x: Array, scale: Array, grad: Array, eps: float) -> tuple[Array, Array]:
    """Gradients of a norm, float32: of its rows, and of the scale by each row."""
    normed, factor = _normed(x, eps)
    of_scale = grad.astype(jnp.float32) * normed.astype(x.dtype).astype(jnp.float32)
    slope = _times(grad, scale, x.dtype).astype(jnp.float32)
    return factor * (slope - normed * jnp.mean(slope * normed, axis=-1, keepdims=True)), of_scale


def _add_rows(sums, x: Array, rows: int) -> None:
    """Adds rows up into the eight of ``sums``; what the last block has beyond ``rows`` does not count."""
    first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + pl.program_id(1) * x.shape[0]
    more = jnp.sum(jnp.where(row < rows, x, jnp.float32(0)).reshape(-1, 8, x.shape[-1]), axis=0)
    sums[...] = jnp.where(first, jnp.float32(0), sums[...]) + more


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    """``models.attention.rotate`` of a head, float32."""
    wide = x.astype(jnp.float32)
    return wide * cos + pltpu.roll(wide, x.shape[-1] // 2, 1) * sin


def _by_head(x, width: int) -> list[slice]:
    return [slice(at, at + width) for at in range(0, x.shape[2], width)]


def _norm_kernel(eps, x, scale, out):
    out[0] = _times(_normed(x[0], eps)[0], scale[...], out.dtype)


def _norm_slopes_kernel(eps, rows, x, scale, beside, grad, out, of_scale):
    """``beside``: the gradient of the rows themselves, which go on beside their norm."""
    of_x, each = _slopes(x[0], scale[...], grad[0], eps)
    out[0] = _sum(of_x, beside[0], out.dtype)
    _add_rows(of_scale, each, rows)


def _sum(a: Array, b: Array, dtype: Any) -> Array:
    """Of both in ``dtype``, rounded to it once."""
    return (a.astype(dtype).astype(jnp.float32) + b.astype(jnp.float32)).astype(dtype)


def _heads_kernel(eps, x, scale, cos, sin, out):
    for head in _by_head(x, cos.shape[2]):
        here = x[0, :, head]
        if eps is not None:
            here = _times(_normed(here, eps)[0], scale[...], out.dtype)
        out[0, :, head] = _turned(here, cos[0], sin[0]).astype(out.dtype)


def _heads_slopes_kernel(eps, rows, x, scale, cos, sin, grad, out, of_scale):
    each = jnp.zeros((x.shape[1], cos.shape[2]), jnp.float32)
    for head in _by_head(x, cos.shape[2]):
        slope = _turned(grad[0, :, head], cos[0], -sin[0]).astype(out.dtype)
        of_x, more = _slopes(x[0, :, head], scale[...], slope, eps)
        out[0, :, head] = of_x.astype(out.dtype)
        each = each + more
    _add_rows(of_scale, each, rows)
