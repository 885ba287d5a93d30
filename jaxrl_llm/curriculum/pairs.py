"""Preference pairs out of several responses to each prompt: by scores, by levels, by rankings that agree."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Key


def _highest(scores: Array) -> Array:
    return jnp.argmax(scores, axis=1).astype(jnp.int32)


def best_and_worst(
    scores: Float[Array, "P K"], key: Key | None = None
) -> tuple[Int[Array, " P"], Int[Array, " P"], Bool[Array, " P"]]:
    """``(chosen, rejected, kept)``: highest and lowest score, the first of equals; not kept where all are equal.

    From "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863, section 3.2 (``max_min``).

    >>> best_and_worst(jnp.array([[0.2, 1.5, -0.3, 0.9], [1.0, 1.0, 1.0, 1.0]]))[0].tolist()
    [1, 0]
    """
    chosen, rejected = _highest(scores), _highest(-scores)
    return chosen, rejected, jnp.max(scores, axis=1) > jnp.min(scores, axis=1)


def best_and_second(
    scores: Float[Array, "P K"], key: Key | None = None
) -> tuple[Int[Array, " P"], Int[Array, " P"], Bool[Array, " P"]]:
    """``(chosen, rejected, kept)``: highest and second highest (``max_max``), as ``best_and_worst`` otherwise.

    >>> [int(x[0]) for x in best_and_second(jnp.array([[0.2, 1.5, -0.3, 0.9]]))]
    [1, 3, 1]
    """
    chosen = _highest(scores)
    first = jnp.arange(scores.shape[1])[None, :] == chosen[:, None]
    second = _highest(jnp.where(first, -jnp.inf, scores))
    return chosen, second, jnp.max(scores, axis=1) > jnp.take_along_axis(scores, second[:, None], axis=1)[:, 0]


def best_and_random(
    scores: Float[Array, "P K"], key: Key
) -> tuple[Int[Array, " P"], Int[Array, " P"], Bool[Array, " P"]]:
    """``(chosen, rejected, kept)``: the highest against any other one (``max_random``); not kept where they tie."""
    chosen = _highest(scores)
    step = jax.random.randint(key, chosen.shape, 1, scores.shape[1], jnp.int32)
    other = (chosen + step) % scores.shape[1]
    gap = jnp.max(scores, axis=1) - jnp.take_along_axis(scores, other[:, None], axis=1)[:, 0]
    return chosen, other, gap > 0


def any_two(scores: Float[Array, "P K"], key: Key) -> tuple[Int[Array, " P"], Int[Array, " P"], Bool[Array, " P"]]:
    """``(chosen, rejected, kept)``: two distinct responses at random, the better one chosen; ties are not kept."""
    keys, width = jax.random.split(key), scores.shape[1]
    first = jax.random.randint(keys[0], scores.shape[:1], 0, width, jnp.int32)
    second = (first + jax.random.randint(keys[1], scores.shape[:1], 1, width, jnp.int32)) % width
    a, b = (jnp.take_along_axis(scores, x[:, None], axis=1)[:, 0] for x in (first, second))
    return jnp.where(a >= b, first, second), jnp.where(a >= b, second, first), a != b


def round_robin_wins(probability: Float[Array, "P K K"]) -> Float[Array, "P K"]:
    """How many of the others each response beats, ``probability[p, i, j] = P(i over j)``; the diagonal is left out.

    Both orders are averaged: ``(p_ij + 1 - p_ji) / 2``.

    >>> round_robin_wins(jnp.array([[[0.5, 0.9], [0.3, 0.5]]]))[0].tolist()
    [1.0, 0.0]
    """
    both = 0.5 * (probability + 1.0 - jnp.swapaxes(probability, 1, 2))
    off = ~jnp.eye(probability.shape[1], dtype=bool)[None]
    return jnp.sum((off & (both > 0.5)).astype(jnp.float32), axis=2)


def pick(responses: Int[Array, "P K T"], index: Int[Array, " P"]) -> Int[Array, "P T"]:
    """The response of each prompt at ``index``."""
    return jnp.take_along_axis(responses, index[:, None, None], axis=1)[:, 0]


def level_pairs(levels: Int[Array, " B"], group_ids: Int[Array, " B"]) -> Bool[Array, "B B"]:
    """``[i, j]``: same prompt, and response ``i`` is of a better (lower) level than ``j``."""
    return (group_ids[:, None] == group_ids[None, :]) & (levels[:, None] < levels[None, :])


def two_level_pairs(levels: Int[Array, " B"], group_ids: Int[Array, " B"]) -> Bool[Array, "B B"]:
    """Level 1 against all others."""
    return level_pairs(jnp.minimum(levels, 2), group_ids)


def extreme_pairs(levels: Int[Array, " B"], group_ids: Int[Array, " B"]) -> Bool[Array, "B B"]:
    """One pair a prompt: the first of its best against the first of its worst, where they differ.

    >>> import jax.numpy as jnp
    >>> jnp.argwhere(extreme_pairs(jnp.array([2, 1, 1, 4]), jnp.zeros(4, jnp.int32))).tolist()
    [[1, 3]]
    """
    size = levels.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)

    def first(wanted):
        found = jax.ops.segment_min(jnp.where(wanted, place, size), group_ids, num_segments=size)
        return place == found[group_ids]

    best = jax.ops.segment_min(levels, group_ids, num_segments=size)[group_ids]
    worst = jax.ops.segment_max(levels, group_ids, num_segments=size)[group_ids]
    return level_pairs(levels, group_ids) & first(levels == best)[:, None] & first(levels == worst)[None, :]


def common_order(order: Int[Array, "P K"], other: Int[Array, "P K"]) -> Bool[Array, "P K"]:
    """Which places of ``order`` belong to its longest common subsequence with ``other``, both permutations.

    Of several longest ones that which keeps the earliest places of ``order``. For at most 8 items.

    From "CycleAlign", arXiv:2310.16271, section 3.2 (agreement ranking). Differs from the paper in that the rule for
    ties is a reconstruction.

    >>> import jax.numpy as jnp
    >>> common_order(jnp.array([[3, 1, 2, 4]]) - 1, jnp.array([[1, 3, 2, 4]]) - 1).tolist()
    [[True, False, True, True]]
    """
    size = order.shape[1]
    if size > 8:
        raise ValueError(f"K={size} responses; common_order tries all subsets, at most 8")
    place = jnp.take_along_axis(jnp.argsort(other, axis=1), order, axis=1)  # where other has what order has
    masks = jnp.arange(2**size)[:, None]
    # the bit of the first place is the highest, so that among equals the largest number keeps the earliest places
    subsets = (masks >> jnp.arange(size - 1, -1, -1)[None, :]) & 1 == 1
    before = jnp.arange(size)[:, None] < jnp.arange(size)[None, :]
    falls = before[None] & (place[:, :, None] > place[:, None, :])
    both = subsets[:, :, None] & subsets[:, None, :]
    broken = jnp.any(falls[:, None] & both[None], axis=(2, 3))
    score = jnp.sum(subsets.astype(jnp.int32), axis=1) * 2**size + masks[:, 0]
    best = jnp.argmax(jnp.where(broken, -1, score[None, :]), axis=1)
    return subsets[best]
