"""Attention over blocks of columns: a block of queries sees its own block and those that are named before it.

A tree of sequences with shared beginnings lies in one row, every block once; the blocks that one sees are the way from
the root. Positions rise along it, so that the one rule of attention (same segment, position not behind the query's)
serves as it is, with any ``attend_fn``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.models.attention import AttendFn


def seen_by(x: Int[Array, "R C"], pages: Int[Array, "R N M"], fill: int) -> tuple[Array, Array]:
    """A number of each column as blocks of queries ``[R N, C / N]`` and what those see, ``[R N, M C / N]``.

    Args:
      pages: numbers of blocks; -1: none, its columns get ``fill``.
    """
    rows, count, most = pages.shape
    blocks = x.reshape(rows, count, -1)
    there = jax.vmap(lambda b, p: b[p])(blocks, jnp.maximum(pages, 0))
    there = jnp.where((pages >= 0)[..., None], there, fill)
    return blocks.reshape(rows * count, -1), there.reshape(rows * count, most * blocks.shape[2])


def paged(attend_fn: AttendFn, pages: Int[Array, "R N M"]) -> AttendFn:
    """``attend_fn`` of blocks: queries ``[R, C, H, K]``, keys and values ``[R, G, C, K]``, masks of ``seen_by``."""
    rows, count, most = pages.shape

    def gathered(x: Array) -> Array:
        """``[R, G, C, K] -> [R N, G, M C / N, K]``"""
        heads, width = x.shape[1], x.shape[3]
        blocks = jnp.moveaxis(x.reshape(rows, heads, count, -1, width), 1, 2)
        there = jax.vmap(lambda b, p: b[p])(blocks, jnp.maximum(pages, 0))  # [R, N, M, G, C / N, K]
        return jnp.moveaxis(there, 3, 2).reshape(rows * count, heads, -1, width)

    def run(q: Array, k: Array, v: Array, mask: Array, **settings: float | None) -> Array:
        blocks = q.reshape(rows * count, -1, *q.shape[2:])
        return attend_fn(blocks, gathered(k), gathered(v), mask, **settings).reshape(q.shape)

    return run
