"""Advantages from the rewards of a group of answers to one prompt.

Groups are data (``group_ids``), never a layout. Invalid rewards (infrastructure failures) get advantage 0 and do not
enter any baseline. ``group_ids`` lie in ``[0, B)``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce


def _valid(rewards: Array, valid: Array | None) -> Array:
    return jnp.ones(rewards.shape, bool) if valid is None else valid


def group_sum(values: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """Sum over the group of each sequence, at each sequence."""
    return jax.ops.segment_sum(values.astype(jnp.float32), group_ids, num_segments=values.shape[0])[group_ids]


def from_lowest(
    rewards: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """Valid rewards less the smallest of their group, others 0: what a baseline needs, without the rewards' offset.

    Sums of numbers near 1e4 lose 1e-3 in float32; differences to a member of the group do not, and they are exactly 0
    where all are equal.

    >>> import jax.numpy as jnp
    >>> from_lowest(jnp.array([10002.0, 10001.0, 5.0]), jnp.array([0, 0, 1])).tolist()
    [1.0, 0.0, 0.0]
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group_ids, num_segments=rewards.shape[0])[group_ids]
    return jnp.where(valid, rewards - jax.lax.stop_gradient(jnp.where(valid, low, 0.0)), 0.0)


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
    reduce.check_rows(mask, advantages)
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
    valid = _valid(rewards, valid)
    rewards = from_lowest(rewards, group_ids, valid=valid)
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
    valid = _valid(rewards, valid)
    rewards = from_lowest(rewards, group_ids, valid=valid)
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

    Dynamic filtering of "DAPO", arXiv:2503.14476, eq. 11, where only the spread counts, is ``low=0, high=1`` for
    rewards in [0, 1], and for others ``low=-inf, high=inf``; balanced filtering, arXiv:2504.03380, takes for instance
    ``low=0.25, high=0.75``.
    """
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    valid = _valid(rewards, valid)
    _, mean = _count_and_mean(rewards.astype(jnp.float32), group_ids, valid)
    return (mean >= low) & (mean <= high) & (group_spread(rewards, group_ids, valid=valid) > 0)


def widest_groups(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    share: float,
    valid: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
    """Which sequences belong to the ``share`` of groups whose valid rewards deviate most, at least one group.

    Of ``G`` groups those of the ``max(1, floor(share G))`` largest standard deviations; of equal ones the first. Groups
    without a valid reward do not count.

    From "RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", arXiv:2504.20073,
    section 4.2 (StarPO-S, uncertainty-based filtering).

    >>> import jax.numpy as jnp
    >>> widest_groups(jnp.array([0.0, 1.0, 0.0, 0.0, 5.0, 5.5]), jnp.array([0, 0, 1, 1, 2, 2]), share=0.34).tolist()
    [True, True, False, False, False, False]

    Raises:
      ValueError: for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must lie in (0, 1]")
    valid = _valid(rewards, valid)
    size = rewards.shape[0]
    level = from_lowest(rewards, group_ids, valid=valid)
    count, mean = _count_and_mean(level, group_ids, valid)
    squares = group_sum(jnp.where(valid, (level - mean) ** 2, 0.0), group_ids) / jnp.maximum(count, 1.0)
    deviation = jnp.full((size,), -1.0, jnp.float32).at[group_ids].set(jnp.where(count > 0, squares, -1.0))
    place = jnp.argsort(jnp.argsort(-deviation, stable=True), stable=True)
    groups = jnp.sum((deviation >= 0).astype(jnp.float32))
    kept = jnp.maximum(jnp.floor(share * groups + 1e-4), 1.0)
    return (count > 0) & (place.astype(jnp.float32)[group_ids] < kept)


def gpg_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """GPG: ``alpha (r_i - mean_group)``, ``alpha`` = valid sequences / sequences in informative groups.

    The factor undoes the dilution by groups of equal rewards, whose advantage is 0.

    From "Group Policy Gradient", arXiv:2504.02546, eqs. 5 and 7 (with ``F_norm = 1``).
    """
    valid = _valid(rewards, valid)
    useful = valid & (group_spread(rewards, group_ids, valid=valid) > 0)
    alpha = jnp.sum(valid.astype(jnp.float32)) / jnp.maximum(jnp.sum(useful.astype(jnp.float32)), 1.0)
    return alpha * dr_grpo_advantages(rewards, group_ids, valid=valid)


def opo_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    length_tokens: Float[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """OPO: ``r_i - sum_j l_j r_j / sum_j l_j``, the length-weighted baseline of least variance.

    From "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585, eq. 10.
    """
    valid = _valid(rewards, valid)
    rewards = from_lowest(rewards, group_ids, valid=valid)
    weight = jnp.where(valid, length_tokens.astype(jnp.float32), 0.0)
    baseline = group_sum(weight * jnp.where(valid, rewards, 0.0), group_ids)
    baseline = baseline / jnp.maximum(group_sum(weight, group_ids), 1e-9)
    usable = valid & (group_spread(rewards, group_ids, valid=valid) > 0)
    return jnp.where(usable, rewards - baseline, 0.0)


def remax_advantages(
    rewards: Float[Array, " B"],
    greedy_rewards: Float[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """ReMax: ``r_i - r(greedy response to the same prompt)``.

    From "ReMax", arXiv:2310.10505, eq. 6.
    """
    difference = rewards.astype(jnp.float32) - greedy_rewards.astype(jnp.float32)
    return jnp.where(_valid(rewards, valid), difference, 0.0)


def batch_whitened(
    values: Float[Array, " B"], *, valid: Bool[Array, " B"] | None = None, eps: float = 1e-8
) -> Float[Array, " B"]:
    """Values with mean 0 and (population) standard deviation 1 over the valid ones of the whole batch.

    Equal values give exactly 0, whatever the rounding of their mean. ``whiten.whitened_tokens`` is the same of tokens.
    """
    valid, values = _valid(values, valid), values.astype(jnp.float32)
    whole = jnp.zeros(values.shape, jnp.int32)
    return group_normalized_advantages(values, whole, valid=valid, ddof=0, eps=eps)


def reinforce_pp_advantages(
    rewards: Float[Array, " B"], *, valid: Bool[Array, " B"] | None = None, eps: float = 1e-8
) -> Float[Array, " B"]:
    """REINFORCE++: rewards (with any KL penalty inside) whitened over the whole batch.

    ``whiten.reinforce_pp_token_advantages`` is the form with the penalty at each token.

    From "REINFORCE++", arXiv:2501.03262, eq. 9.
    """
    return batch_whitened(rewards, valid=valid, eps=eps)


def reinforce_pp_baseline_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-8,
) -> Float[Array, " B"]:
    """REINFORCE++-baseline: group-mean centred, then whitened over the whole batch.

    From "REINFORCE++", arXiv:2501.03262, eqs. 10 and 11.
    """
    return batch_whitened(dr_grpo_advantages(rewards, group_ids, valid=valid), valid=valid, eps=eps)


def lite_ppo_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """Lite PPO: ``(r_i - mean_group) / (std_batch + eps)``, the (population) deviation of all valid rewards.

    With the deviation of the *centred* rewards it is ``reinforce_pp_baseline_advantages``.

    From "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", arXiv:2508.08221, section 4. Differs from
    the paper in saying which deviation: of the rewards themselves, as its text reads.

    >>> import jax.numpy as jnp
    >>> a = lite_ppo_advantages(jnp.array([1.0, 0, 1, 1]), jnp.array([0, 0, 1, 1]), eps=0.0)
    >>> [round(float(x), 4) for x in a]
    [1.1547, -1.1547, 0.0, 0.0]
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    whole = jnp.zeros(rewards.shape, jnp.int32)
    shifted = from_lowest(rewards, whole, valid=valid)
    _, mean = _count_and_mean(shifted, whole, valid)
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    variance = jnp.sum(jnp.where(valid, shifted - mean, 0.0) ** 2) / count
    usable = variance > 0
    deviation = jnp.sqrt(jnp.where(usable, variance, 1.0))
    return jnp.where(usable, dr_grpo_advantages(rewards, group_ids, valid=valid) / (deviation + eps), 0.0)


def pass_at_k_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    k: int,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """Advantages of pass@k training, analytically over all k-subsets of a group (binary rewards).

    With n members, w of them wrong: ``p = 1 - C(w, k) / C(n, k)`` is the mean group reward, ``s = sqrt(p (1 - p))``;
    a right member gets ``(1 - p) / s``, a wrong one ``(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s``.

    From "Pass@k Training for Adaptively Balancing Exploration and Exploitation", arXiv:2508.10751, eqs. 11 to 15.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    valid = _valid(rewards, valid)
    right = valid & (rewards > 0.5)
    n = group_sum(valid.astype(jnp.float32), group_ids)
    wrong = n - group_sum(right.astype(jnp.float32), group_ids)

    def chance(bad: Array, all_: Array, draws: int) -> Array:
        """``C(bad, draws) / C(all, draws)``."""
        out = jnp.ones(rewards.shape, jnp.float32)
        for i in range(draws):
            out = out * jnp.maximum(bad - i, 0.0) / jnp.maximum(all_ - i, 1.0)
        return out

    mean = 1.0 - chance(wrong, n, k)
    spread = jnp.sqrt(jnp.maximum(mean * (1.0 - mean), 0.0))
    wrong_value = 1.0 - mean - chance(wrong - 1.0, n - 1.0, k - 1)
    value = jnp.where(right, 1.0 - mean, wrong_value) / (spread + eps)
    return jnp.where(valid & (spread > 0), value, 0.0)


def best_minus_second_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    std: bool = True,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """Pass@k: the group's best response gets ``(r_max - r_second) / (std_group + eps)``, all others 0.

    What the best of the group's k responses would lose without it. Where two are best nobody gets anything, nor does a
    group of one.

    Args:
      std: divide by the sample standard deviation.

    From "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", arXiv:2503.19595, as
    in verl (``grpo_passk``).

    >>> import jax.numpy as jnp
    >>> best_minus_second_advantages(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 0]), std=False).tolist()
    [1.0, 0.0, 0.0]
    """
    valid, size = _valid(rewards, valid), rewards.shape[0]
    rewards = from_lowest(rewards, group_ids, valid=valid)

    def most(values):
        return jax.ops.segment_max(values, group_ids, num_segments=size)[group_ids]

    best = valid & (rewards == most(jnp.where(valid, rewards, -jnp.inf)))
    second = most(jnp.where(valid & ~best, rewards, -jnp.inf))
    usable = best & (group_sum(best.astype(jnp.float32), group_ids) == 1) & jnp.isfinite(second)
    value = jnp.where(usable, rewards - jnp.where(usable, second, 0.0), 0.0)
    if not std:
        return value
    count, mean = _count_and_mean(rewards, group_ids, valid)
    squares = group_sum(jnp.where(valid, rewards - mean, 0.0) ** 2, group_ids)
    return value / (jnp.sqrt(jnp.where(usable, squares / jnp.maximum(count - 1.0, 1.0), 1.0)) + eps)


def _root(squares: Array) -> Array:
    """The square root, whose gradient at 0 is 0."""
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)


class RewardStatistics(NamedTuple):
    """Of all earlier steps of each sequence's prompt: how many, and the mean and deviation of its rewards over them."""

    steps: Float[Array, " B"]
    mean: Float[Array, " B"]
    deviation: Float[Array, " B"]


def smoothed_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    earlier: RewardStatistics,
    *,
    valid: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, " B"], RewardStatistics]:
    """DCPO: rewards standardised by this step's group and by all steps of the prompt, the smaller of two blends.

    With ``i`` steps so far (this one counted), ``N`` the group's standardised reward and ``O`` that of all steps:
    ``A = ((i - 1) N + O) / i`` or ``(N + (i - 1) O) / i``, whichever is nearer to 0. A group of equal rewards still
    trains where the prompt's earlier ones differed. Deviations of 0 standardise to 0. Returns the new statistics too.

    From "DCPO: Dynamic Clipping Policy Optimization", arXiv:2509.02333, section 3.2, and its released code (the
    deviation over steps: ``s^2 <- ((i-1) s_old^2 + s_new^2 + (i-1)/i (m_new - m_old)^2) / i``).

    >>> import jax.numpy as jnp
    >>> earlier = RewardStatistics(jnp.ones(2), jnp.full(2, 0.5), jnp.full(2, 0.5))
    >>> a, now = smoothed_advantages(jnp.array([1.0, 1.0]), jnp.array([0, 0]), earlier)
    >>> round(float(a[0]), 4), float(now.mean[0])  # N = 0, O = 0.25 / sqrt(0.1875); half of it
    (0.2887, 0.75)
    """
    valid, rewards = _valid(rewards, valid), rewards.astype(jnp.float32)
    lifted = from_lowest(rewards, group_ids, valid=valid)
    count, mean_lifted = _count_and_mean(lifted, group_ids, valid)
    centred = jnp.where(valid, lifted - mean_lifted, 0.0)
    squares = group_sum(centred**2, group_ids) / jnp.maximum(count - 1.0, 1.0)
    spread = _root(squares)
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group_ids, num_segments=rewards.shape[0])[group_ids]
    mean = jnp.where(jnp.isfinite(low), low, 0.0) + mean_lifted
    before, old_mean, old = (x.astype(jnp.float32) for x in earlier)
    now = before + 1.0
    whole = (before * old_mean + mean) / now
    variance = (before * old**2 + spread**2 + before / now * jnp.where(before > 0, mean - old_mean, 0.0) ** 2) / now
    deviation = _root(variance)

    def standardised(distance: Array, by: Array) -> Array:
        return jnp.where(by > 0, distance / jnp.where(by > 0, by, 1.0), 0.0)

    new, all_ = standardised(centred, spread), standardised(jnp.where(valid, rewards, whole) - whole, deviation)
    blends = ((before * new + all_) / now, (new + before * all_) / now)
    value = jnp.where(jnp.abs(blends[0]) < jnp.abs(blends[1]), *blends)
    judged = count > 0  # a group that nobody could judge has had no step
    kept = (jnp.where(judged, *x) for x in ((now, before), (whole, old_mean), (deviation, old)))
    return jnp.where(valid, value, 0.0), RewardStatistics(*kept)


def hardness_weighted_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    slope: float = -0.256,
    constant: float = 1.256,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """``(R_i - mu) (slope mu + constant)`` with ``R = 2 r - 1`` and ``mu`` the group's mean: hard groups count more.

    The weight is 1 where all are right, 1.256 at one half and 1.512 where all are wrong. ``slope=0`` and
    ``constant=0.5`` give ``dr_grpo_advantages``.

    Args:
      rewards: 1 for right, 0 for wrong.

    From "Confucius3-Math: A Lightweight High-Performance Reasoning LLM for Chinese K-12 Mathematics Learning",
    arXiv:2506.18330, section 3.3 (policy-specific hardness weighting).

    >>> import jax.numpy as jnp
    >>> a = hardness_weighted_advantages(jnp.array([1.0, 0, 0, 0, 0, 0, 0, 0]), jnp.zeros(8, int))
    >>> [round(float(x), 3) for x in a[:2]]
    [2.534, -0.362]
    """
    valid = _valid(rewards, valid)
    signed = jnp.where(valid, 2.0 * rewards.astype(jnp.float32) - 1.0, 0.0)
    _, mean = _count_and_mean(signed, group_ids, valid)
    usable = valid & (group_spread(signed, group_ids, valid=valid) > 0)
    return jnp.where(usable, (signed - mean) * (slope * mean + constant), 0.0)


def per_label_advantages(
    labels: Float[Array, "B K"],
    group_ids: Int[Array, " B"],
    weights: Float[Array, " K"],
    *,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """``sum_k w_k A_k``: each label normalised within the group before it is weighed, so that none drowns the others.

    With one label the same as ``group_normalized_advantages``. Normalising ``sum_k w_k labels_k`` instead is what the
    paper does; the two part where labels differ in spread.

    From "Optimizing Safe and Aligned Language Generation: A Multi-Objective GRPO Approach", arXiv:2503.21819.

    >>> import jax.numpy as jnp
    >>> labels, ids = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([0, 0])
    >>> per_label_advantages(labels, ids, jnp.array([0.5, 0.5])).tolist()
    [0.0, 0.0]
    """
    return _weighed_apart(labels, group_ids, weights, [valid] * labels.shape[1], eps)


def _weighed_apart(labels: Array, group_ids: Array, weights: Array, valid: Sequence[Array | None], eps: float) -> Array:
    """The weighted sum of columns that are normalised within the group, each over the rows where it is ``valid``."""
    columns = [
        weights[k].astype(jnp.float32) * group_normalized_advantages(labels[:, k], group_ids, valid=own, eps=eps)
        for k, own in enumerate(valid)
    ]
    return sum(columns[1:], columns[0])


def gdpo_advantages(
    reward_parts: Float[Array, "B K"],
    group_ids: Int[Array, " B"],
    reward_weights: Float[Array, " K"],
    *,
    valid: Bool[Array, " B"] | None = None,
    eps: float = 1e-4,
) -> Float[Array, " B"]:
    """GDPO: each reward normalised within the group, their weighted sum over the whole batch.

    ``S_i = sum_k w_k (r_ik - mean_group r_k) / (std_group r_k + eps)``, ``A_i = (S_i - mean_batch S) / (std_batch S +
    eps)``; sample standard deviations. Responses of equal sums that earned different rewards keep apart, where their
    rewards differ in spread. The second step looks at all groups of a step at once.

    Args:
      reward_parts: NaN where a reward does not apply to a response: it is left out of mean, deviation and sum.
      reward_weights: of the rewards, after they are normalised.
      valid: responses that count.

    From "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    arXiv:2601.05242, as in TRL (``multi_objective_aggregation="normalize_then_sum"``).

    >>> import jax.numpy as jnp
    >>> parts, ids = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), jnp.array([0, 0, 0])
    >>> [round(float(x), 4) for x in gdpo_advantages(parts, ids, jnp.array([2.0, 1.0]), eps=0.0)]
    [1.0, 0.0, -1.0]
    """
    valid = _valid(reward_parts[:, 0], valid)
    applies = jnp.isfinite(reward_parts) & valid[:, None]
    kept = jnp.where(applies, reward_parts, 0.0).astype(jnp.float32)
    total = _weighed_apart(kept, group_ids, reward_weights, list(applies.T), eps)
    return group_normalized_advantages(total, jnp.zeros(total.shape, jnp.int32), valid=valid, eps=eps)


def mean_within(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    low: float,
    high: float,
    valid: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
    """Which sequences belong to a group whose mean reward lies in ``[low, high]``: ``low=0, high=1`` keeps all.

    Balanced online difficulty filtering, arXiv:2504.03380, section 3.2.
    """
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    valid = _valid(rewards, valid)
    _, mean = _count_and_mean(rewards.astype(jnp.float32), group_ids, valid)
    return (mean >= low) & (mean <= high)
