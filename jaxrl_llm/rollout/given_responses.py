"""Responses that the policy did not (wholly) choose: demonstrations, kept prefixes, continuations.

Everything keeps the layout of a rollout: left-padded prompt, right-padded response, one row a sequence.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.types import Trajectories


def left_padded(tokens: Int[Array, "B T"], keep: Bool[Array, "B T"], *, pad_id: int = 0) -> tuple[Array, Array]:
    """The kept tokens of each row in their order, moved to its right end: ``(tokens, valid)``, a table of prompts.

    >>> import jax.numpy as jnp
    >>> rows, valid = left_padded(jnp.array([[5, 6, 7, 8]]), jnp.array([[True, False, True, False]]))
    >>> rows.tolist(), valid.tolist()
    ([[0, 0, 5, 7]], [[False, False, True, True]])
    """
    order = jnp.argsort(keep.astype(jnp.int32), axis=1, stable=True)
    valid = jnp.take_along_axis(keep, order, axis=1)
    return jnp.where(valid, jnp.take_along_axis(tokens, order, axis=1), pad_id), valid


def right_padded(tokens: Int[Array, "B T"], keep: Bool[Array, "B T"], *, pad_id: int = 0) -> tuple[Array, Array]:
    """The kept tokens of each row in their order, moved to its left end: ``(tokens, valid)``."""
    order = jnp.argsort((~keep).astype(jnp.int32), axis=1, stable=True)
    valid = jnp.take_along_axis(keep, order, axis=1)
    return jnp.where(valid, jnp.take_along_axis(tokens, order, axis=1), pad_id), valid


def with_responses(
    trajectories: Trajectories,
    rows: Bool[Array, " B"],
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    *,
    sampler_logp: Float[Array, "B N"] | None = None,
    truncated: Bool[Array, " B"] | None = None,
) -> Trajectories:
    """The trajectories with the responses of ``rows`` replaced by the given, right-padded tokens.

    A mixture chooses the experts of the given tokens for itself, whatever ``extras`` recorded there; all other extras
    stay as they are.

    Args:
      tokens: of the ``N`` response columns, the last ones of the layout.
      sampler_logp: of the given tokens, 0 where nobody sampled them.
      truncated: of the given responses; none by default.

    Raises:
      ValueError: when the given responses are wider than the trajectories.
    """
    new = tokens.shape[1]
    width = trajectories.tokens.shape[1] - new
    if width < 1:
        raise ValueError(f"responses of {new} columns leave no prompt in rows of {trajectories.tokens.shape[1]}")
    prompt = jnp.sum(trajectories.segment_ids[:, :width], axis=1)
    steps = prompt[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    logp = jnp.zeros(tokens.shape, jnp.float32) if sampler_logp is None else sampler_logp
    cut = jnp.zeros(rows.shape, bool) if truncated is None else truncated

    def put(old: Array, given: Array) -> Array:
        there = jnp.where(rows[:, None], given.astype(old.dtype), old[:, width:])
        return jnp.concatenate([old[:, :width], there], axis=1)

    extras = dict(trajectories.extras)
    if EXPERTS in extras:  # of other tokens: nobody recorded who computes the given ones
        replaced = rows[:, None, None] & (jnp.arange(width + new) >= width)[None, :, None]
        extras[EXPERTS] = jnp.where(replaced, -1, extras[EXPERTS])
    return trajectories._replace(
        extras=extras,
        tokens=put(trajectories.tokens, tokens),
        segment_ids=put(trajectories.segment_ids, valid),
        positions=put(trajectories.positions, jnp.where(valid, steps, 0)),
        mask=put(trajectories.mask, valid),
        sampler_logp=put(trajectories.sampler_logp, jnp.where(valid, logp, 0.0)),
        truncated=jnp.where(rows, cut, trajectories.truncated),
    )


def prefix(mask: Bool[Array, "B T"], length_tokens: Int[Array, " B"]) -> Bool[Array, "B T"]:
    """The first ``length_tokens`` masked tokens of each row."""
    return mask & (jnp.cumsum(mask.astype(jnp.int32), axis=1) <= length_tokens[:, None])


def joined(
    trajectories: Trajectories, keep: Bool[Array, "B T"], continuation: Trajectories, *, new_tokens: int
) -> tuple[Trajectories, Bool[Array, "B T"]]:
    """Kept prefix of each response followed by its continuation: ``(trajectories, which tokens are prefix)``.

    Args:
      keep: response tokens that stay, see ``prefix``.
      continuation: a rollout from ``left_padded`` prompts (old prompt and kept tokens), row for row.
      new_tokens: response columns of the layout; what does not fit is cut off and the row counts as truncated.
    """

    def gather(of: str, extra: Array | None = None) -> Array:
        left = getattr(trajectories, of) if extra is None else extra
        return jnp.concatenate([left, getattr(continuation, of)], axis=1)

    real = jnp.concatenate([keep, continuation.mask], axis=1)
    tokens, valid = right_padded(gather("tokens"), real)
    order = jnp.argsort((~real).astype(jnp.int32), axis=1, stable=True)
    logp = jnp.take_along_axis(gather("sampler_logp"), order, axis=1)
    length = jnp.sum(real.astype(jnp.int32), axis=1)
    every = jnp.ones(keep.shape[:1], bool)
    rows = with_responses(
        trajectories,
        every,
        tokens[:, :new_tokens],
        valid[:, :new_tokens],
        sampler_logp=logp[:, :new_tokens],
        truncated=continuation.truncated | (length > new_tokens),
    )
    return rows, prefix(rows.mask, jnp.sum(keep.astype(jnp.int32), axis=1))
