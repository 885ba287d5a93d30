"""Scalar heads on hidden states: a value for every token, a reward for every sequence.

A head is a pair of arrays beside the decoder's tree, ``{"weight": [D, K], "bias": [K]}``, in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.types import Key, Params, Policy

READ_AT_ONCE = 16  # rows of responses that a reward model reads on a device


def width_of(hidden: Callable[..., Array], params: Params) -> int:
    """The size of the hidden states that ``hidden(params, tokens, positions, segment_ids)`` gives; nothing is computed.

    Read off what the policy returns: with an adapter its parameters hold no weight of that size.
    """
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(hidden, params, one, one, one).shape[-1]


def init_head(width: int, key: Key, *, outputs: int = 1, scale: float = 0.0) -> Params:
    """Draws a head of ``outputs`` numbers: normal(0, scale) weights, zero bias.

    The default ``scale=0`` starts every value at 0, so that the first advantages are those without a critic.

    Args:
      outputs: 1 for a scalar, more for the bins or quantiles of a distributional value.

    Raises:
      ValueError: when ``width`` or ``outputs`` is not positive.
    """
    if width < 1 or outputs < 1:
        raise ValueError(f"width={width} and outputs={outputs} must be at least 1")
    weight = scale * jax.random.normal(key, (width, outputs), jnp.float32)
    return {"weight": weight, "bias": jnp.zeros((outputs,), jnp.float32)}


def apply_head(head: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T K"]:
    """``hidden W + b`` in float32, at every token."""
    wide = jnp.einsum("btd,dk->btk", hidden.astype(jnp.float32), head["weight"].astype(jnp.float32))
    return wide + head["bias"].astype(jnp.float32)[None, None, :]


def token_values(
    head: Params, hidden: Float[Array, "B T D"], read: Callable[[Array], Array] | None = None
) -> Float[Array, "B T"]:
    """The value at every token: ``values[b, t]`` is what follows *after* token ``t`` was read.

    The value of the state in which token ``t`` was chosen is therefore ``state_values``.

    Args:
      read: what the outputs ``[B, T, K]`` stand for, for example ``losses.expected_values``; None: the first of them.
    """
    outputs = apply_head(head, hidden)
    return outputs[:, :, 0] if read is None else read(outputs)


def of_state_before(
    x: Float[Array, "B T ..."], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T ..."]:
    """What was said after token ``t - 1`` at index ``t``; 0 where no state is before a token."""
    shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
    if segment_ids is None:
        return shifted
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    there = (segment_ids > 0) & (before == segment_ids)
    return jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), shifted, 0.0)


def state_values(
    head: Params, hidden: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None,
    read: Callable[[Array], Array] | None = None,
) -> Float[Array, "B T"]:  # fmt: skip
    """``V(tokens[b, :t])`` at index ``t``, the state in which token ``t`` was chosen (aligned like ``logp``).

    Column 0 and the first token of each segment have no state before them: 0.
    """
    return of_state_before(token_values(head, hidden, read), segment_ids)


def last_index(segment_ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """Index of the last real token of each row, whatever the padding side; 0 for a row of padding."""
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(segment_ids > 0, columns[None, :], 0), axis=1)


def rewards_of(policy: Policy, params: Params, head: Params, rows: Any) -> Float[Array, " B"]:
    """What the head says at the end of every row; ``rows`` with ``tokens, positions, segment_ids``."""
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    return sequence_rewards(head, hidden, rows.segment_ids)


def sequence_rewards(head: Params, hidden: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]) -> Float[Array, " B"]:
    """First output at the last real token of each row: a scalar reward model; 0 for a row of padding."""
    picked = jnp.take_along_axis(hidden, last_index(segment_ids)[:, None, None], axis=1)
    return jnp.where(jnp.any(segment_ids > 0, axis=1), token_values(head, picked)[:, 0], 0.0)
