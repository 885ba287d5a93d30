"""Log-probabilities and entropies over a vocabulary as a Pallas kernel for TPUs: logits exist in fast memory alone.

Written out, ``[B, T, V]`` logits are read twice more than they are worth: for the sum of their exponentials and for the
entropy. The kernel keeps four sums of each token while it goes over blocks of the vocabulary, and a device that has a
part of it returns those of its part.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_MASKED = -1e30  # finite: of a part without any real token
_LANES = 128
_TOKENS, _WORDS = 1024, 256  # a block of the product
_WIDE = 4096  # of wider hidden states half as many tokens
_FAST = 48 * 2**20  # bytes of fast memory that the kernel may use


class Sums(NamedTuple):
    """Of the tokens of a vocabulary, or of a part of it, float32; a number for each target."""

    top: Float[Array, "*N"]  # the largest logit
    total: Float[Array, "*N"]  # sum of exp(logit - top)
    moment: Float[Array, "*N"]  # sum of exp(logit - top) (logit - top)
    picked: Float[Array, "*N"]  # the target's logit, 0 where another part has it


class Head(NamedTuple):
    """What makes logits of hidden states besides the table: no array."""

    vocab: int  # tokens with a larger number are padding
    tied: bool  # the table is [V, D]; else [D, V]
    softcap: float | None = None
    temperature: float = 1.0


SumsFn = Callable[..., Sums]  # with the arguments of ``sums_of_logits``


def sums_of_logits(
    head: Head,
    hidden: Float[Array, "N D"],
    table: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " N"],
    first: Int[Array, ""] | int = 0,
) -> Sums:
    """The reference: all logits at once.

    Args:
      first: number of the table's first token.
    """
    product = jnp.einsum("nd,vd->nv" if head.tied else "nd,dv->nv", hidden, table, preferred_element_type=jnp.float32)
    numbers = jnp.arange(product.shape[1], dtype=jnp.int32)[None, :] + first
    logits = jnp.where(numbers < head.vocab, _bent(head, product), _MASKED)
    top = jnp.max(logits, axis=1)
    shifted = logits - top[:, None]
    weights = jnp.where(numbers < head.vocab, jnp.exp(shifted), 0.0)
    picked = jnp.sum(jnp.where(numbers == targets[:, None], logits, 0.0), axis=1)
    return Sums(top, jnp.sum(weights, axis=1), jnp.sum(weights * shifted, axis=1), picked)


def _bent(head: Head, logits: Array) -> Array:
    if head.softcap is not None:
        logits = jnp.float32(head.softcap) * jnp.tanh(logits / jnp.float32(head.softcap))
    return logits if head.temperature == 1.0 else logits / jnp.float32(head.temperature)


def added(sums: Sums, axes: tuple[str, ...]) -> Sums:
    """The sums of all parts, which the devices along ``axes`` have."""
    top = jax.lax.pmax(sums.top, axes)
    shrink = jnp.exp(sums.top - top)
    moment = shrink * (sums.moment + (sums.top - top) * sums.total)
    total, moment, picked = jax.lax.psum((shrink * sums.total, moment, sums.picked), axes)
    return Sums(top, total, moment, picked)


def logp_and_entropy(sums: Sums) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """``(log softmax(logits)[target], entropy in nats)`` of a whole vocabulary."""
    log_total = jnp.log(sums.total)
    return sums.picked - sums.top - log_total, log_total - sums.moment / sums.total


def sums_by_kernel(
    head: Head,
    hidden: Float[Array, "N D"],
    table: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " N"],
    first: Int[Array, ""] | int = 0,
    *,
    tokens: int = _TOKENS,
    words: int = _WORDS,
    interpret: bool = False,
) -> Sums:
    """``sums_of_logits`` without the logits.

    Args:
      tokens, words: sides of a block of the product; on a TPU multiples of 128.
      interpret: run the kernel as plain operations, on any device.
    """
    (n, d), size = hidden.shape, table.shape[0 if head.tied else 1]
    tokens = min(tokens if d <= _WIDE else tokens // 2, -(-n // _LANES) * _LANES)
    rows = -(-n // tokens) * tokens
    hidden = jnp.pad(hidden, ((0, rows - n), (0, 0)))
    first = jnp.asarray(first, jnp.int32)
    numbers = jnp.stack([jnp.clip(head.vocab - first, 0, size)])
    targets = jnp.pad(targets.astype(jnp.int32) - first, (0, rows - n), constant_values=-1)
    targets = jnp.broadcast_to(targets, (8, rows))
    line = pl.BlockSpec((8, tokens), lambda i, j, _: (0, i))
    block = (words, d) if head.tied else (d, words)
    out = pl.pallas_call(
        functools.partial(_kernel, head, words),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // tokens, -(-size // words)),
            in_specs=[
                pl.BlockSpec((tokens, d), lambda i, j, _: (i, 0)),
                pl.BlockSpec(block, (lambda i, j, _: (j, 0)) if head.tied else lambda i, j, _: (0, j)),
                line,
            ],
            out_specs=line,
            scratch_shapes=[pltpu.VMEM((tokens, _LANES), jnp.float32)] * 4,
        ),
        out_shape=jax.ShapeDtypeStruct((8, rows), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_FAST),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * size * d,
            transcendentals=rows * size,
            bytes_accessed=(hidden.size + rows // tokens * table.size) * hidden.dtype.itemsize,
        ),
        interpret=interpret,
        name="vocabulary_sums",
    )(numbers, hidden, table, targets)
    return Sums(*out[:4, :n])


def _column(row: Array) -> Array:
    """``[1, N]`` as ``[N, 1]``: a whole tile is turned, which is what the hardware can."""
    return jnp.transpose(jnp.broadcast_to(row, (_LANES, row.shape[1])))[:, :1]


def _kernel(head, words, numbers, hidden, table, targets, out, top, total, moment, picked):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full(top.shape, _MASKED, jnp.float32)
        for sums in (total, moment, picked):
            sums[...] = jnp.zeros(sums.shape, jnp.float32)

    axes = (((1,), (1 if head.tied else 0,)), ((), ()))
    logits = _bent(head, jax.lax.dot_general(hidden[...], table[...], axes, preferred_element_type=jnp.float32))
    number = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + j * words
    real = number < numbers[0]  # the last block may reach beyond the table, and the table beyond the vocabulary
    logits = jnp.where(real, logits, jnp.float32(_MASKED))
    before = top[:, :1]
    highest = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    shifted = logits - highest
    weights = jnp.where(real, jnp.exp(shifted), jnp.float32(0))
    fall = before - highest
    shrink = jnp.exp(fall)
    weighted = jnp.sum(jnp.where(real, weights * shifted, jnp.float32(0)), axis=1, keepdims=True)
    moment[...] = shrink * (moment[...] + fall * total[...]) + weighted
    total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    here = real & (number == _column(targets[0:1, :]))
    picked[...] += jnp.sum(jnp.where(here, logits, jnp.float32(0)), axis=1, keepdims=True)
    top[...] = jnp.broadcast_to(highest, top.shape)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        for row, sums in enumerate((top, total, moment, picked)):
            out[row : row + 1, :] = jnp.transpose(sums[...])[:1]
