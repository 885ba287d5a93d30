"""Questions over a hidden table, one or two look-ups deep, as an arena: a search tool that may be called or not.

The prompt ``2a=`` asks for ``f(f(a))`` of a table ``f`` that differs in every task. The action ``a`` looks an entry up
and is answered ``:c=``; the action ``C`` answers ``c`` and ends the episode: reward 1 where it is right. Any other
token is answered ``:_=``.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.agents.parts.arena import Arena, drawn_apart, make_arena
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, Turns
from jaxrl_llm.types import Key, Problems

ENTITIES = 6
ALPHABET = "_12abcdefABCDEF:="  # the first is padding
FIRST_CALL, FIRST_ANSWER = ALPHABET.index("a"), ALPHABET.index("A")


class Question(NamedTuple):
    """Where the chain of look-ups has come to; ``left`` of them are missing."""

    at: Int[Array, ""]
    left: Int[Array, ""]
    table: Int[Array, " E"]
    last: Int[Array, ""]  # entry that was looked up last, -1 before the first


def problems(count: int, seed: int) -> Problems:
    """Questions with tables of their own; ``level`` is the number of look-ups."""
    rng = np.random.default_rng(seed)
    hops, start = rng.integers(1, 3, count), rng.integers(0, ENTITIES, count)
    table = np.stack([rng.permutation(ENTITIES) for _ in range(count)])
    tokens = np.stack([hops, FIRST_CALL + start, np.full(count, ALPHABET.index("="))], axis=1)
    answers = {name: jnp.asarray(x, jnp.int32) for name, x in (("hops", hops), ("start", start), ("table", table))}
    return Problems(jnp.asarray(tokens, jnp.int32), jnp.ones(tokens.shape, bool), answers, answers["hops"])


def asked(tasks: Problems) -> Int[np.ndarray, " B"]:
    """What a question asks, as one number: where its chain begins, and the one or two entries that it looks up."""
    table, start, hops = (np.asarray(tasks.answers[name]) for name in ("table", "start", "hops"))
    once = np.take_along_axis(table, start[:, None], axis=1)
    twice = np.where(hops[:, None] == 2, np.take_along_axis(table, once, axis=1), ENTITIES)
    return (start * ENTITIES + once[:, 0]) * (ENTITIES + 1) + twice[:, 0]


def _step(state: Question, action: Array, count: Array) -> Answered:
    called, said = action[0] - FIRST_CALL, action[0] - FIRST_ANSWER
    calls, answers = (called >= 0) & (called < ENTITIES), (said >= 0) & (said < ENTITIES)
    found = state.table[jnp.clip(called, 0, ENTITIES - 1)]
    onward = calls & (called == state.at) & (state.left > 0)
    after = Question(
        jnp.where(onward, found, state.at), state.left - onward.astype(jnp.int32), state.table,
        jnp.where(calls, called, state.last).astype(jnp.int32),
    )  # fmt: skip
    shown = jnp.where(calls, FIRST_CALL + found, 0)
    colon, equals = (jnp.int32(ALPHABET.index(c)) for c in ":=")
    right = answers & (said == state.at) & (state.left == 0)
    # a lucky guess counts, too: the answer is what the rest of the chain leads to
    ahead = jnp.where(state.left == 2, state.table[state.table[state.at]], state.table[state.at])
    lucky = answers & (state.left > 0) & (said == ahead)
    return Answered(
        state=after,
        tokens=jnp.stack([colon, shown, equals]).astype(jnp.int32),
        count=jnp.int32(3),
        reward=(right | lucky).astype(jnp.float32),
        done=answers,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Question:
    return Question(task["start"], task["hops"], task["table"], jnp.full((), -1, jnp.int32))


def _identity(state: Question) -> Array:
    return ((state.last + 1) * ENTITIES + state.at) * 3 + state.left


ENV = Env(_reset, _step, _identity, action_tokens=1, observation_tokens=3)


def right_answers(tasks: dict[str, Array]) -> Int[Array, " B"]:
    """The token that answers each task."""
    once = jnp.take_along_axis(tasks["table"], tasks["start"][:, None], axis=1)
    twice = jnp.take_along_axis(tasks["table"], once, axis=1)
    return FIRST_ANSWER + jnp.where(tasks["hops"] == 2, twice[:, 0], once[:, 0])


def calls(turns: Turns) -> Int[Array, " B"]:
    """How many actions of an episode were no answer."""
    return jnp.sum(turns.taken.astype(jnp.int32), axis=1) - turns.done.astype(jnp.int32)


@lru_cache(maxsize=8)
def make_lookup(*, turns: int = 4, skill: float = 0.5) -> Arena:
    """A decoder of two layers, 512 questions to train on and 64 that are measured, which ask for other chains.

    Args:
      skill: chance that the behaviour to imitate looks up, or answers, what it should; else any of both.
    """

    def behave(state: Question, key: Key) -> Array:
        wise, other = jax.random.split(key)
        right = jnp.where(state.left > 0, FIRST_CALL, FIRST_ANSWER) + state.at
        anything = jax.random.randint(other, (), FIRST_CALL, FIRST_ANSWER + ENTITIES)
        return jnp.where(jax.random.uniform(wise) < skill, right, anything)[None]

    tables = drawn_apart(problems, asked, train=512, heldout=64)
    return make_arena(ENV, *tables, behave, words=len(ALPHABET), turns=turns)
