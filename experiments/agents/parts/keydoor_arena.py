"""Corridors of the key-door world as an arena: an alphabet of its own and a clumsy walker to imitate."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts import keydoor, keydoor_grid
from experiments.agents.parts.arena import Arena, skilled
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.rollout.turns.multi_turn import Turns, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

ALPHABET = "_kd .AHKDlrupo/;=>"  # the first is padding
CELLS = 6
SUBGOALS = 4  # stand on the key, hold it, hold it beside the door, open the door
HELDOUT_SHARE = 0.25  # there are few corridors: more of them are kept apart than of larger tasks


def encode(text: str) -> list[int]:
    """One token a character.

    >>> encode("kd .")
    [1, 2, 3, 4]
    """
    return [ALPHABET.index(c) for c in text]


def corridors(cells: int) -> list[Problem]:
    """Every corridor of so many cells, in an order that mixes them.

    >>> len(corridors(4)), corridors(4)[0].prompt
    (12, 'kd .AKD=>')
    """
    found = []
    for door in (0, cells - 1):
        free = [c for c in range(cells) if c != door]
        for agent in free:
            for key in (c for c in free if c != agent):
                names = {agent: "A", key: "K", door: "D"}
                world = "".join(names.get(c, ".") for c in range(cells))
                prompt = f"kd {world}=>"
                found.append(Problem("keydoor", prompt, "", {"world": world}, cells, prompt))
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def table(problems: list[Problem]) -> Problems:
    """The rows of corridors of equal size."""
    tokens = jnp.asarray([encode(p.prompt) for p in problems], jnp.int32)
    answers = {name: jnp.asarray(x) for name, x in keydoor.tasks(problems).items()}
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, jnp.zeros((len(problems),), jnp.int32))


def walk(place: keydoor.Place, cells: int) -> Int[Array, ""]:
    """The token of the action of a shortest plan: to the key, pick it up, to the door, open it."""
    goal = jnp.where(place.held, jnp.where(place.door == 0, 1, cells - 2), place.key)
    left, right, pick, unlock = (jnp.int32(i) for i in encode("lrpo"))
    there = jnp.where(place.held, unlock, pick)
    return jnp.where(place.agent == goal, there, jnp.where(goal > place.agent, right, left))


def plan_length(tasks: dict[str, Array], cells: int) -> Int[Array, " B"]:
    """Actions of a shortest plan: the walk to the key, picking it up, the walk to beside the door, opening it."""
    beside = jnp.where(tasks["door"] == 0, 1, cells - 2)
    return jnp.abs(tasks["agent"] - tasks["key"]) + jnp.abs(tasks["key"] - beside) + 2


def subgoals(identity: Int[Array, "B K"], *, cells: int = CELLS) -> Int[Array, "B K"]:
    """How many of the four sub-goals hold in each situation of a corridor, 0 to 3: whoever has opened is gone.

    Args:
      identity: ``Turns.identity`` in a world of ``cells`` cells.
    """
    agent, key, door = identity // (cells * (cells + 1)), identity // cells % (cells + 1), identity % cells
    with_key = 2 + (jnp.abs(agent - door) == 1).astype(jnp.int32)
    return jnp.where(key == cells, with_key, (agent == key).astype(jnp.int32))


def subgoal_progress(turns: Turns, valid: Bool[Array, "B K"], *, cells: int = CELLS) -> Float[Array, "B K"]:
    """The share of the sub-goals that each turn is the first to reach: 1 together where the door is opened.

    It knows the world, as no agent does: what an estimator of progress could say at best. Where an episode ran out of
    turns, what its last action reached is not counted, as no action followed.

    Args:
      valid: turns that count.
    """
    reached = jnp.where(valid, subgoals(turns.identity, cells=cells), 0)
    best = jax.lax.cummax(reached, axis=1)
    more = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    opened = jnp.where(turns.reward > 0.5, SUBGOALS, best)
    after = jnp.where(more, jnp.pad(best[:, 1:], ((0, 0), (0, 1))), opened)
    return jnp.where(valid, (after - best).astype(jnp.float32) / SUBGOALS, 0.0)


@lru_cache(maxsize=8)
def by_length(arena: Arena, *, cells: int, most: int) -> Callable[[Trajectories, Rewards], dict[str, Array]]:
    """Figures of ``arenas.make_measure``: success where a shortest plan has at most so many actions, and where more."""
    length = plan_length(arena.heldout.answers, cells)

    def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
        solved = (turns_of(rows).done & (rewards.value > 0.5)).astype(jnp.float32)
        short = length[rows.problem_ids] <= most
        return {
            "eval/success_near": reduce.scalars(solved, rewards.valid & short),
            "eval/success_far": reduce.scalars(solved, rewards.valid & ~short),
        }

    return figures


@lru_cache(maxsize=8)
def make_arena(*, cells: int = CELLS, turns: int = 10, skill: float = 0.4, step_cost: float = 0.0) -> Arena:
    """A decoder of two layers, and all corridors of a length: three quarters to train on.

    Args:
      turns: at most in an episode; a shortest plan of 6 cells has 7 on average.
      skill: chance that the walker to imitate does the right thing; else any of ``l r p o``.
    """
    found = corridors(cells)
    kept = int(HELDOUT_SHARE * len(found))
    env = keydoor.make_env(encode, (), height=1, width=cells, step_cost=step_cost)
    prompt = len(found[0].prompt)
    length = turns * (env.action_tokens + env.observation_tokens)
    world = strings.make_world(len(ALPHABET), prompt, length, layers=2)
    choices = jnp.asarray(encode("lrpo"), jnp.int32)

    def behave(place: Any, key: Key) -> Array:
        wise, other = jax.random.split(key)
        anything = choices[jax.random.randint(other, (), 0, choices.shape[0])]
        return jnp.where(jax.random.uniform(wise) < skill, walk(place, cells), anything)[None]

    return Arena(world.policy, env, table(found[kept:]), table(found[:kept]), turns, behave)


def walk_on_grid(place: keydoor.Place, side: int) -> Int[Array, ""]:
    """The token of the move that comes nearest to the key, or with it to the door; ``p`` and ``o`` where they do it.

    The door is no cell to walk on; where it lies on the only short way, this walker stands still until it errs.
    """
    shifts = jnp.asarray(list(keydoor_grid.MOVES.values()), jnp.int32)
    row, column = place.agent // side + shifts[:, 0], place.agent % side + shifts[:, 1]
    goal = jnp.where(place.held, place.door, place.key)
    away = jnp.abs(row - goal // side) + jnp.abs(column - goal % side)
    open_ = (row >= 0) & (row < side) & (column >= 0) & (column < side) & (row * side + column != place.door)
    move = jnp.asarray(encode("".join(keydoor_grid.MOVES)), jnp.int32)[jnp.argmin(jnp.where(open_, away, 99))]
    far = jnp.abs(place.agent // side - goal // side) + jnp.abs(place.agent % side - goal % side)
    pick, unlock = (jnp.int32(i) for i in encode("po"))
    there = jnp.where(place.held, far == 1, far == 0)
    return jnp.where(there, jnp.where(place.held, unlock, pick), move)


def grids(side: int, count: int) -> list[Problem]:
    """So many different grids, in an order that mixes them.

    >>> [p.prompt for p in grids(3, 2)]
    ['kd K../A.D/...=>', 'kd D.K/.../..A=>']
    """
    rng, found = np.random.default_rng(0), {}
    while len(found) < count:
        problem = keydoor_grid.make(rng, side)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


@lru_cache(maxsize=8)
def make_grid_arena(
    *, side: int = 4, turns: int = 14, skill: float = 0.4, key_share: float = 0.0, tasks: int = 512, heldout: int = 128
) -> Arena:
    """A decoder of two layers, and grids of one side.

    Args:
      turns: at most in an episode; a shortest plan on 4 by 4 cells has 7 on average.
      skill: chance that the walker to imitate does the right thing; else any of ``l r u d p o``.
      key_share: see ``keydoor.make_env``.
      tasks: to train on, besides those that are held out.
    """
    found = grids(side, tasks + heldout)
    env = keydoor.make_env(encode, (), height=side, width=side, key_share=key_share)
    length = turns * (env.action_tokens + env.observation_tokens)
    world = strings.make_world(len(ALPHABET), len(found[0].prompt), length, layers=2)
    choices = jnp.asarray(encode("lrudpo"), jnp.int32)
    behave = skilled(
        lambda place: walk_on_grid(place, side)[None],
        lambda key: choices[jax.random.randint(key, (1,), 0, choices.shape[0])],
        skill,
    )
    return Arena(world.policy, env, table(found[heldout:]), table(found[:heldout]), turns, behave)
