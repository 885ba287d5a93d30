"""Token-level policy losses: unreduced, float32, zero outside the mask.

Arguments in a fixed order: ``logp`` (gradient), ``old_logp`` (anchor), ``advantages``, ``mask``. No gradient enters
the anchors or the advantages. Masked entries are replaced before any arithmetic, so a NaN there is harmless.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import TokenTerms

MAX_LOG_RATIO = 20.0  # e^20 is 4.9e8: far past any clip, and still finite in float32 products


def masked(mask: Bool[Array, "B T"], *arrays: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], ...]:
    """Each array in float32 with 0 outside the mask.

    Raises:
      ValueError: for an array of another shape than the mask, which would broadcast (a square batch hides it).
    """
    for x in arrays:
        if x.shape != mask.shape:
            raise ValueError(f"an array of shape {x.shape} meets mask of shape {mask.shape}; spread it over the tokens")
    return tuple(jnp.where(mask, x.astype(jnp.float32), 0.0) for x in arrays)


def log_ratio(logp: Float[Array, "B T"], anchor: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``logp - stop_gradient(anchor)``, clamped to +-20 so that its exponential stays finite.

    Beyond the clamp (a token ``e^20`` times as likely as before) value stays and gradient is zero.
    """
    difference = logp.astype(jnp.float32) - jax.lax.stop_gradient(anchor).astype(jnp.float32)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def reinforce_loss(logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Score-function policy gradient: ``-A_t logp_t``.

    From "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (Williams, 1992).

    >>> import jax.numpy as jnp
    >>> terms = reinforce_loss(jnp.array([[-0.5]]), jnp.array([[2.0]]), jnp.array([[True]]))
    >>> float(terms.loss[0, 0])
    1.0
    """
    logp, advantages = masked(mask, logp, advantages)
    return TokenTerms(-jax.lax.stop_gradient(advantages) * logp, {})


def clipped_policy_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenTerms:
    """PPO's clipped surrogate: ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logp - old)``.

    With ``dual_clip = c`` the loss of a token with A < 0 is at most ``-c A``.

    ``aux``: ``ratio``, and ``clipped``, 1 exactly where clipping removed the gradient.

    From "Proximal Policy Optimization Algorithms", arXiv:1707.06347, eq. 7; asymmetric bounds ("clip-higher") from
    "DAPO", arXiv:2503.14476, eq. 8; dual clip from "Mastering Complex Control in MOBA Games", arXiv:1912.09729, eq. 4.

    >>> import jax.numpy as jnp
    >>> logp, old = jnp.log(jnp.array([[0.6]])), jnp.log(jnp.array([[0.4]]))
    >>> round(float(clipped_policy_loss(logp, old, jnp.array([[2.0]]), jnp.array([[True]])).loss[0, 0]), 4)
    -2.4
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1)")
    if clip_high < 0:
        raise ValueError(f"clip_high={clip_high} must not be negative")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, or None")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    surrogate = jnp.minimum(ratio * advantages, bounded * advantages)
    # strictly outside the bound on the side where the minimum takes the constant
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if dual_clip is not None:
        floor = dual_clip * advantages
        cut = (advantages < 0) & (surrogate < floor)
        surrogate = jnp.where(cut, floor, surrogate)
        clipped = clipped | cut
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": jnp.where(mask, clipped, False).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, surrogate, 0.0), aux)


def cispo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 2.0,
) -> TokenTerms:
    """CISPO: REINFORCE with a clipped, stop-gradient importance weight; no token loses its gradient.

    ``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp``. ``clip_low = 1`` leaves the lower side open.

    ``aux``: ``ratio``, and ``clipped``, 1 where the weight was bounded, whatever the sign of the advantage: the
    gradient of such a token is smaller, not gone.

    From "MiniMax-M1", arXiv:2506.13585, eqs. 4 and 5. Differs from the paper in the default ``clip_high``, which it
    says is tuned without giving it.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1] and clip_high={clip_high} must not be negative")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    cut = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": (cut & mask).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, weight * logp, 0.0), aux)


def sapo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenTerms:
    """SAPO: a smooth gate instead of a clip: ``-(4 / tau) sigmoid(tau (rho - 1)) A``.

    At ``rho = 1`` the gradient is that of REINFORCE; it fades on both sides, faster for A < 0 (``tau_negative``).

    ``aux``: ``ratio``, and ``clipped``, always 0: no token is cut.

    From "Soft Adaptive Policy Optimization", arXiv:2511.20347, eq. 5.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must be positive")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": jnp.zeros_like(ratio)}
    return TokenTerms(-jnp.where(mask, gate * advantages, 0.0), aux)
