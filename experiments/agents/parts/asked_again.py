"""Questions whose prompt leaves the answer open, asked again after every wrong one, as an arena (unary feedback).

The prompt ``cfahb=`` shows five letters of eight. One of them is right: the first of a task in 40 % of tasks, the
others in 30, 15, 10 and 5 %. Nothing in the prompt tells which, so one answer can be right in 40 % at best, and as many
different answers as there are letters always are. An action is one token; a wrong answer, and any other token, is
answered ``x=``, which says nothing else; the right one ends the episode: reward 1.
"""

import itertools
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts.arena import Arena, make_arena
from jaxrl_llm.envs import retry_question
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

ALPHABET = "_abcdefgh=x"  # the first is padding
LETTERS, SHOWN = 8, 5
FIRST, ASK, WRONG = (ALPHABET.index(c) for c in "a=x")
PLACES = (0,) * 8 + (1,) * 6 + (2,) * 3 + (3,) * 2 + (4,)  # of the right answer, in every twenty tasks
MOST_TURNS = 5


class Question(NamedTuple):
    """What is asked, and which letters were said."""

    shown: Int[Array, " C"]
    right: Int[Array, ""]
    said: Bool[Array, " L"]


@lru_cache(maxsize=1)
def _orders() -> np.ndarray:
    every = np.asarray(list(itertools.permutations(range(LETTERS), SHOWN)), np.int32)
    return every[np.random.default_rng(0).permutation(len(every))]


def problems(first: int, last: int) -> Problems:
    """Questions ``first .. last`` of all in a fixed order; ``level`` is the place of the right letter."""
    shown = _orders()[first:last]
    place = np.asarray(PLACES, np.int32)[np.arange(first, last) % len(PLACES)]
    tokens = np.concatenate([FIRST + shown, np.full((len(shown), 1), ASK, np.int32)], axis=1)
    right = shown[np.arange(len(shown)), place]
    answers = {"shown": jnp.asarray(shown, jnp.int32), "right": jnp.asarray(right, jnp.int32)}
    return Problems(jnp.asarray(tokens, jnp.int32), jnp.ones(tokens.shape, bool), answers, jnp.asarray(place))


def _step(state: Question, action: Array, count: Array) -> Answered:
    letter = action[0] - FIRST
    right = letter == state.right
    said = state.said | (jnp.arange(LETTERS, dtype=jnp.int32) == letter)
    return Answered(
        state=state._replace(said=said),
        tokens=jnp.asarray([WRONG, ASK], jnp.int32),
        count=jnp.int32(2),
        reward=right.astype(jnp.float32),
        done=right,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Question:
    return Question(task["shown"], task["right"], jnp.zeros((LETTERS,), bool))


def _identity(state: Question) -> Array:
    return jnp.sum(jnp.where(state.said, 2 ** jnp.arange(LETTERS, dtype=jnp.int32), 0))


ENV = Env(_reset, _step, _identity, action_tokens=1, observation_tokens=2)


def answers_of(rows: Trajectories) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
    """The token of every turn, and whether it is an answer: a letter."""
    found = turns_of(rows)
    said = jnp.take_along_axis(rows.tokens, found.end, axis=1)
    return said, found.taken & (said >= FIRST) & (said < FIRST + LETTERS)


def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``envs.retry_question.figures_of`` of this world's answers."""
    return retry_question.figures_of(rows, rewards, answers_of, turns=MOST_TURNS)


@lru_cache(maxsize=8)
def make_asked_again(*, skill: float = 0.7) -> Arena:
    """A decoder of two layers, a thousand questions to train on and sixty that are not.

    Args:
      skill: chance that the behaviour to imitate says one of the letters shown; else any. It forgets what it said.
    """

    def behave(state: Question, key: Key) -> Array:
        wise, which, other = jax.random.split(key, 3)
        shown = state.shown[jax.random.randint(which, (), 0, SHOWN)]
        anything = jax.random.randint(other, (), 0, LETTERS)
        return (FIRST + jnp.where(jax.random.uniform(wise) < skill, shown, anything))[None]

    tasks = problems(0, 1000), problems(1000, 1060)
    return make_arena(ENV, *tasks, behave, words=len(ALPHABET), turns=MOST_TURNS)
