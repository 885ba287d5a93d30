"""Errands on a square grid as an arena: go to one place after another and take something at each.

A walker with a compass sees three tokens, ``=gJ``: the sky, how many rows below the place is that is next (``a..f``
above, ``g`` on the same row, ``h..m`` below), and how many columns to the right (``A..F`` left, ``G``, ``H..M`` right).
The prompt shows them, and so does the answer to every action. An action is one token: ``l r u d`` walk (against a wall
nothing happens), ``t`` takes, which does nothing but at the place that is next. Taking at the last place is the task:
it ends the episode with a reward of 1. Nothing that was taken is lost again. The sky means nothing; where there are
several it changes at every turn, so that the same situation looks different and fewer turns of a group seem to share
one.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.agents.parts import arena as arenas
from jaxrl_llm import reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, Turns, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

ALPHABET = "_lrudt=~!?*+%#abcdefghijklmABCDEFGHIJKLM"  # the first is padding
ACTIONS = "lrudt"
LEFT, SKY, SAME_ROW, SAME_COLUMN = (ALPHABET.index(c) for c in "l=gG")
SIDES, SKIES = 7, 8  # at most
SEEN = 3  # tokens
PLACES = 4  # of the bed
HELDOUT, TRAINED = 128, 2048
DIFFERENT = HELDOUT + TRAINED
_SHIFTS = ((0, -1), (0, 1), (-1, 0), (1, 0), (0, 0))  # of the actions, in rows and columns


class Errand(NamedTuple):
    """Where the walker is and has to go, how much was taken, and what luck will bring."""

    agent: Int[Array, ""]
    places: Int[Array, " G"]
    taken: Int[Array, ""]
    sky: Int[Array, ""]
    luck: Array


def _next(state: Errand) -> Array:
    return state.places[jnp.minimum(state.taken, state.places.shape[0] - 1)]


def _away(state: Errand, side: int) -> tuple[Array, Array]:
    """How many rows below the place is that is next, and how many columns to the right."""
    place = _next(state)
    return place // side - state.agent // side, place % side - state.agent % side


def _seen(state: Errand, side: int) -> Int[Array, " 3"]:
    down, right = _away(state, side)
    return jnp.stack([SKY + state.sky, SAME_ROW + down, SAME_COLUMN + right]).astype(jnp.int32)


def _start(task: dict[str, Array], key: Key) -> Errand:
    nothing = jnp.zeros((), jnp.int32)
    return Errand(task["agent"], task["places"], nothing, nothing, jax.random.key_data(key))


def problems(count: int, seed: int, *, side: int, places: int) -> Problems:
    """Grids whose walker and places lie on cells of their own, no two grids alike; ``level`` is a shortest plan."""
    rng, found = np.random.default_rng(seed), dict[tuple[int, ...], None]()
    while len(found) < count:
        found[tuple(int(c) for c in rng.permutation(side * side)[: places + 1])] = None
    table = jnp.asarray(list(found), jnp.int32)
    answers = {"agent": table[:, 0], "places": table[:, 1:]}
    tokens = jax.vmap(lambda task: _seen(_start(task, jax.random.key(0)), side))(answers)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, plan_length(answers, side))


def plan_length(tasks: dict[str, Array], side: int) -> Int[Array, " N"]:
    """Actions of a shortest plan: the walks from place to place, and taking at each."""
    cells = jnp.concatenate([tasks["agent"][:, None], tasks["places"]], axis=1)
    walked = jnp.abs(jnp.diff(cells // side, axis=1)) + jnp.abs(jnp.diff(cells % side, axis=1))
    return (jnp.sum(walked, axis=1) + tasks["places"].shape[1]).astype(jnp.int32)


def make_env(*, side: int, places: int, skies: int = 1) -> Env:
    """The world of one size.

    Args:
      skies: how many there are; one never changes.
    """
    shifts = jnp.asarray(_SHIFTS, jnp.int32)

    def step(state: Errand, action: Array, count: Array) -> Answered:
        choice = action[0] - LEFT
        known = (choice >= 0) & (choice < len(ACTIONS))
        shift = jnp.where(known, shifts[jnp.clip(choice, 0, len(ACTIONS) - 1)], 0)
        row, column = state.agent // side + shift[0], state.agent % side + shift[1]
        inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
        takes = (choice == ACTIONS.index("t")) & (state.agent == _next(state))
        now, later = jax.random.split(jax.random.wrap_key_data(state.luck))
        after = Errand(
            agent=jnp.where(inside, row * side + column, state.agent).astype(jnp.int32),
            places=state.places,
            taken=state.taken + takes.astype(jnp.int32),
            sky=jax.random.randint(now, (), 0, skies, jnp.int32),
            luck=jax.random.key_data(later),
        )
        done = after.taken == places
        return Answered(
            state=after,
            tokens=_seen(after, side),
            count=jnp.int32(SEEN),
            reward=done.astype(jnp.float32),
            done=done,
            valid=jnp.ones((), bool),
        )

    def identity(state: Errand) -> Array:
        """Of one task, whose places are the same for all."""
        return ((state.agent * (places + 1) + state.taken) * skies + state.sky).astype(jnp.int32)

    return Env(lambda key, task: _start(task, key), step, identity, action_tokens=1, observation_tokens=SEEN)


def expert(state: Errand, side: int) -> Int[Array, " 1"]:
    """The action of a shortest plan: up and down first, then sideways, then take."""
    down, right = _away(state, side)
    sideways = jnp.where(right < 0, 0, jnp.where(right > 0, 1, ACTIONS.index("t")))
    return (LEFT + jnp.where(down < 0, 2, jnp.where(down > 0, 3, sideways))).astype(jnp.int32)[None]


def anything(key: Key) -> Int[Array, " 1"]:
    """An action at random."""
    return LEFT + jax.random.randint(key, (1,), 0, len(ACTIONS), jnp.int32)


def half_blind(state: Errand, key: Key, *, side: int, sideways: float) -> Int[Array, " 1"]:
    """The expert who takes left for right: where one of them is due, the right one is taken with this chance."""
    wise = expert(state, side)
    wrong = 2 * LEFT + 1 - wise
    knows = jax.random.uniform(key) < sideways
    return jnp.where((wise < LEFT + 2) & ~knows, wrong, wise).astype(jnp.int32)


def reached(identity: Int[Array, "B K"], *, places: int, skies: int = 1) -> Int[Array, "B K"]:
    """How much had been taken in each situation.

    Args:
      identity: ``Turns.identity`` in a world of so many places and skies.
    """
    return identity // skies % (places + 1)


def progress(turns: Turns, valid: Array, *, places: int, skies: int = 1) -> Float[Array, "B K"]:
    """The share of the sub-goals that each turn reaches: 1 together where the task is done.

    It knows the world, as no agent does. Where an episode ran out of turns, what its last action took is not counted,
    as no action followed.

    Args:
      valid: turns that count.
    """
    before = jnp.where(valid, reached(turns.identity, places=places, skies=skies), 0)
    more = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    last = jnp.where(turns.reward > 0.5, places, before)
    after = jnp.where(more, jnp.pad(before[:, 1:], ((0, 0), (0, 1))), last)
    return jnp.where(valid, (after - before).astype(jnp.float32) / places, 0.0)


@lru_cache(maxsize=8)
def by_length(arena: arenas.Arena, *, most: int) -> Callable[[Trajectories, Rewards], dict[str, Array]]:
    """Further figures of held-out episodes: success where a shortest plan has at most so many actions, and where more.

    Args:
      arena: of ``make_errands``.
    """
    length = arena.heldout.level

    def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
        solved = (turns_of(rows).done & (rewards.value > 0.5)).astype(jnp.float32)
        near = length[rows.problem_ids] <= most
        return {
            "eval/success_near": reduce.scalars(solved, rewards.valid & near),
            "eval/success_far": reduce.scalars(solved, rewards.valid & ~near),
        }

    return figures


@lru_cache(maxsize=8)
def make_errands(
    *, side: int = 5, places: int = 4, turns: int = 24, skies: int = 1, skill: float = 0.65, sideways: float = 0.6
) -> arenas.Arena:
    """A decoder of two layers, grids to train on and others that are held out.

    The behaviour to imitate knows a part of the task: it walks up and down as it should and takes where it should, but
    hardly tells left from right.

    Args:
      turns: at most in an episode; a shortest plan for four places on five by five cells has 17 on average.
      skies: see ``make_env``.
      skill: chance that the behaviour does what it knows; else it does anything.
      sideways: see ``half_blind``.
    """
    if not (2 <= side <= SIDES and 1 <= skies <= SKIES) or math.perm(side * side, places + 1) < DIFFERENT:
        raise UserError(
            f"side={side}, places={places}, skies={skies}: a grid has 2 to {SIDES} rows and columns, at most {SKIES} "
            f"skies, and so many cells and places that there are {DIFFERENT} different ones"
        )
    found = problems(DIFFERENT, 1, side=side, places=places)
    held, train = jax.tree.map(lambda x: x[:HELDOUT], found), jax.tree.map(lambda x: x[HELDOUT:], found)

    def behave(state: Any, key: Key) -> Array:
        wise, other, coin = jax.random.split(key, 3)
        known = half_blind(state, coin, side=side, sideways=sideways)
        return jnp.where(jax.random.uniform(wise) < skill, known, anything(other)).astype(jnp.int32)

    env = make_env(side=side, places=places, skies=skies)
    return arenas.make_arena(env, train, held, behave, words=len(ALPHABET), turns=turns)
