"""Importance weights for a sampler that is not the trainer: other numerics, other precision, or older weights.

Each returns stop-gradient weights ``[B, T]`` to multiply per-token losses with; 0 outside the mask. ``level`` is who
owns the ratio: the token, the sequence (product), or the sequence's geometric mean. Levels combine by multiplying or
selecting, for example token weights for the sequences whose geometric mean stays near 1::

    near = masked_weights(mismatch_ratio(old, sampler, mask, level="geometric"), mask, low=0.99, high=1.01) > 0
    weights = jnp.where(near, truncated_weights(mismatch_ratio(old, sampler, mask), mask), 0.0)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.policy import MAX_LOG_RATIO, masked
from jaxrl_llm.losses.sequence import sequence_log_ratio

LEVELS = ("token", "sequence", "geometric")


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


def effective_sample_fraction(weights: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Kish's effective sample size as a fraction of the masked tokens: ``(sum w)^2 / (n sum w^2)``."""
    (weights,) = masked(mask, weights)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    return jnp.sum(weights) ** 2 / jnp.maximum(count * jnp.sum(weights**2), 1e-9)
