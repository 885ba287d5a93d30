"""Groups whose size depends on their answers, in pools of a fixed capacity."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.experiment.curricula import train_score
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.rollout import rollout_cost
from jaxrl_llm.types import Batch, Rewards, Trajectories


def make_pool_rollout(
    rollout: Callable[..., Trajectories],
    found: Bench,
    *,
    capacity: int,
    drawn: Callable[[Array], Array],
) -> dict[str, Callable]:
    """Slots ``rollout`` and ``score`` of ``Online`` for groups whose size depends on the answers.

    ``capacity`` responses to each prompt are sampled, so that shapes stay fixed; those that a sampler working in rounds
    would never have drawn get an empty mask and an invalid reward: no figure and no loss counts them.

    Args:
      rollout: makes groups of ``capacity``.
      drawn: ``right [P, C] -> bool [P, C]``, for example a partial of ``advantages.pools.rounds_drawn``.
    """
    judge = train_score(found)

    def pooled(params, tokens, valid, keys, problem_ids):
        rows = rollout(params, tokens, valid, keys, problem_ids)
        rewards = judge(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
        real = drawn((rewards.value > 0.5).reshape(-1, capacity)).reshape(-1)
        rows = rows._replace(
            mask=rows.mask & real[:, None],
            sampler_logp=jnp.where(real[:, None], rows.sampler_logp, 0.0),
            truncated=rows.truncated & real,
        )
        return rollout_cost.with_cost(rows, real.astype(jnp.float32), rollout_cost.response_tokens(rows))

    def score(answers, trajectories):
        rewards = judge(answers, trajectories)
        return Rewards(rewards.value, rewards.valid & jnp.any(trajectories.mask, axis=1))

    return {"rollout": pooled, "score": score}


def keep_members(batch: Batch, keep: Array, size: int) -> Batch:
    """The batch with ``size`` rows of each pool, the kept ones first: what trains is not paid for by what does not.

    Args:
      keep: bool ``[P, C]``, at most ``size`` true in a row; rows beyond them keep their empty mask.
    """
    pools, capacity = keep.shape
    order = jnp.argsort(~keep, axis=1, stable=True)[:, :size]
    rows = (order + capacity * jnp.arange(pools, dtype=jnp.int32)[:, None]).reshape(-1)
    mask = batch.mask & keep.reshape(-1)[:, None]
    batch = batch._replace(mask=mask, advantages=jnp.where(mask, batch.advantages, 0.0))
    total = batch.total
    taken = jax.tree.map(lambda x: x[rows] if x.ndim else x, batch)
    # ids must lie below the number of rows that are left: number the pools anew
    return taken._replace(group_ids=jnp.repeat(jnp.arange(pools, dtype=jnp.int32), size), total=total)
