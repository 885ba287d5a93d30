"""KL(pi || reference) from samples of pi: estimators of its *value*, and, under other names, terms with its *gradient*.

Putting a value estimator into a loss is the classical mistake: k1 then has zero expected gradient, k3 descends
another divergence. The ``*_gradient_terms`` below are built to be differentiated; the values are not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import MAX_LOG_RATIO, masked


def _difference(logp: Array, ref_logp: Array, mask: Array) -> Array:
    logp, ref_logp = masked(mask, logp, ref_logp)
    return jnp.clip(logp - ref_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``logp - ref_logp``: unbiased value, large variance, may be negative. No gradient.

    From "Approximating KL Divergence" (Schulman, 2020).
    """
    return jax.lax.stop_gradient(_difference(logp, ref_logp, mask))


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``(logp - ref_logp)^2 / 2``: biased value, small variance. No gradient."""
    return jax.lax.stop_gradient(0.5 * _difference(logp, ref_logp, mask) ** 2)


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``exp(-d) - 1 + d`` with ``d = logp - ref_logp``: unbiased value, never negative. No gradient.

    >>> import jax.numpy as jnp
    >>> round(float(k3(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])), jnp.array([[True]]))[0, 0]), 4)
    0.1931
    """
    d = _difference(logp, ref_logp, mask)
    return jax.lax.stop_gradient(jnp.exp(-d) - 1.0 + d)


def absolute(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``|logp - ref_logp|``: not a KL, a distance that is easy to watch. No gradient."""
    return jax.lax.stop_gradient(jnp.abs(_difference(logp, ref_logp, mask)))


def kl_gradient_terms(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Terms whose gradient is, on-policy, that of the token-level KL(pi || ref): ``d^2 / 2`` ("k2 in loss").

    ``grad = d grad logp``, whose expectation under pi is ``grad KL`` of each next-token distribution. On-policy only.
    ``d`` enters linearly and is not clamped: a token far from the reference is pulled back, not let go.

    From "Rethinking KL Regularization in RLHF", arXiv:2510.01555, section 4.
    """
    logp, ref_logp = masked(mask, logp, ref_logp)
    return 0.5 * (logp - jax.lax.stop_gradient(ref_logp)) ** 2


def weighted_kl_gradient_terms(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Off-policy form of ``kl_gradient_terms``: ``sg(rho d) logp`` with ``rho = exp(logp - old_logp)``.

    Its gradient, averaged over tokens drawn from ``old_logp``'s policy, is that of the token-level KL(pi || ref).
    Its value means nothing; log ``k3``. From arXiv:2510.01555.
    """
    logp, old_logp, ref_logp = masked(mask, logp, old_logp, ref_logp)
    rho = jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jax.lax.stop_gradient(rho * (logp - ref_logp)) * logp


def k3_gradient_terms(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """GRPO's choice, k3 inside the loss: on-policy its expected gradient is that of KL(ref || pi), not KL(pi || ref).

    From "DeepSeekMath", arXiv:2402.03300, eq. 4; what it descends: arXiv:2510.01555, section 4.
    """
    logp, ref_logp = masked(mask, logp, ref_logp)
    d = jax.lax.stop_gradient(logp - ref_logp)
    inverse = jnp.exp(jnp.clip(-d, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    # the slope is written out: differentiating through the clip would turn its sign where the clip acts
    return inverse - 1.0 + d + (1.0 - inverse) * (logp - jax.lax.stop_gradient(logp))


def kl_in_reward(
    rewards: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    coefficient: float,
) -> Float[Array, "B T"]:
    """Rewards minus ``coefficient * k1`` at every token: with it the policy gradient descends the sequence-level KL.

    No gradient itself: it acts through the returns, which must run from each token to the end.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 1))
    >>> float(kl_in_reward(one, -one, -2.0 * one, one > 0, coefficient=0.25)[0, 0])
    0.75
    """
    (rewards,) = masked(mask, rewards)
    return jnp.where(mask, rewards - coefficient * k1(logp, ref_logp, mask), 0.0)
