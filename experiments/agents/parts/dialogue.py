"""Talks with a user of a hidden type, as an arena: ask about the user's traits, then recommend what suits the type.

A type is three traits, yes or no: 8 types, one of them as common as three others. ``a b c`` ask about a trait, and the
reply, ``x y z`` for yes and ``1 2 3`` for no, is true nine times in ten. ``d e f`` suggest it ("you do like ..., don't
you?"): whoever is asked so agrees, whatever the trait. ``A`` ... ``H`` recommend the strategy of a type and end the
talk: reward 1 where it is the user's. After the last turn the user leaves. Any other token is answered ``_``.

A user model reads the dialogue. ``exact`` knows what a suggestion is worth; ``trusting`` takes the consent for an
answer, and is surer of it than of an answer to an open question.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts.arena import Arena, make_arena
from jaxrl_llm import reduce
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

TRAITS, TYPES = 3, 8
ALPHABET = "_>abcdefABCDEFGHxyz123"  # the first is padding
ASK, RECOMMEND, REPLY = (ALPHABET.index(c) for c in "aAx")
PRIOR = np.asarray([0.3] + [0.1] * 7)  # of the types; type 0 has none of the traits
TRUE_REPLY, CONSENT, TRUSTED = 0.9, 0.95, 0.97  # P(true), P(yes) after a suggestion, and what ``trusting`` takes it for
_HAS = (np.arange(TYPES)[None, :] >> np.arange(TRAITS)[:, None]) & 1  # [trait, type]


def _reading(suggested: np.ndarray) -> np.ndarray:
    """``log P(reply | question, type)`` ``[questions, replies, types]`` from ``P(yes)`` after each suggestion."""
    asked = np.where(_HAS == 1, TRUE_REPLY, 1 - TRUE_REPLY)
    yes = np.concatenate([asked, suggested])
    return np.log(np.stack([yes, 1 - yes], axis=1)).astype(np.float32)


_EXACT = _reading(np.full((TRAITS, TYPES), CONSENT))
_TRUSTING = _reading(np.where(_HAS == 1, TRUSTED, 1 - TRUSTED))


class Talk(NamedTuple):
    """The user and what has been said."""

    kind: Int[Array, ""]
    replies: Bool[Array, "K Q"]  # what the user would say to each question at each turn
    heard: Int[Array, " R"]  # the last reply on each trait: 1, -1, or 0 before the first
    turn: Int[Array, ""]


def problems(count: int, seed: int) -> Problems:
    """Users drawn from the prior; the prompt says nothing about them."""
    kinds = jnp.asarray(np.random.default_rng(seed).choice(TYPES, count, p=PRIOR), jnp.int32)
    tokens = jnp.full((count, 1), ALPHABET.index(">"), jnp.int32)
    return Problems(tokens, jnp.ones(tokens.shape, bool), {"kind": kinds}, jnp.zeros((count,), jnp.int32))


def make_env(turns: int) -> Env:
    """Talks of at most so many turns, the recommendation included."""
    if turns < 2:
        raise ValueError(f"turns={turns}: a question and a recommendation are 2")
    has = jnp.asarray(_HAS, bool)

    def reset(key: Key, task: dict[str, Array]) -> Talk:
        own = has[:, task["kind"]]
        chance = jnp.concatenate(
            [jnp.where(own, TRUE_REPLY, 1 - TRUE_REPLY), jnp.full((TRAITS,), CONSENT, jnp.float32)]
        )
        replies = jax.random.uniform(key, (turns, 2 * TRAITS)) < chance[None, :]
        return Talk(task["kind"], replies, jnp.zeros((TRAITS,), jnp.int32), jnp.int32(0))

    def step(talk: Talk, action: Array, count: Array) -> Answered:
        question, said = action[0] - ASK, action[0] - RECOMMEND
        asks, ends = (question >= 0) & (question < 2 * TRAITS), (said >= 0) & (said < TYPES)
        yes = talk.replies[jnp.minimum(talk.turn, turns - 1), jnp.clip(question, 0, 2 * TRAITS - 1)]
        about = asks & (question % TRAITS == jnp.arange(TRAITS, dtype=jnp.int32))
        heard = jnp.where(about, jnp.where(yes, 1, -1), talk.heard).astype(jnp.int32)
        return Answered(
            state=Talk(talk.kind, talk.replies, heard, talk.turn + 1),
            tokens=jnp.where(asks, REPLY + question % TRAITS + jnp.where(yes, 0, TRAITS), 0)[None].astype(jnp.int32),
            count=jnp.int32(1),
            reward=(ends & (said == talk.kind)).astype(jnp.float32),
            done=ends | (talk.turn + 1 >= turns),
            valid=jnp.ones((), bool),
        )

    def identity(talk: Talk) -> Array:
        return talk.turn * 27 + jnp.sum((talk.heard + 1) * 3 ** jnp.arange(TRAITS, dtype=jnp.int32))

    return Env(reset, step, identity, action_tokens=1, observation_tokens=1)


def exact(rows: Trajectories) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Beliefs ``(before, after)`` each turn by Bayes' rule, over the replies in the tokens."""
    return _beliefs(rows, _EXACT)


def trusting(rows: Trajectories) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """The same of a user model that takes consent for an answer."""
    return _beliefs(rows, _TRUSTING)


def _beliefs(rows: Trajectories, reading: np.ndarray) -> tuple[Array, Array]:
    turns = multi_turn.turns_of(rows)
    question = jnp.take_along_axis(rows.tokens, turns.end, axis=1) - ASK
    behind = jnp.minimum(turns.end + 1, rows.tokens.shape[1] - 1)
    reply = jnp.take_along_axis(rows.tokens, behind, axis=1) - REPLY
    told = turns.taken & (question >= 0) & (question < 2 * TRAITS) & (reply >= 0) & (reply < 2 * TRAITS)
    found = jnp.asarray(reading)[jnp.clip(question, 0, 2 * TRAITS - 1), jnp.clip(reply // TRAITS, 0, 1)]
    evidence = jnp.where(told[:, :, None], found, 0.0)
    after = jnp.cumsum(evidence, axis=1) + jnp.log(jnp.asarray(PRIOR, jnp.float32))[None, None, :]
    return jax.nn.softmax(after - evidence, axis=2), jax.nn.softmax(after, axis=2)


def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """Of held-out episodes: what ``exact`` believes of the user's type at the end, questions, share of suggestions."""
    turns = multi_turn.turns_of(rows)
    _, after = exact(rows)
    kinds = heldout().answers["kind"][rows.problem_ids]
    last = jnp.take_along_axis(after[:, -1], kinds[:, None], axis=1)[:, 0]  # no evidence comes after the last turn
    question = jnp.take_along_axis(rows.tokens, turns.end, axis=1) - ASK
    asked = turns.taken & (question >= 0) & (question < 2 * TRAITS)
    return {
        "eval/belief": reduce.scalars(last, turns.valid),
        "eval/asked": reduce.scalars(jnp.sum(asked.astype(jnp.float32), axis=1), turns.valid),
        "eval/suggested": reduce.scalars((question >= TRAITS).astype(jnp.float32).reshape(-1), asked.reshape(-1)),
    }


@lru_cache(maxsize=1)
def heldout() -> Problems:
    """The users nobody trains on."""
    return problems(128, 1)


@lru_cache(maxsize=8)
def make_dialogue(*, turns: int = 5, skill: float = 0.8) -> Arena:
    """A decoder of one layer and 512 users to train on.

    Args:
      skill: chance that the behaviour to imitate asks or suggests anything, and one time in four (always when it has
        heard of every trait) recommends by what it heard; else it says any word.
    """

    def behave(talk: Talk, key: Key) -> Array:
        wise, ready, ask, other = jax.random.split(key, 4)
        guess = jnp.sum((talk.heard > 0).astype(jnp.int32) << jnp.arange(TRAITS, dtype=jnp.int32))
        closes = jnp.all(talk.heard != 0) | (jax.random.uniform(ready) < 0.25)
        question = jax.random.randint(ask, (), ASK, ASK + 2 * TRAITS, jnp.int32)
        anything = jax.random.randint(other, (), ASK, RECOMMEND + TYPES, jnp.int32)
        wanted = jnp.where(closes, RECOMMEND + guess, question)
        return jnp.where(jax.random.uniform(wise) < skill, wanted, anything)[None]

    env = make_env(turns)
    return make_arena(env, problems(512, 0), heldout(), behave, words=len(ALPHABET), turns=turns, layers=1)
