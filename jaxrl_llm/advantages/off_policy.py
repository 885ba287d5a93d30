"""Group baselines and data weighting for samples of any origin.

Arguments as in ``advantages.group``: invalid rewards get advantage 0 and do not enter any baseline.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import dr_grpo_advantages, from_lowest, group_spread, group_sum


def log_mean_exp_baseline(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    tau: float,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """``tau log mean_group exp(r / tau)``: the mean for large tau, the maximum for small; 0 without a valid reward.

    From "Kimi k1.5", arXiv:2501.12599, section 2.3.2.

    >>> import jax.numpy as jnp
    >>> r, g = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    >>> [round(float(log_mean_exp_baseline(r, g, tau=t)[0]), 4) for t in (0.1, 1.0, 10.0)]
    [0.9307, 0.6201, 0.5125]
    """
    if tau <= 0:
        raise ValueError(f"tau={tau} must be positive")
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    rewards, size = jnp.where(valid, rewards.astype(jnp.float32), 0.0), rewards.shape[0]
    high = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group_ids, num_segments=size)[group_ids]
    high = jnp.where(jnp.isfinite(high), high, 0.0)
    count = group_sum(valid.astype(jnp.float32), group_ids)
    total = group_sum(jnp.where(valid, jnp.exp((rewards - high) / tau), 0.0), group_ids)
    log_mean = jnp.log(jnp.maximum(total, 1e-30)) - jnp.log(jnp.maximum(count, 1.0))
    return jnp.where(count > 0, high + tau * log_mean, 0.0)


def opmd_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    tau: float,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """Online policy mirror descent: ``(r - log_mean_exp_baseline) / (1 + tau)``; 0 in a group of equal rewards.

    From "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm", arXiv:2509.24203, section 4.
    """
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    usable = valid & (group_spread(rewards, group_ids, valid=valid) > 0)
    rewards = from_lowest(rewards, group_ids, valid=valid)
    baseline = log_mean_exp_baseline(rewards, group_ids, tau=tau, valid=valid)
    return jnp.where(usable, (rewards - baseline) / (1 + tau), 0.0)


def asymre_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    delta: float = -0.1,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """AsymRE: ``r - (mean_group + delta)``: with ``delta < 0`` every sample is also imitated, with weight ``-delta``.

    A group of equal rewards keeps ``-delta``.

    From "Asymmetric REINFORCE for off-policy Reinforcement Learning", arXiv:2506.20520; as regularised REINFORCE in
    arXiv:2509.24203, section 4.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in asymre_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]))]
    [0.6, -0.4]
    """
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    return jnp.where(valid, dr_grpo_advantages(rewards, group_ids, valid=valid) - delta, 0.0)


def balanced_members(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    order: Float[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
    """RED-Drop: which members stay when excess negatives (reward below the group's mean) are dropped.

    Negatives stay in ascending ``order`` until there are as many as positives.

    Args:
      order: random numbers; or, since members of a group are exchangeable, their position in the batch.

    From arXiv:2509.24203, section 5. Differs from the paper's code in a group of one, which stays.

    >>> import jax.numpy as jnp
    >>> r, g = jnp.array([1.0, 0, 0, 0]), jnp.array([0, 0, 0, 0])
    >>> balanced_members(r, g, jnp.arange(4.0)).tolist()
    [True, True, False, False]
    """
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    differs = group_spread(rewards, group_ids, valid=valid) > 0
    above = valid & ((dr_grpo_advantages(rewards, group_ids, valid=valid) >= 0) | ~differs)
    below = valid & ~above
    same_group = group_ids[:, None] == group_ids[None, :]
    earlier = same_group & below[None, :] & (order[None, :] < order[:, None])
    rank = jnp.sum(earlier.astype(jnp.float32), axis=1)
    return above | (below & (rank < group_sum(above.astype(jnp.float32), group_ids)))


def red_drop_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    estimator: Callable[..., Float[Array, " B"]] = dr_grpo_advantages,
) -> Float[Array, " B"]:
    """Advantages among the members that ``balanced_members`` keeps (in order of position); 0 for the dropped ones.

    Args:
      estimator: of the kept members; ``group.group_normalized_advantages`` for the variant with a standard deviation.
    """
    order = jnp.arange(rewards.shape[0], dtype=jnp.float32)
    kept = balanced_members(rewards, group_ids, order, valid=valid)
    return estimator(rewards, group_ids, valid=kept)
