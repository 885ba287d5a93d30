"""Contrastive losses between representations of two texts on the same problem."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import PairTerms


def pooled(
    weights: Float[Array, "B T"], features: Float[Array, "B T K"], mask: Bool[Array, "B T"]
) -> Float[Array, "B K"]:
    """``sum_t softmax_t(weights) features_t`` over the masked tokens of each row; 0 for a row without any.

    Equal weights give the mean. The gradient flows through both.

    >>> import jax.numpy as jnp
    >>> f = jnp.array([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    >>> pooled(jnp.zeros((1, 3)), f, jnp.array([[True, True, False]])).tolist()
    [[0.5, 0.5]]
    """
    scores = jnp.where(mask, weights.astype(jnp.float32), -1e30)
    share = jnp.where(mask, jax.nn.softmax(scores, axis=1), 0.0)
    return jnp.sum(share[:, :, None] * jnp.where(mask[:, :, None], features.astype(jnp.float32), 0.0), axis=1)


def cosines(left: Float[Array, "B K"], right: Float[Array, "C K"]) -> Float[Array, "B C"]:
    """Cosine of every pair; 0 with a zero vector."""

    def unit(x):
        squares = jnp.sum(x**2, axis=-1, keepdims=True)
        return jnp.where(squares > 0, x / jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)

    return unit(left.astype(jnp.float32)) @ unit(right.astype(jnp.float32)).T


def capped_infonce_loss(
    anchors: Float[Array, "B K"],
    samples: Float[Array, "B K"],
    keep: Bool[Array, " B"],
    *,
    tau: float = 0.2,
    cap: float = 0.9,
    group_ids: Int[Array, " B"] | None = None,
) -> PairTerms:
    """CARFT: ``-log(exp(min(cos(a_i, z_i), cap) / tau) / sum_j exp(cos(a_i, z_j) / tau))`` of the kept rows, else 0.

    The cap stands in the numerator alone: a pair closer than it is only pushed away from the others. No gradient to the
    anchors. Average over the kept rows with ``reduce.scalars(loss, keep)``.

    Args:
      group_ids: rows of one group have the same anchor, so that the others of the group are not among the ``j``: a
        sample that is as close to the annotation as it should be is no negative. None: all rows are.

    ``aux``: ``cosine`` of each pair. From "CARFT: Boosting LLM Reasoning via Contrastive Learning with Annotated
    Chain-of-Thought-based Reinforced Fine-Tuning", arXiv:2508.15868, section 3; the cap is that of its code.

    >>> import jax.numpy as jnp
    >>> a = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> z = jnp.array([[0.8, 0.6], [0.2, 0.9797959]])
    >>> round(float(capped_infonce_loss(a, z, jnp.array([True, False])).loss[0]), 4)
    0.0486
    """
    if tau <= 0:
        raise ValueError(f"tau={tau} must be positive: it is the temperature of the softmax over samples")
    near = cosines(jax.lax.stop_gradient(anchors), samples)
    own = jnp.diagonal(near)
    if group_ids is not None:
        siblings = (group_ids[:, None] == group_ids[None, :]) & ~jnp.eye(group_ids.shape[0], dtype=bool)
        near = jnp.where(siblings, -jnp.inf, near)
    loss = jax.nn.logsumexp(near / tau, axis=1) - jnp.minimum(own, cap) / tau
    return PairTerms(jnp.where(keep, loss, 0.0), {"cosine": jax.lax.stop_gradient(own)})
