"""Rewards without labels, from how far the answers of a group agree: clusters, semantic entropy, majority.

``group_ids [B]`` in ``[0, B)``; ``answered[b]`` is False where no answer could be read.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import group_sum


def same_values(values: Int[Array, " B"], answered: Bool[Array, " B"]) -> Bool[Array, "B B"]:
    """Which pairs gave the same whole number; who gave none agrees with nobody."""
    return (values[:, None] == values[None, :]) & answered[:, None] & answered[None, :]


def greedy_clusters(equivalent: Bool[Array, "B B"], group_ids: Int[Array, " B"]) -> Int[Array, " B"]:
    """The row that opened the cluster of each sequence.

    In order: a sequence without a cluster opens one and takes every later free sequence of its group that is
    equivalent *to it*; members are not compared among themselves, so equivalence need not be transitive.

    From "Right Question is Already Half the Answer: Fully Unsupervised LLM Reasoning Incentivization",
    arXiv:2504.05812, section 3.

    >>> import jax.numpy as jnp
    >>> values, told = jnp.array([7, 7, 3, 7]), jnp.array([True, True, True, True])
    >>> greedy_clusters(same_values(values, told), jnp.zeros(4, jnp.int32)).tolist()
    [0, 0, 2, 0]
    """
    rows = jnp.arange(group_ids.shape[0], dtype=jnp.int32)

    def visit(opener, i):
        opens = opener[i] == -1
        takes = (opener == -1) & (rows > i) & equivalent[i] & (group_ids == group_ids[i])
        return jnp.where(opens & (takes | (rows == i)), i, opener), None

    opener, _ = jax.lax.scan(visit, jnp.full(rows.shape, -1, jnp.int32), rows)
    return opener


def cluster_shares(clusters: Int[Array, " B"], group_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """Share of the group that lies in the cluster of each sequence."""
    ones = jnp.ones(clusters.shape, jnp.float32)
    return group_sum(ones, clusters) / group_sum(ones, group_ids)


def semantic_entropy(clusters: Int[Array, " B"], group_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """``-sum_c p_c log p_c`` over the clusters of the group of each sequence, in nats."""
    shares = cluster_shares(clusters, group_ids)
    size = group_sum(jnp.ones(clusters.shape, jnp.float32), group_ids)
    return group_sum(-jnp.log(shares), group_ids) / size


def empo_rewards(
    clusters: Int[Array, " B"], group_ids: Int[Array, " B"], answered: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """EMPO: the share of the group that gave the same answer; 0 without one, and for a group of all different answers.

    More mass for meanings that are already likely is the direction that lowers the semantic entropy.

    From arXiv:2504.05812, section 3, and its code for mathematics; the paper filters by thresholds of the semantic
    entropy besides, see ``entropy_within``.

    >>> import jax.numpy as jnp
    >>> clusters, ids, told = jnp.array([0, 0, 0, 3]), jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    >>> empo_rewards(clusters, ids, told).tolist(), round(float(semantic_entropy(clusters, ids)[0]), 4)
    ([0.75, 0.75, 0.75, 0.25], 0.5623)
    """
    size = group_sum(jnp.ones(clusters.shape, jnp.float32), group_ids)
    opened = (clusters == jnp.arange(clusters.shape[0], dtype=jnp.int32)).astype(jnp.float32)
    all_differ = group_sum(opened, group_ids) >= size
    return jnp.where(answered & ~all_differ, cluster_shares(clusters, group_ids), 0.0)


def entropy_within(
    clusters: Int[Array, " B"], group_ids: Int[Array, " B"], *, low: float, high: float
) -> Bool[Array, " B"]:
    """Which sequences belong to a group whose semantic entropy lies strictly between ``low`` and ``high`` nats."""
    if low >= high:
        raise ValueError(f"low={low} must be below high={high}, both in nats")
    entropy = semantic_entropy(clusters, group_ids)
    return (entropy > low) & (entropy < high)


def majority_rewards(
    clusters: Int[Array, " B"], group_ids: Int[Array, " B"], answered: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """1 for the members of the largest cluster of answers of a group (the one opened first among equals), else 0.

    From "TTRL: Test-Time Reinforcement Learning", arXiv:2504.16084, section 2.
    """
    size = clusters.shape[0]
    shares = jnp.where(answered, cluster_shares(clusters, group_ids), 0.0)
    best = jax.ops.segment_max(shares, group_ids, num_segments=size)[group_ids]
    first = jax.ops.segment_min(jnp.where(shares == best, clusters, size), group_ids, num_segments=size)[group_ids]
    return (answered & (clusters == first)).astype(jnp.float32)
