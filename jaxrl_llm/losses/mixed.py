"""Losses of batches that mix the policy's own responses with outside ones (demonstrations, refinements).

Outside tokens have no known behaviour policy: each paper puts something else in the place of the ratio.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import log_ratio, masked
from jaxrl_llm.types import TokenTerms


def _probability(logp: Array) -> Array:
    """``exp(logp)``, at most 1. At ``logp = 0``, where ``minimum`` would halve it, the gradient is whole."""
    return jnp.exp(jnp.where(logp > 0, 0.0, logp))


def ratio_loss(
    logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """PPO's surrogate without a clip: ``-rho A``; at ``logp = old_logp`` the gradient of REINFORCE.

    ``aux``: ``ratio``, and ``clipped``, always 0.
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    loss = -ratio * jax.lax.stop_gradient(advantages)
    return TokenTerms(
        jnp.where(mask, loss, 0.0), {"ratio": jnp.where(mask, ratio, 0.0), "clipped": jnp.zeros_like(ratio)}
    )


def probability_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> TokenTerms:
    """``-p A``: the ratio to a behaviour policy that is taken to be 1 at every outside token.

    ``aux``: ``weight``, the probability ``p``. ``old_logp`` is not read.
    """
    logp, advantages = masked(mask, logp, advantages)
    p = _probability(logp)
    return TokenTerms(jnp.where(mask, -p * jax.lax.stop_gradient(advantages), 0.0), {"weight": jnp.where(mask, p, 0.0)})


def shaped_probability_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 0.1,
) -> TokenTerms:
    """``-f(p) A`` with ``f(p) = p / (p + gamma)``: what is right but unlikely is learned, too.

    The gradient of a token, ``gamma p / (p + gamma)^2``, is largest at ``p = gamma``, not at ``p = 1``.

    ``aux``: ``weight``, ``f(p)``. ``old_logp`` is not read: the paper's outside tokens have no ratio.

    From "Learning to Reason under Off-Policy Guidance" (LUFFY), arXiv:2504.14945, section 3.3; refinements of
    "Critique-GRPO", arXiv:2506.03106, eq. 4.

    >>> import jax.numpy as jnp
    >>> logp, ones = jnp.log(jnp.array([[0.01, 0.1, 0.9]])), jnp.ones((1, 3))
    >>> [round(float(x), 4) for x in shaped_probability_loss(logp, logp, ones, ones > 0).aux["weight"][0]]
    [0.0909, 0.5, 0.9]
    """
    if gamma <= 0:
        raise ValueError(f"gamma={gamma} must be positive; without it every weight is 1 and no gradient flows")
    logp, advantages = masked(mask, logp, advantages)
    p = _probability(logp)
    weight = p / (p + gamma)
    loss = -weight * jax.lax.stop_gradient(advantages)
    return TokenTerms(jnp.where(mask, loss, 0.0), {"weight": jnp.where(mask, weight, 0.0)})


def mixture_ratio(logp: Float[Array, "B T"], old_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """RL-PLUS: ``2 p / (p_old + omega)``, ``omega = (p_old + 1) / 2`` the estimate of the unknown behaviour policy.

    At most ``4 p``, also where ``p_old`` is 0; 1 at ``p = p_old = 1``. Gradient through ``p`` alone.

    From "RL-PLUS", arXiv:2508.00222, eqs. 4 and 5. Differs from the paper, whose uniform part is a density over the
    vocabulary, and agrees with its code, where that part is 1.

    >>> import jax.numpy as jnp
    >>> p, old = jnp.array([[0.5, 0.2, 0.9, 1.0]]), jnp.array([[0.5, 0.1, 0.9, 1.0]])
    >>> [round(float(x), 4) for x in mixture_ratio(jnp.log(p), jnp.log(old))[0]]
    [0.8, 0.6154, 0.973, 1.0]
    """
    p = _probability(logp.astype(jnp.float32))
    old = jnp.exp(jnp.minimum(jax.lax.stop_gradient(old_logp).astype(jnp.float32), 0.0))
    return 2 * p / (old + 0.5 * (old + 1))


def exploration_factor(logp: Float[Array, "B T"], *, gamma: float = 0.5) -> Float[Array, "B T"]:
    """RL-PLUS: ``(1 - p)^gamma``, no gradient: outside tokens that the policy finds unlikely count more.

    From "RL-PLUS", arXiv:2508.00222, eq. 6.

    >>> import jax.numpy as jnp
    >>> factor = exploration_factor(jnp.log(jnp.array([[0.5, 0.1, 0.9, 1.0]])))
    >>> [round(float(x), 4) for x in factor[0]]
    [0.7071, 0.9487, 0.3162, 0.0]
    """
    if gamma < 0:
        raise ValueError(f"gamma={gamma} must not be negative; 0 weighs nothing")
    p = jnp.exp(jnp.minimum(jax.lax.stop_gradient(logp).astype(jnp.float32), 0.0))
    return (1 - p) ** gamma


def mixture_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 0.5,
) -> TokenTerms:
    """RL-PLUS's loss of an outside token: ``-mixture_ratio exploration_factor A``; ``gamma=0`` leaves the factor out.

    ``aux``: ``weight``, the product of ratio and factor. From "RL-PLUS", arXiv:2508.00222, eq. 7.
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    weight = mixture_ratio(logp, old_logp) * exploration_factor(logp, gamma=gamma)
    loss = -weight * jax.lax.stop_gradient(advantages)
    return TokenTerms(jnp.where(mask, loss, 0.0), {"weight": jnp.where(mask, weight, 0.0)})


def combined(own: TokenTerms, other: TokenTerms, outside: Bool[Array, " B"]) -> TokenTerms:
    """The terms of ``other`` on the rows that came from outside, those of ``own`` elsewhere, diagnostics likewise."""
    keys = own.aux.keys() | other.aux.keys()
    zeros = jnp.zeros(own.loss.shape, jnp.float32)

    def choose(theirs: Array, ours: Array) -> Array:
        return jnp.where(outside[:, None], theirs, ours)

    aux = {k: choose(other.aux.get(k, zeros), own.aux.get(k, zeros)) for k in sorted(keys)}
    return TokenTerms(choose(other.loss, own.loss), aux)
