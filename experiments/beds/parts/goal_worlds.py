"""Worlds of turns whose sub-goals are known, and how their training episodes are paid for them."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, retail
from experiments.beds.parts import rare_answers
from jaxrl_llm import reduce
from jaxrl_llm.advantages import turns
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

DENSE = "dense"  # beside a task's own answers: whether its sub-goals are paid
SAMPLES = 8  # of every held-out task


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """An arena, how many sub-goals hold in a state, and how many there are, the task itself the last of them."""

    arena: arenas.Arena
    reached: Callable[[Any], Array]
    goals: int


@lru_cache(maxsize=16)
def grid(side: int, places: int, turns: int, skies: int) -> World:
    """Errands on a square grid; every place is a sub-goal."""
    arena = errands.make_errands(side=side, places=places, turns=turns, skies=skies)
    return World(arena, lambda state: state.taken, places)


@lru_cache(maxsize=4)
def shop(side: int, places: int, turns: int, skies: int) -> World:
    """Users who hold back: learn which order, learn its price or the size, leave the right database, say good-bye.

    Args:
      side, places, skies: mean nothing here.
      turns: at most those of the shop, 7.
    """
    arena = arenas.shortened(retail.to_train(retail.make_retail()), min(turns, retail.TURNS))

    def reached(state: retail.Shop) -> Array:
        asked = state.told_order.astype(jnp.int32)
        known = jnp.where(state.cancel, state.looked, state.told_size).astype(jnp.int32)
        return asked + known + jnp.all(state.sizes == state.gold).astype(jnp.int32)

    return World(arena, reached, 4)


class Going(NamedTuple):
    """The state of a training episode: the world's, and whether sub-goals are paid."""

    inner: Any
    dense: Array


def paid_env(world: World) -> Env:
    """The world of training: a task with ``DENSE`` pays every sub-goal its share, any other the whole at the end.

    What is lost again is taken back, so that an episode is paid for the sub-goals that hold at its end, and 1 where
    the task is done: with either reward a success is worth as much.
    """
    env = world.arena.env

    def reset(key: Key, task: dict[str, Array]) -> Going:
        own = {name: value for name, value in task.items() if name != DENSE}
        return Going(env.reset(key, own), task[DENSE])

    def step(state: Going, action: Array, count: Array) -> Answered:
        answer = env.step(state.inner, action, count)
        done = answer.reward > 0.5
        before, after = (world.reached(x).astype(jnp.float32) for x in (state.inner, answer.state))
        progress = (jnp.where(done, float(world.goals), after) - before) / world.goals
        reward = jnp.where(state.dense, progress, done.astype(jnp.float32))
        return answer._replace(state=Going(answer.state, state.dense), reward=reward)

    return env._replace(reset=reset, step=step, identity=lambda state: env.identity(state.inner))


def paid_tasks(tasks: Problems, sparsity: float) -> Problems:
    """The tasks with ``DENSE``: false for a share ``sparsity`` of them, chosen by number."""
    luck = rare_answers.share(2, jnp.arange(tasks.tokens.shape[0], dtype=jnp.int32))
    return tasks._replace(answers=tasks.answers | {DENSE: luck >= sparsity})


@lru_cache(maxsize=16)
def to_train(world: World, sparsity: float) -> arenas.Arena:
    """The arena whose training tasks are paid so; what is held out stays as it was."""
    arena = world.arena
    return dataclasses.replace(arena, env=paid_env(world), train=paid_tasks(arena.train, sparsity))


def from_here_on(rows: Trajectories, rewards: Rewards) -> Array:
    """Advantages of tokens: what an episode earns from a turn on, normalised over the group's turns of that number.

    It is the episode's reward less what was paid before the turn, so that whoever changes the reward changes it.
    Where only the end pays it is GRPO, without the episodes that are over.
    """
    found = multi_turn.turns_of(rows)
    counted = found.taken & rewards.valid[:, None]
    paid = jnp.where(counted, found.reward, 0.0)
    still = rewards.value[:, None] - (jnp.cumsum(paid, axis=1) - paid)
    number = jnp.broadcast_to(jnp.arange(counted.shape[1], dtype=jnp.int32)[None, :], counted.shape)
    values = turns.anchor_advantages(still, number, rows.group_ids, counted)
    return multi_turn.over_turns(values, found, rows.mask)


def figures(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """Of ``SAMPLES`` episodes of every held-out task: ``episode_methods.figures`` and what a bed says more.

    ``eval/pass@8`` is the share of tasks that one of them solves, ``eval/shared`` the share of turns whose situation
    another turn of the same task met as well.
    """
    found, rewards = multi_turn.turns_of(rows), multi_turn.episode_rewards({}, rows)
    solved = jnp.sum((rewards.value > 0.5).astype(jnp.float32).reshape(-1, SAMPLES), axis=1)
    sizes = turns.anchor_sizes(found.identity, rows.group_ids, found.taken)
    shared = reduce.scalars((sizes > 1).astype(jnp.float32).reshape(-1), found.taken.reshape(-1))
    own = {f"eval/pass@{SAMPLES}": reduce.scalars((solved > 0).astype(jnp.float32)), "eval/shared": shared}
    return episode_methods.figures(rows) | own
