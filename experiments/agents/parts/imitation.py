"""Stages of imitation in an arena: episodes that its behaviour plays, or the policy's own that pass a test."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from experiments.agents.parts import arena as arenas
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params, Policy, Trajectories


class Shown(NamedTuple):
    """Episodes to imitate; ``share`` of those that were played passed, and where none did nothing is imitated."""

    rows: Trajectories
    share: Float[Array, " N"]  # equal everywhere


def passing(rows: Trajectories, passed: Bool[Array, " N"]) -> Shown:
    """As many rows as before, all of them such as passed: these in turn, again and again.

    A uniform draw is then one of those that passed, and shapes do not depend on how many there are.
    """
    order, count = jnp.argsort(~passed, stable=True), jnp.sum(passed.astype(jnp.int32))
    index = order[jnp.arange(passed.shape[0], dtype=jnp.int32) % jnp.maximum(count, 1)]
    share = jnp.broadcast_to(reduce.scalars(passed.astype(jnp.float32)), passed.shape)
    return Shown(jax.tree.map(lambda x: x[index], rows), share)


def make_loss(policy: Policy) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """``(params, extras, Shown) -> (value, metrics)``: token mean of the negative log-likelihood of what was chosen."""

    def loss(params, extras, batch):
        logp, _ = score_tokens(policy, params, batch.rows)
        mask = batch.rows.mask & (batch.share > 0)[:, None]
        shown = {"rows/passed": reduce.scalars(batch.share), "tokens/trained": jnp.sum(mask.astype(jnp.float32))}
        return reduce.tokens(sft_loss(logp, mask).loss, mask), shown

    return loss


def behaviour_stage(
    arena: arenas.Arena, *, steps: int, learning_rate: float, table: int = 1024, rows_per_step: int = 64
) -> Stage:
    """Supervised fine-tuning: ``table`` fresh episodes of the behaviour that the base has already imitated."""

    def make_rows(params: Params, key: Key) -> Shown:
        return Shown(arenas.play(arena, key, table), jnp.ones((table,), jnp.float32))

    sizes = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return strings.table_stage(make_rows, make_loss(arena.policy), **sizes)


def rejection_stage(
    arena: arenas.Arena, settings: Any, passes: Callable[[multi_turn.Turns], Array], *, updates: int = 1
) -> Stage:
    """Rejection sampling: the policy of then plays what an online stage would play, and imitates what passes.

    All episodes are drawn first, ``steps * prompts_per_step * group_size`` of them; then come as many updates as the
    online stage has, each on as many rows. A step of this stage is one update.

    Args:
      settings: ``steps``, ``prompts_per_step``, ``group_size`` and ``learning_rate`` of the online stage.
      passes: ``turns -> bool [N]``; episodes in which the world failed never do.
      updates: of the online stage after each rollout.
    """
    if updates < 1:
        raise ValueError(f"updates={updates} must be at least 1 for each rollout of the online stage")
    prompts, size = settings.steps * settings.prompts_per_step, settings.group_size
    rollout = arenas.arena_episodes(arena, arena.train, group_size=size)

    def make_rows(params: Params, key: Key) -> Shown:
        draw, play = jax.random.split(key)
        every = jnp.arange(prompts, dtype=jnp.int32)
        tasks = jax.random.permutation(draw, jnp.arange(arena.train.tokens.shape[0], dtype=jnp.int32))
        ids = tasks[every % tasks.shape[0]]  # where tasks are fewer, over again
        # a task that comes again is played anew: the keys are those of the places
        keys = sample_keys(play, 0, every, size)
        rows = rollout(params, arena.train.tokens[ids], arena.train.valid[ids], keys, ids)
        turns = multi_turn.turns_of(rows)
        return passing(rows, passes(turns) & turns.valid)

    return strings.table_stage(
        make_rows, make_loss(arena.policy), steps=settings.steps * updates,
        rows_per_step=settings.prompts_per_step * size, learning_rate=settings.learning_rate,
    )  # fmt: skip
