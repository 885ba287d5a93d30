"""Batches filled with groups that pass a filter: what passes waits in a pool until a whole batch is there.

With static shapes a batch cannot be drawn "until enough groups pass". Instead every iteration rolls out as many groups
as a batch holds; those that pass join the pool, and the policy is updated in the iteration that completes a batch.
Between two updates the policy does not change, so all groups of a batch are from the policy that they train. What is
left over after an update is dropped (``dropped``), or begins the next batch (``recovered``), then one policy behind.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from jaxrl_llm.types import Batch, Metrics, Params, Rewards, TrainState, Trajectories, declared

POOL = "pool"  # its name in ``state.extras``


class Pool(NamedTuple):
    """As many rows as a batch has; ``kept`` is True for the groups that wait, the others are filling."""

    trajectories: Trajectories
    rewards: Rewards
    kept: Bool[Array, " B"]


def empty_pool(rows: int, width: int) -> Pool:
    """A pool of ``rows`` sequences (prompts times group size) of ``width`` columns, nothing in it."""
    grid, line = jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows,), jnp.int32)
    logp = jnp.zeros((rows, width), jnp.float32)
    trajectories = Trajectories(grid, grid, grid, grid > 0, logp, line > 0, line, line)
    return Pool(trajectories, Rewards(line.astype(jnp.float32), line > 0), line > 0)


def dropped(rest: Pool) -> Pool:
    """What is left over after an update is forgotten."""
    return rest._replace(kept=jnp.zeros_like(rest.kept))


def recovered(rest: Pool) -> Pool:
    """Recent sample recovery: what is left over begins the next batch; it trains once, one update late.

    From "Confucius3-Math: A Lightweight High-Performance Reasoning LLM for Chinese K-12 Mathematics Learning",
    arXiv:2506.18330, section 3.2. As there, the step that the policy has gone on since is not corrected for.
    """
    return rest


def fill(pool: Pool, trajectories: Trajectories, rewards: Rewards, keep: Bool[Array, " B"], group_size: int) -> Pool:
    """The first batch of ``arranged``: waiting groups first, then the fresh ones that ``keep`` names."""
    return arranged(pool, trajectories, rewards, keep, group_size)[0]


def arranged(
    pool: Pool, trajectories: Trajectories, rewards: Rewards, keep: Bool[Array, " B"], group_size: int
) -> tuple[Pool, Pool]:
    """Waiting groups first, then the fresh ones that ``keep`` names, cut into two batches; groups are numbered anew.

    Args:
      trajectories: groups of ``group_size`` rows side by side, as many rows as the pool.
      keep: the same for all rows of a group.

    Raises:
      ValueError: when the rows do not match the pool, or are no whole groups.
    """
    rows = pool.kept.shape[0]
    if trajectories.tokens.shape != pool.trajectories.tokens.shape:
        raise ValueError(
            f"trajectories {trajectories.tokens.shape} do not match the pool {pool.trajectories.tokens.shape}"
        )
    if rows % group_size:
        raise ValueError(f"group_size={group_size} does not divide the pool of {rows} rows")
    # what waits has no extras, and of several rewards their sum alone
    fresh = Pool(trajectories._replace(extras=pool.trajectories.extras), rewards._replace(parts=None), keep)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), pool, fresh)
    passed = jnp.all(both.kept.reshape(-1, group_size), axis=1)
    order, count = jnp.argsort(~passed, stable=True), rows // group_size
    ids = jnp.repeat(jnp.arange(count, dtype=jnp.int32), group_size, total_repeat_length=rows)

    def take(groups):
        chosen = (groups[:, None] * group_size + jnp.arange(group_size)[None, :]).reshape(-1)
        found = jax.tree.map(lambda x: x[chosen], both)
        return found._replace(trajectories=found.trajectories._replace(group_ids=ids))

    return take(order[:count]), take(order[count:])


class Passed(NamedTuple):
    """Extras of a batch: which of the fresh rows passed the filter."""

    kept: Bool[Array, " B"]


def make_refill(
    estimate: Callable[..., Batch],
    keep: Callable[[Trajectories, Rewards], Array],
    group_size: int,
    *,
    overflow: Callable[[Pool], Pool] = dropped,
) -> dict[str, Callable]:
    """The slots ``estimate`` and ``remember`` of an ``Online`` that trains on full batches of kept groups.

    While the batch is not full its mask is empty and the gradient 0: use ``skip_empty``. ``Passed`` among
    the batch's extras says which of the fresh rows passed. The stage's ``extras`` put ``empty_pool`` under ``POOL``.

    Args:
      estimate: as in ``make_estimate``; it sees the batch as if it had been rolled out at once.
      keep: ``(trajectories, rewards) -> bool [B]``, the same for all rows of a group.
      overflow: what becomes of kept groups beyond a full batch: ``dropped`` or ``recovered``.
    """

    def filled(extras, trajectories, rewards) -> tuple[Pool, Pool, Array, Array]:
        fresh = keep(trajectories, rewards)
        pool, rest = arranged(extras[POOL], trajectories, rewards, fresh, group_size)
        return pool, rest, jnp.all(pool.kept), fresh

    def refilled(params: Params, extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards) -> Batch:
        pool, _, full, fresh = filled(extras, trajectories, rewards)
        usable = pool.rewards._replace(valid=pool.rewards.valid & full)
        batch = estimate(params, extras, pool.trajectories, usable)
        return batch._replace(extras=batch.extras | Passed(fresh)._asdict())

    def remember(state: TrainState, batch: Batch, trajectories: Trajectories, rewards: Rewards) -> dict[str, Any]:
        pool, rest, full, _ = filled(state.extras, trajectories, rewards)
        after = jax.tree.map(lambda new, old: jnp.where(full, new, old), overflow(rest), pool)
        return state.extras | {POOL: after}

    return {"estimate": refilled, "remember": remember}


TRAINED = "refill/trained"  # whether the batch of a step was full


def filling(batch: Batch, metrics: Metrics) -> Metrics:
    """The ``figures`` of an ``Online`` with ``make_refill``: whether this step trained, and which share passed."""
    passed = declared(Passed, batch.extras).kept
    return {TRAINED: jnp.any(batch.mask).astype(jnp.float32), "refill/passed": jnp.mean(passed.astype(jnp.float32))}


def skip_empty(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` that rests where the whole gradient is exactly 0: parameters, moments and counts stay as they are.

    Without it Adam's momentum would move the parameters in an iteration that trains on nothing.
    """

    def update(grads, state, params=None):
        some = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(grads)]))
        updates, after = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: jnp.where(some, u, jnp.zeros_like(u)), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(some, new, old), after, state)

    return optax.GradientTransformation(tx.init, update)
