"""Advantages from the rewards of a group of answers to one prompt.

Groups are data (``group_ids``), never a layout. Invalid rewards (infrastructure failures) get advantage 0 and do not
enter any baseline. ``group_ids`` lie in ``[0, B)``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def _valid(rewards: Array, valid: Array | None) -> Array:
    return jnp.ones(rewards.shape, bool) if valid is None else valid


def group_sum(values: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """Sum over the group of each sequence, at each sequence."""
    return jax.ops.segment_sum(values, group_ids, num_segments=values.shape[0])[group_ids]


def _count_and_mean(rewards: Array, group_ids: Array, valid: Array) -> tuple[Array, Array]:
    count = group_sum(valid.astype(jnp.float32), group_ids)
    return count, group_sum(jnp.where(valid, rewards, 0.0), group_ids) / jnp.maximum(count, 1.0)


def group_spread(
    rewards: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """Largest minus smallest valid reward of each group: exactly 0 when all are equal, whatever the rounding."""
    valid = _valid(rewards, valid)
    rewards = rewards.astype(jnp.float32)
    high = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group_ids, num_segments=rewards.shape[0])
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group_ids, num_segments=rewards.shape[0])
    spread = jnp.where(high > -jnp.inf, high - jnp.where(jnp.isfinite(low), low, 0.0), 0.0)
    return spread[group_ids]


def per_token(advantages: Float[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The advantage of a sequence at each of its masked tokens, 0 elsewhere."""
    return jnp.where(mask, advantages.astype(jnp.float32)[:, None], 0.0)


def group_normalized_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """GRPO: ``A_i = (r_i - mean_group) / (std_group + eps)``; a group of equal rewards, or of one, gets exactly 0.

    Args:
      valid: rewards that count.
      ddof: 1 for the sample standard deviation, 0 for the population's.
      eps: added to the standard deviation, not under its root.

    From "DeepSeekMath", arXiv:2402.03300, section 4.1.2. Differs from the paper in naming ``ddof`` and ``eps``, which
    it leaves open.

    >>> import jax.numpy as jnp
    >>> a = group_normalized_advantages(jnp.array([1.0, 0, 0, 0]), jnp.array([0, 0, 0, 0]), ddof=0, eps=0.0)
    >>> [round(float(x), 4) for x in a]
    [1.7321, -0.5774, -0.5774, -0.5774]
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    count, mean = _count_and_mean(rewards, group_ids, valid)
    centred = jnp.where(valid, rewards - mean, 0.0)
    variance = group_sum(centred**2, group_ids) / jnp.maximum(count - ddof, 1.0)
    usable = valid & (group_spread(rewards, group_ids, valid=valid) > 0)
    deviation = jnp.sqrt(jnp.where(usable, variance, 1.0))
    return jnp.where(usable, centred / (deviation + eps), 0.0)


def dr_grpo_advantages(
    rewards: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """Dr.GRPO: ``A_i = r_i - mean_group``, without the division by the standard deviation.

    From "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2.

    >>> import jax.numpy as jnp
    >>> dr_grpo_advantages(jnp.array([1.0, 0, 0, 0]), jnp.array([0, 0, 0, 0])).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    _, mean = _count_and_mean(rewards, group_ids, valid)
    usable = valid & (group_spread(rewards, group_ids, valid=valid) > 0)
    return jnp.where(usable, rewards - mean, 0.0)


def rloo_advantages(
    rewards: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """Leave-one-out: ``A_i = r_i - mean of the other members = G / (G - 1) (r_i - mean_group)``.

    From "Back to Basics", arXiv:2402.14740, section 2. A group of one gets 0.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in rloo_advantages(jnp.array([1.0, 0, 0, 0]), jnp.array([0, 0, 0, 0]))]
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    count, _ = _count_and_mean(rewards, group_ids, valid)
    return dr_grpo_advantages(rewards, group_ids, valid=valid) * count / jnp.maximum(count - 1.0, 1.0)


def informative_groups(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    low: float,
    high: float,
    valid: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
    """Which sequences belong to a group whose mean reward lies in ``[low, high]`` and whose rewards differ.

    Dynamic filtering of "DAPO", arXiv:2503.14476, eq. 11 is ``low=0, high=1`` (only the spread counts); balanced
    filtering, arXiv:2504.03380, takes for instance ``low=0.25, high=0.75``.
    """
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    valid = _valid(rewards, valid)
    _, mean = _count_and_mean(rewards.astype(jnp.float32), group_ids, valid)
    return (mean >= low) & (mean <= high) & (group_spread(rewards, group_ids, valid=valid) > 0)
