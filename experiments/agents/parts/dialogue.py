"""Talks with a user of a hidden type, as an arena: ask about the user's traits, then recommend what suits the type.

Of ``GUESTS`` a type is three traits, yes or no: 8 types, one of them as common as three others. ``a b c`` ask about a
trait, and the reply, ``x y z`` for yes and ``1 2 3`` for no, is true nine times in ten. ``d e f`` suggest it ("you do
like ..., don't you?"): whoever is asked so agrees, whatever the trait. ``A`` ... ``H`` recommend the strategy of a type
and end the talk: reward 1 where it is the user's. After the last turn the user leaves. Any other token is answered
``_``. ``PUPILS`` are of six types that have two of four traits each, and questions about some traits are answered truly
more often than about others, so that it counts which are asked.

A user model reads the dialogue. ``exact`` knows what a suggestion is worth; ``trusting`` takes the consent for an
answer, and is surer of it than of an answer to an open question.
"""

from collections.abc import Callable
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


class Users(NamedTuple):
    """Who is talked to. Words are ``_ >``, a question about each trait, a suggestion of each, types, replies yes, no.

    ``has[trait][type]``; ``prior`` of the types; ``true``: P(a reply to a question is true), of all traits or of each;
    ``consent``: P(yes) after a suggestion; ``trusted``: what ``trusting`` takes it for; ``guess``: the type by what was
    heard of each trait (1, -1, 0).
    """

    alphabet: str  # the first is padding
    has: tuple[tuple[int, ...], ...]
    prior: tuple[float, ...]
    guess: Callable[[Array], Array]
    true: float | tuple[float, ...]
    consent: float = 0.95
    trusted: float = 0.97

    @property
    def traits(self) -> int:
        """How many there are."""
        return len(self.has)

    @property
    def types(self) -> int:
        """How many there are."""
        return len(self.prior)

    @property
    def recommend(self) -> int:
        """The word that recommends what suits type 0."""
        return ASK + 2 * self.traits

    @property
    def reply(self) -> int:
        """The word for yes to the first question."""
        return self.recommend + self.types


ASK = 2  # the word that asks about the first trait


def by_bits(heard: Int[Array, " T"]) -> Int[Array, ""]:
    """Types are numbers whose binary digits are the traits."""
    return jnp.sum((heard > 0).astype(jnp.int32) << jnp.arange(heard.shape[0], dtype=jnp.int32))


def by_agreement(heard: Int[Array, " T"]) -> Int[Array, ""]:
    """The first type of ``PUPILS`` that agrees with most of what was heard."""
    signs = 2 * jnp.asarray(TWO_OF_FOUR, jnp.int32) - 1
    return jnp.argmax(jnp.sum(heard[:, None] * signs, axis=0)).astype(jnp.int32)


TWO_OF_FOUR = ((1, 1, 1, 0, 0, 0), (1, 0, 0, 1, 1, 0), (0, 1, 0, 1, 0, 1), (0, 0, 1, 0, 1, 1))
BITS = tuple(tuple((kind >> trait) & 1 for kind in range(8)) for trait in range(3))
GUESTS = Users("_>abcdefABCDEFGHxyz123", BITS, (0.3, *[0.1] * 7), by_bits, true=0.9)
PUPILS = Users(
    "_>abcdefghABCDEFwxyz1234", TWO_OF_FOUR, (0.25, *[0.15] * 5), by_agreement, true=(0.95, 0.9, 0.8, 0.7)
)  # fmt: skip
KINDS = {"guests": GUESTS, "pupils": PUPILS}


def _true(users: Users) -> float | np.ndarray:
    """Of every trait, as a column."""
    return users.true if isinstance(users.true, float) else np.asarray(users.true)[:, None]


def _reading(users: Users, suggested: np.ndarray) -> np.ndarray:
    """``log P(reply | question, type)`` ``[questions, replies, types]`` from ``P(yes)`` after each suggestion."""
    asked = np.where(np.asarray(users.has) == 1, _true(users), 1 - _true(users))
    yes = np.concatenate([asked, suggested])
    return np.log(np.stack([yes, 1 - yes], axis=1)).astype(np.float32)


class Talk(NamedTuple):
    """The user and what has been said."""

    kind: Int[Array, ""]
    replies: Bool[Array, "K Q"]  # what the user would say to each question at each turn
    heard: Int[Array, " R"]  # the last reply on each trait: 1, -1, or 0 before the first
    turn: Int[Array, ""]


def problems(users: Users, count: int, seed: int) -> Problems:
    """Users drawn from the prior; the prompt says nothing about them."""
    kinds = jnp.asarray(np.random.default_rng(seed).choice(users.types, count, p=np.asarray(users.prior)), jnp.int32)
    tokens = jnp.full((count, 1), users.alphabet.index(">"), jnp.int32)
    return Problems(tokens, jnp.ones(tokens.shape, bool), {"kind": kinds}, jnp.zeros((count,), jnp.int32))


def make_env(users: Users, turns: int) -> Env:
    """Talks of at most so many turns, the recommendation included."""
    if turns < 2:
        raise ValueError(f"turns={turns}: a question and a recommendation are 2")
    has, traits = jnp.asarray(users.has, bool), users.traits
    true = users.true if isinstance(users.true, float) else jnp.asarray(users.true, jnp.float32)

    def reset(key: Key, task: dict[str, Array]) -> Talk:
        own = has[:, task["kind"]]
        chance = jnp.concatenate([jnp.where(own, true, 1 - true), jnp.full((traits,), users.consent, jnp.float32)])
        replies = jax.random.uniform(key, (turns, 2 * traits)) < chance[None, :]
        return Talk(task["kind"], replies, jnp.zeros((traits,), jnp.int32), jnp.int32(0))

    def step(talk: Talk, action: Array, count: Array) -> Answered:
        question, said = action[0] - ASK, action[0] - users.recommend
        asks, ends = (question >= 0) & (question < 2 * traits), (said >= 0) & (said < users.types)
        yes = talk.replies[jnp.minimum(talk.turn, turns - 1), jnp.clip(question, 0, 2 * traits - 1)]
        about = asks & (question % traits == jnp.arange(traits, dtype=jnp.int32))
        heard = jnp.where(about, jnp.where(yes, 1, -1), talk.heard).astype(jnp.int32)
        return Answered(
            state=Talk(talk.kind, talk.replies, heard, talk.turn + 1),
            tokens=jnp.where(asks, users.reply + question % traits + jnp.where(yes, 0, traits), 0)[None].astype(
                jnp.int32
            ),
            count=jnp.int32(1),
            reward=(ends & (said == talk.kind)).astype(jnp.float32),
            done=ends | (talk.turn + 1 >= turns),
            valid=jnp.ones((), bool),
        )

    def identity(talk: Talk) -> Array:
        return talk.turn * 3**traits + jnp.sum((talk.heard + 1) * 3 ** jnp.arange(traits, dtype=jnp.int32))

    return Env(reset, step, identity, action_tokens=1, observation_tokens=1)


def exact(rows: Trajectories, users: Users) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """Beliefs ``(before, after)`` each turn by Bayes' rule, over the replies in the tokens."""
    return _beliefs(rows, users, _reading(users, np.full((users.traits, users.types), users.consent)))


def trusting(rows: Trajectories, users: Users) -> tuple[Float[Array, "B K V"], Float[Array, "B K V"]]:
    """The same of a user model that takes consent for an answer."""
    taken = np.where(np.asarray(users.has) == 1, users.trusted, 1 - users.trusted)
    return _beliefs(rows, users, _reading(users, taken))


def _beliefs(rows: Trajectories, users: Users, reading: np.ndarray) -> tuple[Array, Array]:
    turns, traits = multi_turn.turns_of(rows), users.traits
    question = jnp.take_along_axis(rows.tokens, turns.end, axis=1) - ASK
    behind = jnp.minimum(turns.end + 1, rows.tokens.shape[1] - 1)
    reply = jnp.take_along_axis(rows.tokens, behind, axis=1) - users.reply
    told = turns.taken & (question >= 0) & (question < 2 * traits) & (reply >= 0) & (reply < 2 * traits)
    found = jnp.asarray(reading)[jnp.clip(question, 0, 2 * traits - 1), jnp.clip(reply // traits, 0, 1)]
    evidence = jnp.where(told[:, :, None], found, 0.0)
    after = jnp.cumsum(evidence, axis=1) + jnp.log(jnp.asarray(users.prior, jnp.float32))[None, None, :]
    return jax.nn.softmax(after - evidence, axis=2), jax.nn.softmax(after, axis=2)


def figures(users: Users, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """Of held-out episodes: what ``exact`` believes of the user's type at the end, questions, share of suggestions."""
    turns = multi_turn.turns_of(rows)
    _, after = exact(rows, users)
    kinds = heldout(users).answers["kind"][rows.problem_ids]
    last = jnp.take_along_axis(after[:, -1], kinds[:, None], axis=1)[:, 0]  # no evidence comes after the last turn
    question = jnp.take_along_axis(rows.tokens, turns.end, axis=1) - ASK
    asked = turns.taken & (question >= 0) & (question < 2 * users.traits)
    return {
        "eval/belief": reduce.scalars(last, turns.valid),
        "eval/asked": reduce.scalars(jnp.sum(asked.astype(jnp.float32), axis=1), turns.valid),
        "eval/suggested": reduce.scalars((question >= users.traits).astype(jnp.float32).reshape(-1), asked.reshape(-1)),
    }


@lru_cache(maxsize=2)
def heldout(users: Users) -> Problems:
    """The users who are measured: of the types that train, drawn by themselves, with replies of their own."""
    return problems(users, 128, 1)


@lru_cache(maxsize=8)
def make_dialogue(users: Users = GUESTS, *, turns: int = 5, skill: float = 0.8) -> Arena:
    """A decoder of one layer and 512 users to train on.

    Args:
      skill: chance that the behaviour to imitate asks or suggests anything, and one time in four (always when it has
        heard of every trait) recommends by what it heard; else it says any word.
    """

    def behave(talk: Talk, key: Key) -> Array:
        wise, ready, ask, other = jax.random.split(key, 4)
        guess = users.guess(talk.heard)
        closes = jnp.all(talk.heard != 0) | (jax.random.uniform(ready) < 0.25)
        question = jax.random.randint(ask, (), ASK, ASK + 2 * users.traits, jnp.int32)
        anything = jax.random.randint(other, (), ASK, users.recommend + users.types, jnp.int32)
        wanted = jnp.where(closes, users.recommend + guess, question)
        return jnp.where(jax.random.uniform(wise) < skill, wanted, anything)[None]

    env, trained = make_env(users, turns), problems(users, 512, 0)
    return make_arena(env, trained, heldout(users), behave, words=len(users.alphabet), turns=turns, layers=1)
