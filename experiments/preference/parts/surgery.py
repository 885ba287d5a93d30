"""Editing a few rows of the gates along the direction of a behaviour, without training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Params


def gates(params: Params) -> Float[Array, "L D F"]:
    """The gate matrices of all layers.

    Raises:
      UserError: for a model whose feed-forward part has none.
    """
    if "gate" not in params["layers"]:
        raise UserError("--model has no gate matrices; surgery needs a gated feed-forward part, as Qwen's or Llama's")
    return params["layers"]["gate"]


def alignment(gate: Float[Array, "L D F"], direction: Float[Array, " D"]) -> Float[Array, "L F"]:
    """Cosine of every row ``gate[l, :, f]`` with the direction; a row's length does not matter."""
    gate, direction = gate.astype(jnp.float32), direction.astype(jnp.float32)
    dots = jnp.einsum("ldf,d->lf", gate, direction)
    norms = jnp.sqrt(jnp.sum(gate * gate, axis=1)) * jnp.sqrt(jnp.sum(direction * direction))
    return dots / jnp.maximum(norms, 1e-12)


def highest(scores: Float[Array, "L F"], rows: int) -> Bool[Array, "L F"]:
    """The ``rows`` highest scores over all layers together."""
    if not 1 <= rows <= scores.size:
        raise ValueError(f"rows={rows} must lie in 1 .. {scores.size}, the rows of all gates")
    _, chosen = jax.lax.top_k(scores.reshape(-1), rows)
    return jnp.zeros((scores.size,), bool).at[chosen].set(True).reshape(scores.shape)


def shift_rows(gate: Float[Array, "L D F"], chosen: Bool[Array, "L F"], shift: Float[Array, " D"]) -> Array:
    """Adds ``shift`` to the chosen rows.

    >>> gate = jnp.array([[[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]]])  # rows [1, 0], [-1, 0], [0, 1]
    >>> v = jnp.array([1.0, 0.0])
    >>> chosen = highest(-alignment(gate, v), 1)
    >>> shift_rows(gate, chosen, 0.5 * v)[0].T.tolist()
    [[1.0, 0.0], [-0.5, 0.0], [0.0, 1.0]]
    """
    return gate + jnp.where(chosen[:, None, :], shift[None, :, None], 0.0)


def operate(params: Params, direction: Float[Array, " D"], *, alpha: Float[Array, ""] | float, rows: int) -> Params:
    """Model surgery: ``alpha direction`` added to the ``rows`` gate rows most *inversely* aligned with it.

    Units that were silent where the hidden state shows the behaviour wake up and push away from it. The sign is to be
    chosen by measuring the behaviour, for a probe's direction depends on the order of its classes.

    From "Model Surgery: Modulating LLM's Behavior Via Simple Parameter Editing", arXiv:2407.08770, section 3; the
    direction is not normalised, as in its published code.

    Raises:
      UserError: as ``gates``.
    """
    gate = gates(params)
    chosen = highest(-alignment(gate, direction), rows)
    return params | {"layers": params["layers"] | {"gate": shift_rows(gate, chosen, alpha * direction)}}
