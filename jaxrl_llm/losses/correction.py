"""Importance weights for a sampler that is not the trainer: other numerics, other precision, or older weights.

Each returns stop-gradient weights ``[B, T]`` to multiply per-token losses with; 0 outside the mask. ``level`` is who
owns the ratio: the token, the sequence (product), or the sequence's geometric mean. Levels combine by multiplying or
selecting, for example token weights for the sequences whose geometric mean stays near 1::

    near = masked_weights(mismatch_ratio(old, sampler, mask, level="geometric"), mask, low=0.99, high=1.01) > 0
    weights = jnp.where(near, truncated_weights(mismatch_ratio(old, sampler, mask), mask), 0.0)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import MAX_LOG_RATIO, masked
from jaxrl_llm.losses.sequence import sequence_log_ratio

LEVELS = ("token", "sequence", "geometric")
OVER = ("token", "sum", "mean", "max")


def mismatch_ratio(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    level: str = "token",
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """``pi_old / pi_sampler`` at the given level, at each masked token (0 elsewhere); no gradient.

    Args:
      level: ``token``; ``sequence``: product over the sequence; ``geometric``: its T-th root.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    old_logp, sampler_logp = masked(mask, old_logp, sampler_logp)
    if level == "token":
        log = jnp.clip(old_logp - sampler_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    else:
        mode = "sum" if level == "sequence" else "mean"
        log = sequence_log_ratio(old_logp, sampler_logp, mask, mode=mode, segment_ids=segment_ids)
    return jax.lax.stop_gradient(jnp.where(mask, jnp.exp(log), 0.0))


def truncated_weights(ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], *, cap: float = 2.0) -> Float[Array, "B T"]:
    """Truncated importance sampling: ``min(ratio, cap)``; no gradient.

    >>> import jax.numpy as jnp
    >>> truncated_weights(jnp.array([[0.5, 4.0, 9.0]]), jnp.array([[True, True, False]])).tolist()
    [[0.5, 2.0, 0.0]]

    From "Truncated importance sampling", Ionides 2008; for rollout engines as in "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al., 2025).
    """
    if cap <= 0:
        raise ValueError(f"cap={cap} must be positive")
    (ratio,) = masked(mask, jax.lax.stop_gradient(ratio))
    return jnp.where(mask, jnp.minimum(ratio, cap), 0.0)


def masked_weights(
    ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], *, low: float = 0.5, high: float = 2.0
) -> Float[Array, "B T"]:
    """Masked importance sampling: the ratio inside ``[low, high]``, 0 outside: what drifted too far trains nothing.

    No gradient. From "Every Step Evolves" (IcePop), arXiv:2510.18855.

    >>> import jax.numpy as jnp
    >>> masked_weights(jnp.array([[0.4, 0.5, 3.0]]), jnp.array([[True, True, True]])).tolist()
    [[0.0, 0.5, 0.0]]
    """
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    (ratio,) = masked(mask, jax.lax.stop_gradient(ratio))
    return jnp.where(mask & (ratio >= low) & (ratio <= high), ratio, 0.0)


def off_policy_sequence_mask(
    logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    most: float,
) -> Bool[Array, "B T"]:
    """Which tokens stay: those of A >= 0, and those of sequences with ``mean_t (sampler_logp - logp) <= most``.

    A bad response that the policy would hardly write any more (a large estimate of KL(sampler || policy)) trains
    nothing. Multiply losses with it and keep their denominator. No gradient.

    Args:
      most: nats per token.

    From "DeepSeek-V3.2", arXiv:2512.02556 (off-policy sequence masking), as in TRL's GRPOTrainer
    (``off_policy_mask_threshold``).

    >>> import jax.numpy as jnp
    >>> a, mask = jnp.array([[1.0], [-1.0], [-1.0]]), jnp.ones((3, 1), bool)
    >>> kept = off_policy_sequence_mask(jnp.array([[-9.0], [-9.0], [-1.0]]), -jnp.ones((3, 1)), a, mask, most=0.5)
    >>> kept.ravel().tolist()
    [True, False, True]
    """
    logp, sampler_logp, advantages = masked(mask, logp, sampler_logp, advantages)
    drift = reduce.sequences(sampler_logp - logp, mask, mode="mean")[:, None]
    return mask & ((advantages >= 0) | (jax.lax.stop_gradient(drift) <= most))


def k2_distance(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``l^2 / 2`` of ``l = old_logp - sampler_logp``."""
    return 0.5 * log_ratio.astype(jnp.float32) ** 2


def k3_distance(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``exp(l) - 1 - l`` of ``l = old_logp - sampler_logp``, an unbiased estimate of KL(sampler || old), at least 0.

    By ``expm1``: beside 1 ``exp`` is rounded by as much as the value has of a small ``l``, see ``kl.k3``.
    """
    log_ratio = log_ratio.astype(jnp.float32)
    return jnp.maximum(jnp.expm1(jnp.minimum(log_ratio, MAX_LOG_RATIO)) - log_ratio, 0.0)


def rejection_mask(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    most: float,
    distance: Callable[[Array], Array] = k3_distance,
    over: str = "max",
) -> Bool[Array, "B T"]:
    """Which tokens stay in a hard trust region: ``distance <= most``, of the token or over its sequence. No gradient.

    Args:
      most: in nats.
      distance: ``k2_distance`` or ``k3_distance``, of ``old_logp - sampler_logp``.
      over: ``token``: each by itself; ``sum``, ``mean``, ``max``: the whole sequence stays or goes.

    From verl's rollout correction (``token_k2``, ``seq_mean_k3``, ``seq_max_k3``, ...); the case for it is made in
    "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al., 2025).

    >>> import jax.numpy as jnp
    >>> old, mask = jnp.array([[0.0, 0.0], [0.0, 2.0]]), jnp.ones((2, 2), bool)
    >>> for over in ("token", "max"):
    ...     rejection_mask(old, jnp.zeros((2, 2)), mask, most=1.0, distance=k2_distance, over=over).tolist()
    [[True, True], [True, False]]
    [[True, True], [False, False]]
    """
    if over not in OVER:
        raise ValueError(f"over={over!r} is not one of {', '.join(OVER)}")
    if most < 0:
        raise ValueError(f"most={most} must not be negative")
    old_logp, sampler_logp = masked(mask, old_logp, sampler_logp)
    far = jnp.where(mask, distance(jax.lax.stop_gradient(old_logp - sampler_logp)), 0.0)
    if over == "max":
        far = jnp.max(far, axis=1, keepdims=True)
    elif over != "token":
        far = reduce.sequences(far, mask, mode=over)[:, None]
    return mask & (far <= most)


def batch_normalised_weights(
    weights: Float[Array, "B T"], mask: Bool[Array, "B T"], *, level: str = "token"
) -> Float[Array, "B T"]:
    """Weights divided by their mean over the batch, so that a truncation does not scale the gradient; no gradient.

    Args:
      level: ``token``: the mean over masked tokens; ``sequence``: over sequences, of weights that are equal within one.

    From verl's rollout correction (``rollout_is_batch_normalize``). Weights that are all 0 stay.

    >>> import jax.numpy as jnp
    >>> batch_normalised_weights(jnp.array([[0.5, 1.0, 9.0]]), jnp.array([[True, True, False]])).tolist()[0][:2]
    [0.6666666865348816, 1.3333333730697632]
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is not one of token, sequence")
    (weights,) = masked(mask, jax.lax.stop_gradient(weights))
    mean = reduce.tokens(weights, mask, mode="token_mean" if level == "token" else "seq_mean")
    return jnp.where(mean > 1e-8, weights / jnp.where(mean > 1e-8, mean, 1.0), weights)


def self_normalised_weights(
    weights: Float[Array, "B T"], group_ids: Int[Array, " B"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """``n w_i / sum_j w_j`` over the ``n`` sequences of a group: weighted importance sampling; no gradient.

    A group's weights have mean 1: the estimate is biased (by O(1 / n)) and its variance bounded, where plain weights
    have neither. A group of weights 0 stays 0.

    Args:
      weights: of sequences, at each of their tokens (``mismatch_ratio(..., level="sequence")``).

    From "Weighted importance sampling for off-policy learning with linear function approximation" (Mahmood et al.,
    2014), eq. 2.

    >>> import jax.numpy as jnp
    >>> w, mask = jnp.array([[3.0], [1.0], [5.0]]), jnp.ones((3, 1), bool)
    >>> self_normalised_weights(w, jnp.array([0, 0, 1]), mask).ravel().tolist()
    [1.5, 0.5, 1.0]
    """
    (weights,) = masked(mask, jax.lax.stop_gradient(weights))
    own, used = reduce.sequences(weights, mask, mode="mean"), jnp.any(mask, axis=1).astype(jnp.float32)
    total, count = (jax.ops.segment_sum(x, group_ids, num_segments=group_ids.shape[0])[group_ids] for x in (own, used))
    share = jnp.where(total > 0, count / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.where(mask, weights * share[:, None], 0.0)


def effective_sample_fraction(weights: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Kish's effective sample size as a fraction of the masked tokens: ``(sum w)^2 / (n sum w^2)``."""
    (weights,) = masked(mask, weights)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    return jnp.sum(weights) ** 2 / jnp.maximum(count * jnp.sum(weights**2), 1e-9)
