"""Which responses of a group train, and how often: filters by a reward model's score, by length, and their quality.

``scores [B]``, ``group_ids [B]`` in ``[0, B)``; invalid scores never train. Of equal scores the first is the best and
the last the worst, so that two of a group of equals are two different members.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import group_sum


def _all(values: Array, valid: Array | None) -> Array:
    return jnp.ones(values.shape, bool) if valid is None else valid


def best_members(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Bool[Array, " B"]:
    """The one member of each group with the highest score, the first of equals."""
    valid, size = _all(scores, valid), scores.shape[0]
    rows = jnp.arange(size, dtype=jnp.int32)
    high = jax.ops.segment_max(jnp.where(valid, scores, -jnp.inf), group_ids, num_segments=size)[group_ids]
    among = valid & (scores == high)
    first = jax.ops.segment_min(jnp.where(among, rows, size), group_ids, num_segments=size)[group_ids]
    return among & (rows == first)


def worst_members(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Bool[Array, " B"]:
    """The one member of each group with the lowest score, the last of equals."""
    valid = _all(scores, valid)
    backwards = best_members(-scores[::-1], group_ids[::-1], valid=valid[::-1])
    return backwards[::-1]


def best_weights(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """BoN: 1 for the best member of each group, 0 for the others."""
    return best_members(scores, group_ids, valid=valid).astype(jnp.float32)


def best_worst_weights(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """BW: 1 for the best and for the worst member of each group, 0 for the others; a group of one keeps it."""
    best, worst = (f(scores, group_ids, valid=valid) for f in (best_members, worst_members))
    return (best | worst).astype(jnp.float32)


def best_random_weights(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    best: float = 0.4,
    other: float = 0.1,
) -> Float[Array, " B"]:
    """BR: 0.4 for the best member of each group, 0.1 for every other: in expectation the best and one random.

    >>> import jax.numpy as jnp
    >>> w = best_random_weights(jnp.array([0.1, 0.9, 0.3, 0.2, 0.0]), jnp.zeros(5, jnp.int32))
    >>> [round(float(x), 4) for x in w / w.sum()]
    [0.125, 0.5, 0.125, 0.125, 0.125]
    """
    top = best_members(scores, group_ids, valid=valid)
    return jnp.where(_all(scores, valid), jnp.where(top, best, other), 0.0)


def power_weights(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    power: float = 2.0,
) -> Float[Array, " B"]:
    """``max(|score|^power, 1e-8)``: large scores of either sign, where a reward model is surest.

    >>> import jax.numpy as jnp
    >>> w = power_weights(jnp.array([0.9, -0.3, 0.1]), jnp.zeros(3, jnp.int32))
    >>> [round(float(x), 4) for x in w / w.sum()]
    [0.8901, 0.0989, 0.011]
    """
    size = jnp.maximum(jnp.abs(jnp.where(_all(scores, valid), scores.astype(jnp.float32), 0.0)) ** power, 1e-8)
    return jnp.where(_all(scores, valid), size, 0.0)


def exponential_weights(scores: Float[Array, " B"], *, temperature: float = 0.4) -> Float[Array, " B"]:
    """``exp(r / temperature)`` of each reward by itself: offline reward-weighted regression.

    Not normalised: with equal rewards all weights are the same, and not 1.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in exponential_weights(jnp.array([1.0, 0.5, 0.0]))]
    [12.1825, 3.4903, 1.0]
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; equal weights are selection.equal_weights")
    return jnp.exp(scores.astype(jnp.float32) / temperature)


def equal_weights(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> Float[Array, " B"]:
    """1 for every valid member: no filter."""
    return _all(scores, valid).astype(jnp.float32)


def expected_counts(weights: Float[Array, " B"]) -> Float[Array, " B"]:
    """How often each sequence occurs on average in a buffer of the same size drawn with replacement by weight.

    ``B w_i / sum(w)``; all 0 where no weight is positive. Losses times these are the expectation of ``resampled`` ones.

    From "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957, section 4.
    """
    weights = weights.astype(jnp.float32)
    return weights * weights.shape[0] / jnp.maximum(jnp.sum(weights), 1e-30)


def resampled(weights: Float[Array, " B"], uniforms: Float[Array, " B"]) -> Int[Array, " B"]:
    """Rows of a buffer drawn with replacement in proportion to ``weights``; ``uniforms`` are numbers in [0, 1).

    Where no weight is positive, the last row.

    >>> import jax.numpy as jnp
    >>> resampled(jnp.array([1.0, 0.0, 3.0]), jnp.array([0.1, 0.3, 0.9])).tolist()
    [0, 2, 2]
    """
    edges = jnp.cumsum(weights)
    found = jnp.searchsorted(edges, uniforms * edges[-1], side="right")
    return jnp.minimum(found, weights.shape[0] - 1).astype(jnp.int32)


def reliability(scores: Float[Array, " B"], truth: Float[Array, " B"], weights: Float[Array, " B"]) -> Float[Array, ""]:
    """R^2 of a reward model on what a filter keeps: the squared weighted Pearson correlation of score and truth.

    0 where either is constant. From arXiv:2409.06957, section 5: the filter with the highest R^2 is to be chosen.

    >>> import jax.numpy as jnp
    >>> r, y = jnp.array([0.1, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0])
    >>> round(float(reliability(r, y, jnp.ones(3))), 4)
    0.8176
    """
    scores, truth, weights = (x.astype(jnp.float32) for x in (scores, truth, weights))
    used = weights > 0
    share = weights / jnp.maximum(jnp.sum(weights), 1e-30)
    left, right = (jnp.where(used, x - jnp.sum(jnp.where(used, share * x, 0.0)), 0.0) for x in (scores, truth))
    covariance = jnp.sum(share * left * right)
    spread = jnp.sum(share * left**2) * jnp.sum(share * right**2)
    return jnp.where(spread > 1e-12, covariance**2 / jnp.maximum(spread, 1e-12), 0.0)


def shortest_right(
    length_tokens: Float[Array, " B"], right: Bool[Array, " B"], group_ids: Int[Array, " B"]
) -> Bool[Array, " B"]:
    """The shortest right response of each group: what "shortest rejection sampling" imitates; none where all are wrong.

    From "Kimi k1.5", arXiv:2501.12599, section 2.4.
    """
    return best_members(-length_tokens, group_ids, valid=right)


def longer_rejected(
    length_tokens: Float[Array, " B"],
    right: Bool[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    factor: float = 1.5,
) -> Bool[Array, " B"]:
    """The rejected responses of long2short preference pairs, whose chosen one is ``shortest_right``.

    Wrong responses longer than the chosen one, and right ones more than ``factor`` times as long.

    From "Kimi k1.5", arXiv:2501.12599, section 2.4.
    """
    length_tokens = length_tokens.astype(jnp.float32)
    chosen = shortest_right(length_tokens, right, group_ids)
    length = group_sum(jnp.where(chosen, length_tokens, 0.0), group_ids)
    exists = group_sum(chosen.astype(jnp.float32), group_ids) > 0
    return exists & ~chosen & (length_tokens > jnp.where(right, factor * length, length))
