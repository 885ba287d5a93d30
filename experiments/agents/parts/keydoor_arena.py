"""Corridors of the key-door world as an arena: an alphabet of its own and a clumsy walker to imitate."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.agents.parts import keydoor
from experiments.agents.parts.arena import Arena, make_arena
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.types import Key, Problems

ALPHABET = "_kd .AHKDlrupo/;=>"  # the first is padding
CELLS = 6
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


@lru_cache(maxsize=8)
def make_keydoor(*, cells: int = CELLS, turns: int = 10, skill: float = 0.4, step_cost: float = 0.0) -> Arena:
    """A decoder of two layers, and all corridors of a length: three quarters to train on.

    Args:
      turns: at most in an episode; a shortest plan of 6 cells has 7 on average.
      skill: chance that the walker to imitate does the right thing; else any of ``l r p o``.
    """
    found = corridors(cells)
    kept = int(HELDOUT_SHARE * len(found))
    env = keydoor.make_env(encode, (), height=1, width=cells, step_cost=step_cost)
    choices = jnp.asarray(encode("lrpo"), jnp.int32)

    def behave(place: Any, key: Key) -> Array:
        wise, other = jax.random.split(key)
        anything = choices[jax.random.randint(other, (), 0, choices.shape[0])]
        return jnp.where(jax.random.uniform(wise) < skill, walk(place, cells), anything)[None]

    return make_arena(env, table(found[kept:]), table(found[:kept]), behave, words=len(ALPHABET), turns=turns)
