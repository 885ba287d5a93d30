"""KL(pi || reference) from samples of pi: estimators of its *value*, and, under other names, terms with its *gradient*.

Putting a value estimator into a loss is the classical mistake: k1 then has zero expected gradient, k3 descends
another divergence. The ``*_gradient_terms`` below are built to be differentiated; the values are not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.correction import k3_distance
from jaxrl_llm.losses.policy import MAX_LOG_RATIO, masked


def _difference(logp: Array, ref_logp: Array, mask: Array) -> Array:
    logp, ref_logp = masked(mask, logp, ref_logp)
    return logp - ref_logp


def _inverse_ratio(d: Array) -> Array:
    """``exp(-d)``, the only part of these formulas that can overflow: held at e^20 where the token is 20 nats rarer."""
    return jnp.exp(jnp.minimum(-d, MAX_LOG_RATIO))


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``logp - ref_logp``: unbiased value, large variance, may be negative. No gradient.

    From "Approximating KL Divergence" (Schulman, 2020).
    """
    return jax.lax.stop_gradient(_difference(logp, ref_logp, mask))


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``(logp - ref_logp)^2 / 2``: biased value, small variance. No gradient."""
    return jax.lax.stop_gradient(0.5 * _difference(logp, ref_logp, mask) ** 2)


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``exp(-d) - 1 + d`` with ``d = logp - ref_logp``: unbiased value, never negative but for rounding. No gradient.

    ``exp(-d)`` is held at e^20 = 4.9e8: a token that the reference finds more than e^20 times as likely counts less.
    Beside 1 it is rounded by up to 6e-8, as much as the value, ``d^2 / 2``, has at ``|d| = 3e-4``. Where ``d`` is
    normal with deviation 1e-4, a mean of 5.0e-9 comes out as anything from 3e-9 to 1.3e-8 and 2 to 44 % of the tokens
    are negative, by how near to 0 the log-probabilities lie, whose own rounding ``d`` has; with 1e-3 the mean is right
    to 0.3 %.

    >>> import jax.numpy as jnp
    >>> round(float(k3(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])), jnp.array([[True]]))[0, 0]), 4)
    0.1931
    """
    d = _difference(logp, ref_logp, mask)
    return jax.lax.stop_gradient(_inverse_ratio(d) - 1.0 + d)


def absolute(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``|logp - ref_logp|``: not a KL, a distance that is easy to watch. No gradient."""
    return jax.lax.stop_gradient(jnp.abs(_difference(logp, ref_logp, mask)))


def k1_gradient_terms(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """The score function of k1: ``sg(logp - ref_logp) logp``, on-policy the gradient of the token-level KL(pi || ref).

    The gradient is that of ``kl_gradient_terms``, token by token; the value means nothing. k1 itself in a loss has the
    gradient ``grad logp``, whose expectation is 0. On-policy only.

    From "Rethinking KL Regularization in RLHF", arXiv:2510.01555, section 4 ("k1 in reward").

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: k1_gradient_terms(x, jnp.array([[-2.0]]), jnp.array([[True]]))[0, 0]
    >>> float(jax.grad(f)(jnp.array([[-0.5]]))[0, 0])
    1.5
    """
    logp, ref_logp = masked(mask, logp, ref_logp)
    return jax.lax.stop_gradient(logp - ref_logp) * logp


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

    The value is that of ``k3``, with its rounding.

    From "DeepSeekMath", arXiv:2402.03300, eq. 4; what it descends: arXiv:2510.01555, section 4.
    """
    logp, ref_logp = masked(mask, logp, ref_logp)
    d = jax.lax.stop_gradient(logp - ref_logp)
    inverse = _inverse_ratio(d)
    # the slope is written out: differentiating through the clip would turn its sign where the clip acts
    return inverse - 1.0 + d + (1.0 - inverse) * (logp - jax.lax.stop_gradient(logp))


def corrected_k3_gradient_terms(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Bias-corrected k3: ``rho (exp(-d) - 1 + d)`` with the gradient through ``rho = exp(logp - old_logp)`` as well.

    ``d = logp - ref_logp``. Averaged over tokens drawn from ``old_logp``'s policy both the value and the gradient are
    those of the token-level KL(pi || ref), whatever the drift. The gradient of a token is ``rho d grad logp``, that of
    ``weighted_kl_gradient_terms``; the value is never negative. ``rho`` is held at e^20.

    From "DeepSeek-V3.2", arXiv:2512.02556 ("unbiased KL estimate"), as in TRL's GRPOTrainer
    (``use_bias_correction_kl``); the equation's number could not be checked.

    >>> import jax, jax.numpy as jnp
    >>> old, ref = jnp.log(jnp.array([[0.25]])), jnp.log(jnp.array([[0.25]]))
    >>> f = lambda x: corrected_k3_gradient_terms(x, old, ref, jnp.array([[True]]))[0, 0]
    >>> value, slope = jax.value_and_grad(f)(jnp.log(jnp.array([[0.5]])))  # rho = 2, d = log 2
    >>> round(float(value), 4), round(float(slope[0, 0]), 4)
    (0.3863, 1.3863)
    """
    logp, old_logp, ref_logp = masked(mask, logp, old_logp, ref_logp)
    rho = jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    d = logp - ref_logp
    value = rho * k3_distance(-d)
    # the slope is written out: rho (k3 + k3') = rho d, which no clip turns round
    return jax.lax.stop_gradient(value) + jax.lax.stop_gradient(rho * d) * (logp - jax.lax.stop_gradient(logp))


def adapted_kl_coefficient(
    coefficient: Float[Array, ""], kl: Float[Array, ""], *, target: float, horizon: float, steps: float = 1.0
) -> Float[Array, ""]:
    """The next KL coefficient of a proportional controller in log space: it grows while the KL is above its target.

    ``coefficient (1 + clip(kl / target - 1, -0.2, 0.2) steps / horizon)``

    No gradient. It is never negative while ``steps < 5 horizon``.

    Args:
      kl: of the batch just seen, in nats, in the units of ``target`` (a token's or a sequence's).
      horizon: in the units of ``steps``: episodes or updates.
      steps: episodes or updates since the last call.

    From "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2 (its equation of the
    log-space proportional controller has ``K_beta = 0.1`` for ``steps / horizon``); the names are those of verl and
    OpenRLHF (``AdaptiveKLController``).

    >>> import jax.numpy as jnp
    >>> round(float(adapted_kl_coefficient(jnp.float32(0.2), jnp.float32(7.0), target=6.0, horizon=10.0)), 6)
    0.203333
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target={target} and horizon={horizon} must be positive")
    if not 0 < steps < 5 * horizon:
        raise ValueError(f"steps={steps} must be positive and below 5 * horizon={5 * horizon}")
    error = jnp.clip(kl.astype(jnp.float32) / target - 1.0, -0.2, 0.2)
    return jax.lax.stop_gradient(coefficient.astype(jnp.float32) * (1.0 + error * (steps / horizon)))


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
