"""Whitening of per-token signals over all trained tokens of the batch, and the estimator that is built on it.

The sums run over the whole ``[B, T]`` array: under ``jit`` with a sharded batch they are global, so no axis name is
needed. Whitening does not commute with micro-batches: apply it to the whole step before splitting.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import dr_grpo_advantages, per_token
from jaxrl_llm.advantages.returns import at_last_token, discounted_returns


def _from_lowest(values: Array, mask: Array) -> Array:
    """Masked values less their smallest, others 0: sums of large numbers lose the digits that tell them apart."""
    values = values.astype(jnp.float32)
    low = jnp.min(jnp.where(mask, values, jnp.inf))
    return jnp.where(mask, values - jax.lax.stop_gradient(jnp.where(jnp.isfinite(low), low, 0.0)), 0.0)


def whitened_tokens(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], *, ddof: int = 0, eps: float = 1e-8
) -> Float[Array, "B T"]:
    """``(x - mean) / (std + eps)`` over the masked tokens of the whole batch; 0 outside the mask.

    Equal values give exactly 0, whatever the rounding of their mean.

    Args:
      ddof: 0 for the population's standard deviation, 1 for the sample's.
      eps: added to the standard deviation, not under its root.

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> [round(float(x), 4) for x in whitened_tokens(jnp.array([[1.0, 2.0], [3.0, 9.0]]), mask).ravel()]
    [-1.2247, 0.0, 1.2247, 0.0]
    """
    values = _from_lowest(values, mask)
    count = jnp.sum(mask.astype(jnp.float32))
    centred = jnp.where(mask, values - jnp.sum(values) / jnp.maximum(count, 1.0), 0.0)
    variance = jnp.sum(centred**2) / jnp.maximum(count - ddof, 1.0)
    high = jnp.max(jnp.where(mask, values, -jnp.inf))
    low = jnp.min(jnp.where(mask, values, jnp.inf))
    usable = mask & (high > low)
    deviation = jnp.sqrt(jnp.where(high > low, variance, 1.0))
    return jnp.where(usable, centred / (deviation + eps), 0.0)


def reweighted_tokens(
    values: Float[Array, "B T"], weights: Float[Array, " B"], mask: Bool[Array, "B T"], *, eps: float = 1e-8
) -> Float[Array, "B T"]:
    """``(x - mean) / (std + eps)`` with the moments of a buffer in which sequence b occurs ``weights[b]`` times.

    The expectation of ``whitened_tokens`` over sequences drawn with replacement; equal weights give the same as it.
    Tokens of sequences of weight 0 are moved alike but count for nothing.

    From "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957, whose code whitens what its
    filter has kept.

    >>> import jax.numpy as jnp
    >>> mask = jnp.ones((3, 1), bool)
    >>> w = reweighted_tokens(jnp.array([[1.0], [5.0], [3.0]]), jnp.array([1.0, 0.0, 1.0]), mask)
    >>> [round(float(x), 4) for x in w.ravel()]
    [-1.0, 3.0, 1.0]
    """
    values = _from_lowest(values, mask)
    share = jnp.where(mask, weights.astype(jnp.float32)[:, None], 0.0)
    share = share / jnp.maximum(jnp.sum(share), 1e-30)
    centred = jnp.where(mask, values - jnp.sum(share * values), 0.0)
    used = mask & (share > 0)
    high = jnp.max(jnp.where(used, values, -jnp.inf))
    low = jnp.min(jnp.where(used, values, jnp.inf))
    deviation = jnp.sqrt(jnp.where(high > low, jnp.sum(share * centred**2), 1.0))
    return jnp.where(mask & (high > low), centred / (deviation + eps), 0.0)


def reinforce_pp_token_advantages(
    rewards: Float[Array, " B"],
    token_kl: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    kl_weight: float,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-8,
) -> Float[Array, "B T"]:
    """REINFORCE++: ``A_t = r - kl_weight sum_{i >= t} kl_i``, whitened over all trained tokens; no gradient.

    Args:
      rewards: outcome reward of each sequence, paid at its last trained token.
      token_kl: estimate of the divergence from the reference at each token: ``logp - ref_logp`` in the paper.
      valid: rewards that count; tokens of the others get 0 and leave the mean and the standard deviation.

    From "REINFORCE++", arXiv:2501.03262, section 3. Differs from the paper in naming ``eps``; some implementations take
    the sample variance and put 1e-8 under the root.

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([[True, True]])  # r = 1, kl 1 and 2: returns 1 - 0.1 * 3 and 1 - 0.1 * 2
    >>> a = reinforce_pp_token_advantages(jnp.array([1.0]), jnp.array([[1.0, 2.0]]), mask, kl_weight=0.1)
    >>> [round(float(x), 4) for x in a[0]]
    [-1.0, 1.0]
    """
    if kl_weight < 0:
        raise ValueError(f"kl_weight={kl_weight} must not be negative: it is subtracted from the reward")
    if valid is not None:
        mask = mask & valid[:, None]
    penalty = jnp.where(mask, token_kl.astype(jnp.float32), 0.0)
    returns = discounted_returns(at_last_token(rewards, mask) - kl_weight * penalty, mask)
    return jax.lax.stop_gradient(whitened_tokens(returns, mask, eps=eps))


def centred_token_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-8,
) -> Float[Array, "B T"]:
    """``r_i - mean_group`` at every token of sequence i, whitened over all masked tokens: long sequences count more.

    Whitening cancels what scales and shifts all rewards alike. ``group.reinforce_pp_baseline_advantages`` is the same
    with the moments of sequences.

    Args:
      mask: leave groups out of it that are not to train: they count in the moments, although their advantage is 0.
      valid: rewards that count; tokens of the others get 0 and leave the moments.

    From "Beyond Ten Turns: Unlocking Long-Horizon Agentic Search with Large-Scale Asynchronous RL", arXiv:2508.07976,
    and its published settings.

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([[True, False], [True, True]])  # 1/2 at one token, -1/2 at two
    >>> a = centred_token_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask)
    >>> [[round(float(x), 4) for x in row] for row in a]
    [[1.4142, 0.0], [-0.7071, -0.7071]]
    """
    if valid is not None:
        mask = mask & valid[:, None]
    centred = dr_grpo_advantages(rewards, group_ids, valid=valid)
    return jax.lax.stop_gradient(whitened_tokens(per_token(centred, mask), mask, eps=eps))
