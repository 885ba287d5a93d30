"""Bucketed lengths: a batch of short prompts is not read in the columns of the longest of the table."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.types import Trajectories


def _widened(rows: Trajectories, columns: int, pad_id: int) -> Trajectories:
    """Empty columns in front of every array of columns."""

    def wider(x: Array, fill: int | float | bool = 0) -> Array:
        return jnp.pad(x, ((0, 0), (columns, 0)), constant_values=fill)

    named = {"tokens": wider(rows.tokens, pad_id)}
    named |= {name: wider(getattr(rows, name)) for name in ("segment_ids", "positions", "mask", "sampler_logp")}
    return rows._replace(**named)


def bucketed(
    rollout: Callable[..., Trajectories], widths: Sequence[int], *, pad_id: int = 0
) -> Callable[..., Trajectories]:
    """``rollout`` at the least of ``widths`` that holds the longest prompt of the batch, chosen on the device.

    The samples, and the shape of what is returned, are those without buckets: left pads change nothing. The program has
    a branch for every width, so compile time grows with their number.

    Args:
      rollout: ``(params, tokens [P, L], valid [P, L], keys, problem_ids) -> Trajectories``, prompts left-padded.
      widths: columns; those of the table are always a choice.

    Raises:
      ValueError: for a width that is no positive number.
    """
    if any(width < 1 for width in widths):
        raise ValueError(f"widths={list(widths)} must be at least 1 each")

    def run(params, tokens, valid, keys, problem_ids):
        whole = tokens.shape[1]
        offered = sorted({width for width in widths if width < whole} | {whole})
        longest = jnp.max(jnp.sum(valid.astype(jnp.int32), axis=1))
        which = jnp.sum((jnp.asarray(offered, jnp.int32) < longest).astype(jnp.int32))

        def at(width: int) -> Callable[[], Trajectories]:
            cut = whole - width
            return lambda: _widened(rollout(params, tokens[:, cut:], valid[:, cut:], keys, problem_ids), cut, pad_id)

        return jax.lax.switch(which, [at(width) for width in offered])

    return run
