"""Rollouts during which the weights are swapped: tokens of one sequence come from several versions of the policy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.types import Batch, Policy, Rewards, Trajectories

STALENESS = "staleness"  # its name in the ``extras`` of a rollout


def in_even_parts(column: Int[Array, "*axes"], *, first: int, columns: int, versions: int) -> Int[Array, "*axes"]:
    """The version that writes a column: the first to the last for equal numbers of the ``columns`` from ``first`` on.

    >>> import jax.numpy as jnp
    >>> in_even_parts(jnp.arange(9, dtype=jnp.int32), first=2, columns=6, versions=3).tolist()
    [0, 0, 0, 0, 1, 1, 2, 2, 2]
    """
    return jnp.clip((column - first) * versions // columns, 0, versions - 1)


def swapping_policy(policy: Policy, version_of: Callable[[Array], Array]) -> Policy:
    """For rollouts: leaves of the parameters have a leading axis of versions, a column is drawn from ``version_of`` it.

    From "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning", arXiv:2505.24298
    (interruptible rollout workers). Differs from the paper in that keys and values from before a swap stay
    in the cache; there they are computed anew. The recorded log-probabilities are those of the draw in both.

    Args:
      version_of: ``(column) -> version``, of the column of the cache for which a token is drawn.
    """

    def extend(versions: Any, cache: Any, tokens: Array, positions: Array, segment_ids: Array, column: Any) -> Any:
        number = version_of(jnp.asarray(column, jnp.int32) + jnp.int32(tokens.shape[1]))
        params = jax.tree.map(lambda x: x[number], versions)
        hidden, cache = policy.extend(params, cache, tokens, positions, segment_ids, column)
        return policy.unembed(params, hidden), cache  # here the version is still known

    replaced = {"extend": extend, "unembed": lambda versions, logits: logits}
    return policy._replace(**replaced, scored=None, hidden_groups=None, unstack=None)


def with_staleness(rows: Trajectories, version_of: Callable[[Array], Array], newest: int) -> Trajectories:
    """Each token with the number of updates by which its weights are older than the ``newest``; 0 outside the mask."""
    column = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    behind = (newest - version_of(column)).astype(jnp.float32)
    return rows._replace(extras=rows.extras | {STALENESS: jnp.where(rows.mask, behind[None, :], 0.0)})


def noted(behind: int) -> Callable[[Any, Trajectories, Rewards], dict[str, Array]]:
    """The ``row_extras`` of an estimate: what ``with_staleness`` noted; rollouts without a note are ``behind``."""

    def staleness(extras: Any, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
        if STALENESS in rows.extras:
            return {STALENESS: rows.extras[STALENESS]}
        return {STALENESS: jnp.where(rows.mask, jnp.float32(behind), 0.0)}

    return staleness


def shown(logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
    """The ``diagnostics`` of a loss: ``policy/staleness``, of what ``noted`` says."""
    return {f"policy/{STALENESS}": batch.extras[STALENESS]}
