"""Which tokens of a batch get their gradient, and with what weight: forking tokens, damped entropy change.

All of it is without gradient of its own and meant for ``make_policy_loss(token_weights=...)``. Thresholds are those of
the tokens given: micro-batches of a step each have their own.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked

SMALLEST = 1e-8  # probabilities are kept this far from 0 and 1
LEAST_CHANGE = 0.02  # batches whose tokens all change less than this are damped less than w_min


def top_tokens(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], *, fraction: float, exact: bool = False
) -> Bool[Array, "B T"]:
    """The ``fraction`` of the masked tokens with the largest values: ``values >= tau``, tau the k-th largest of n.

    ``k = ceil(fraction n)``, at least 1. With entropies these are the forking tokens; ``mask & ~top_tokens`` are the
    others. Ties at the threshold all belong to it.

    Args:
      exact: exactly k tokens; of equal values the earlier token in the batch comes first.

    From "Beyond the 80/20 Rule", arXiv:2506.01939, eqs. 5 and 6.

    >>> import jax.numpy as jnp
    >>> entropy = jnp.array([[0.1, 0.2, 0.05, 1.5, 0.3, 0.7, 0.0, 0.02, 2.0, 0.4]])
    >>> jnp.flatnonzero(top_tokens(entropy, jnp.ones((1, 10), bool), fraction=0.2)).tolist()
    [3, 8]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie in (0, 1]; 1 keeps all tokens")
    if mask.size == 0:
        return mask
    count = jnp.sum(mask.astype(jnp.float32))
    # 0.2 * 5 in float32 is a little more than 1, and its ceiling 2
    wanted = jnp.maximum(jnp.ceil(fraction * count - 1e-4), 1.0).astype(jnp.int32)
    order = jnp.where(mask, jax.lax.stop_gradient(values.astype(jnp.float32)), -jnp.inf).ravel()
    if exact:
        rank = jnp.argsort(jnp.argsort(-order, stable=True)).reshape(mask.shape)
        return mask & (rank < wanted)
    tau = -jnp.sort(-order)[wanted - 1]
    return mask & (order >= tau).reshape(mask.shape)


def entropy_change(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """First-order change of entropy that updating a token causes, up to sign and step size: ``Omega_t``.

    ``Omega = A / p_old * p (1 - p) (log p + H)``: reinforcing a token that is likelier than typical (``log p > -H``)
    lowers the entropy, reinforcing an unlikely one raises it. Values that are not finite count as 0.

    From "Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective" (STEER), arXiv:2510.10150,
    section 4; the probabilities are bounded as in its published code.

    Args:
      entropy: of the next-token distribution at each token.
    """
    logp, old_logp, advantages, entropy = masked(mask, logp, old_logp, advantages, entropy)
    p = jnp.clip(jnp.exp(logp), SMALLEST, 1 - SMALLEST)
    old = jnp.clip(jnp.exp(old_logp), SMALLEST, 1 - SMALLEST)
    change = advantages / old * p * (1 - p) * (jnp.log(p) + entropy)
    return jax.lax.stop_gradient(jnp.where(mask & jnp.isfinite(change), change, 0.0))


def steer_weights(change: Float[Array, "B T"], mask: Bool[Array, "B T"], *, w_min: float = 0.8) -> Float[Array, "B T"]:
    """STEER: ``w_t = clip(exp(-k |Omega_t|), w_min, 1)`` with ``k = -log(w_min) / max(max |Omega|, 0.02)``.

    The token whose update changes the entropy most gets ``w_min``. Outside the mask 0.

    Args:
      change: ``entropy_change``.
      w_min: least weight, in (0, 1]; 1 weighs nothing.

    From arXiv:2510.10150, section 5. Differs from the paper in the bound 0.02, which is that of its code.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 4) for w in steer_weights(jnp.array([[0.0, 0.0395, -0.2723]]), jnp.ones((1, 3), bool))[0]]
    [1.0, 0.9681, 0.8]
    """
    if not 0 < w_min <= 1:
        raise ValueError(f"w_min={w_min} must lie in (0, 1]")
    (size,) = masked(mask, jnp.abs(change))
    if mask.size == 0:
        return size
    rate = -math.log(w_min) / jnp.maximum(jnp.max(size), LEAST_CHANGE)
    return jnp.where(mask, jnp.clip(jnp.exp(-rate * size), w_min, 1.0), 0.0)


def steer_linear_weights(
    change: Float[Array, "B T"], mask: Bool[Array, "B T"], *, w_min: float = 0.8, w_max: float = 1.2
) -> Float[Array, "B T"]:
    """The linear variant: ``w_max`` for the least ``|Omega|`` of the batch, ``w_min`` for the largest.

    ``w = w_max - (|Omega| - min) (w_max - w_min) / (max - min)``; their middle where all are equal.
    """
    if not 0 < w_min <= w_max:
        raise ValueError(f"w_min={w_min} must be positive and at most w_max={w_max}")
    (size,) = masked(mask, jnp.abs(change))
    if mask.size == 0:
        return size
    low, high = jnp.min(jnp.where(mask, size, jnp.inf)), jnp.max(size)
    span = jnp.where(high > low, high - low, 1.0)
    share = jnp.where(high > low, (size - low) / span, 0.5)
    return jnp.where(mask, w_max - share * (w_max - w_min), 0.0)
