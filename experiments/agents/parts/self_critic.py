"""A stage of preferences that a policy makes itself: the better of its episodes against the worse, by its rewards."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from experiments.agents.parts import arena as arenas
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params, Policy, Rewards, Trajectories


class Preferred(NamedTuple):
    """Episodes of the same task, two and two; ``kept`` is False where the rewards are equal or invalid."""

    chosen: Trajectories
    rejected: Trajectories
    ref_chosen_logp: Float[Array, " P"]
    ref_rejected_logp: Float[Array, " P"]
    kept: Bool[Array, " P"]


def extremes(
    rows: Trajectories, rewards: Rewards, *, group_size: int, pairs: int = 1
) -> tuple[Trajectories, Trajectories, Array]:
    """``(chosen, rejected, kept)``: best and worst of each group of ``group_size`` rows side by side, then the second
    best and the second worst, and so on; of equal ones the earliest.

    From "Tool-Star", arXiv:2505.16410, appendix B.1.

    Raises:
      ValueError: for more pairs than a group has.
    """
    if not 1 <= pairs <= group_size // 2:
        raise ValueError(f"pairs={pairs} must lie in 1 .. {group_size // 2}, half of group_size={group_size}")
    value, valid = rewards.value.reshape(-1, group_size), rewards.valid.reshape(-1, group_size)
    best = jnp.where(valid, value, -jnp.inf)
    worst = jnp.where(valid, value, jnp.inf)
    first, last = (jnp.argsort(x, axis=1, stable=True)[:, :pairs].astype(jnp.int32) for x in (-best, worst))
    kept = jnp.take_along_axis(best, first, axis=1) > jnp.take_along_axis(worst, last, axis=1)
    start = jnp.arange(value.shape[0], dtype=jnp.int32)[:, None] * group_size
    chosen, rejected = (
        jax.tree.map(lambda x, i=i: x[i], rows) for i in ((start + k).reshape(-1) for k in (first, last))
    )
    return chosen, rejected, kept.reshape(-1)


def _sums(policy: Policy, params: Params, rows: Trajectories) -> Array:
    """Log-probability of what the policy wrote in each episode."""
    logp, _ = score_tokens(policy, params, rows)
    return jnp.sum(jnp.where(rows.mask, logp, 0.0), axis=1)


def make_stage(
    arena: arenas.Arena | episode_methods.HostTasks,
    score: Callable[..., Rewards],
    *,
    prompts: int,
    group_size: int,
    steps: int,
    rows_per_step: int,
    learning_rate: float,
    beta: float = 0.1,
    pairs: int = 1,
    rollout: Callable[..., Trajectories] | None = None,
    rows_at_once: int | None = None,
) -> Stage:
    """DPO on the extremes of ``prompts * group_size`` fresh episodes; the policy at its start is the reference.

    What tools say is outside the mask and in no log-probability.

    From "Tool-Star", arXiv:2505.16410, section 3.3 (self-critic).

    Args:
      pairs: of one task.
      rollout: of groups of ``group_size``; None: the arena's.
      rows_at_once: that the reference scores; None: all of them.
    """
    if rollout is None:
        rollout = arenas.arena_episodes(arena, arena.train, group_size=group_size)

    def referred(params: Params, rows: Trajectories) -> Array:
        if rows_at_once is None:
            return _sums(arena.policy, params, rows)
        few = partial(jax.jit(_sums, static_argnums=0), arena.policy, params)
        parts = range(0, rows.tokens.shape[0], rows_at_once)
        return jnp.concatenate([few(jax.tree.map(lambda x, k=k: x[k : k + rows_at_once], rows)) for k in parts])

    def make_rows(params: Params, key: Key) -> Preferred:
        draw, play = jax.random.split(key)
        ids = jax.random.permutation(draw, jnp.arange(arena.train.tokens.shape[0], dtype=jnp.int32))[:prompts]
        keys = sample_keys(play, 0, ids, group_size)
        rows = rollout(params, arena.train.tokens[ids], arena.train.valid[ids], keys, ids)
        answers = jax.tree.map(lambda x: x[rows.problem_ids], arena.train.answers)
        chosen, rejected, kept = extremes(rows, score(answers, rows), group_size=group_size, pairs=pairs)
        return Preferred(chosen, rejected, *(referred(params, x) for x in (chosen, rejected)), kept)

    def loss(params, extras, batch):
        chosen, rejected = (_sums(arena.policy, params, x) for x in (batch.chosen, batch.rejected))
        terms = dpo_loss(chosen, rejected, batch.ref_chosen_logp, batch.ref_rejected_logp, beta=beta)
        trained = [reduce.sequences(jnp.ones(x.mask.shape, jnp.float32), x.mask) for x in batch[:2]]
        return reduce.scalars(terms.loss, batch.kept), {
            "pair/kept": reduce.scalars(batch.kept.astype(jnp.float32)),
            "pair/accuracy": reduce.scalars(terms.aux["accuracy"], batch.kept),
            "tokens/trained": jnp.sum(jnp.where(batch.kept, trained[0] + trained[1], 0.0)),
        }

    return strings.table_stage(make_rows, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)
