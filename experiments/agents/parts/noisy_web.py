"""The questions of ``toy_multihop`` on a noisy web, as an arena: search for a page, have it read, answer.

Every entity has a page, at an address that differs from task to task, whose segments are its facts ``sron`` in an order
of their own. The prompt ``a2x=`` names what is known and asked. An action has three tokens. ``?ax`` searches and is
answered by address and title of one page, ``Ba.``, now and then of another than the best; ``>Bx`` has a reading agent
look for ``x`` on that page, and is answered by what it brings, ``xc4``, or nothing where the page cannot be fetched.
Behind either follow the agent's notes, what is known now and what is asked next: ``c4y=``. ``!c4`` answers.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts import multi_hop
from experiments.agents.parts.arena import Arena, make_arena
from experiments.agents.parts.bm25 import bm25_scores
from experiments.agents.parts.multi_hop import ANSWER, DOT, ENTITIES, ENTITY, EQUALS, FAMILY, HOPS, RELATION, RELATIONS
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems, Trajectories
from jaxrl_llm.verifiers.overlap import token_set_f1

ALPHABET = multi_hop.ALPHABET + ">ABCDEF"
SEARCH = multi_hop.SEARCH
OPEN, ADDRESS = len(multi_hop.ALPHABET), len(multi_hop.ALPHABET) + 1
ACTION, RESULT, NOTES = 3, 3, 4


class Web(NamedTuple):
    """A task, what was found out, and the luck of every turn; of one episode."""

    task: dict[str, Array]
    at: Int[Array, ""]  # entity that is known
    step: Int[Array, ""]  # hops that were found
    turn: Int[Array, ""]
    page: Int[Array, ""]  # entity of the page whose address was shown last, -1 where none was
    luck: Float[Array, "K 2"]


def problems(count: int, seed: int, hops: tuple[int, ...]) -> Problems:
    """``multi_hop.problems`` with addresses and the order of segments; the prompt leaves out what is asked later."""
    plain = multi_hop.problems(count, seed, hops)
    rng = np.random.default_rng(seed + 1000)
    address = np.stack([rng.permutation(ENTITIES) for _ in range(count)])
    order = np.stack([[rng.permutation(RELATIONS) for _ in range(ENTITIES)] for _ in range(count)])
    more = {"address": jnp.asarray(address, jnp.int32), "order": jnp.asarray(order, jnp.int32)}
    return Problems(plain.tokens[:, HOPS:], plain.valid[:, HOPS:], plain.answers | more, plain.level)


def segments(task: dict[str, Array], page: Array) -> Int[Array, "3 4"]:
    """The text of one page."""
    return multi_hop.documents(task)[task["order"][page] * ENTITIES + page]


def pages(task: dict[str, Array]) -> Int[Array, "E W"]:
    """What the search engine reads: titles and texts."""
    every = jnp.arange(ENTITIES, dtype=jnp.int32)
    text = jax.vmap(lambda page: segments(task, page).reshape(-1))(every)
    return jnp.concatenate([(ENTITY + every)[:, None], text], axis=1)


def read_on(text: Int[Array, "S L"], goal: Int[Array, " G"]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The reading agent: ``(segment, found)``, the segment with most of the goal's words among those it reads.

    It reads on while segments hold any word of the goal, stops at the first that holds none, and brings something only
    where all words are in one segment.
    """
    shared = jnp.sum(jnp.any(text[:, :, None] == goal[None, None, :], axis=1).astype(jnp.int32), axis=1)
    reached = jnp.cumprod((shared > 0).astype(jnp.int32))
    kept = shared * reached
    return jnp.argmax(kept).astype(jnp.int32), jnp.max(kept) == goal.shape[0]


def first_segment(text: Int[Array, "S L"], goal: Int[Array, " G"]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """No reading agent: the beginning of the page, whatever it says."""
    return jnp.zeros((), jnp.int32), jnp.ones((), bool)


def well_formed(actions: Int[Array, "... 3"]) -> Bool[Array, "..."]:
    """A search or an answer of two words, or an address with a relation."""
    address = actions[..., 1] >= ADDRESS
    relation = (actions[..., 2] >= RELATION) & (actions[..., 2] < FAMILY)
    words = jnp.all((actions[..., 1:] >= ENTITY) & (actions[..., 1:] < OPEN), axis=-1)
    said = (actions[..., 0] == SEARCH) | (actions[..., 0] == ANSWER)
    return (said & words) | ((actions[..., 0] == OPEN) & address & relation)


def _asked(state: Web) -> Array:
    """Relation that leads on."""
    return state.task["relations"][jnp.minimum(state.step, HOPS - 1)]


def make_env(read: Callable = read_on, *, turns: int, astray: float, failing: float) -> Env:
    """The web.

    Args:
      read: ``(segments of a page, goal) -> (segment, found)``, ``read_on`` or ``first_segment``.
      astray: chance that a search shows another page than the best.
      failing: chance that a page cannot be fetched.
    """

    def search(state: Web, action: Array, luck: Array) -> tuple[Array, Array]:
        best = jnp.argmax(bm25_scores(action[1:], pages(state.task))).astype(jnp.int32)
        other = (best + 1 + (luck[1] * (ENTITIES - 1)).astype(jnp.int32)) % ENTITIES
        page = jnp.where(luck[0] < astray, other, best)
        return page, jnp.stack([ADDRESS + state.task["address"][page], ENTITY + page, jnp.int32(DOT)])

    def fetch(state: Web, action: Array, luck: Array) -> tuple[Array, Array]:
        page = jnp.argmax(state.task["address"] == action[1] - ADDRESS).astype(jnp.int32)
        text = segments(state.task, page)
        segment, found = read(text, jnp.stack([ENTITY + state.at, action[2]]))
        found = found & (luck[0] >= failing)
        right = found & (page == state.at) & (text[segment, 1] == RELATION + _asked(state))
        return right & (state.step < state.task["hops"]), jnp.where(found, text[segment, 1:], 0)

    def step(state: Web, action: Array, count: Array) -> Answered:
        luck, formed = state.luck[jnp.minimum(state.turn, turns - 1)], well_formed(action)
        searched, opened = formed & (action[0] == SEARCH), formed & (action[0] == OPEN)
        answered = action[0] == ANSWER
        page, listed = search(state, action, luck)
        right, brought = fetch(state, action, luck)
        onward = right & opened
        at = jnp.where(onward, state.task["objects"][_asked(state), state.at], state.at)
        after = Web(
            state.task, at, state.step + onward.astype(jnp.int32), state.turn + 1,
            jnp.where(searched, page, -1), state.luck,
        )  # fmt: skip
        asked = jnp.where(after.step < after.task["hops"], RELATION + _asked(after), DOT)
        notes = jnp.stack([ENTITY + at, FAMILY + state.task["family"][at], asked, jnp.int32(EQUALS)])
        result = jnp.where(searched, listed, jnp.where(opened, brought, 0))
        return Answered(
            state=after,
            tokens=jnp.concatenate([result, notes]).astype(jnp.int32),
            count=jnp.int32(RESULT + NOTES),
            reward=jnp.where(answered, token_set_f1(action[1:], multi_hop.gold(state.task)), 0.0),
            done=answered,
            valid=jnp.ones((), bool),
        )

    def reset(key: Key, task: dict[str, Array]) -> Web:
        zero = jnp.zeros((), jnp.int32)
        return Web(task, task["start"], zero, zero, zero - 1, jax.random.uniform(key, (turns, 2)))

    def identity(state: Web) -> Array:
        return (state.at * (HOPS + 1) + state.step) * (ENTITIES + 1) + state.page + 1

    return Env(reset, step, identity, action_tokens=ACTION, observation_tokens=RESULT + NOTES)


def next_action(state: Web) -> Int[Array, "3"]:
    """Open the page of what is known where its address is at hand, else search for it; answer at the end."""
    known, relation = ENTITY + state.at, RELATION + _asked(state)
    search = jnp.stack([jnp.int32(SEARCH), known, relation])
    open_ = jnp.stack([jnp.int32(OPEN), ADDRESS + state.task["address"][state.at], relation])
    answer = jnp.stack([jnp.int32(ANSWER), known, FAMILY + state.task["family"][state.at]])
    onward = jnp.where(state.page == state.at, open_, search)
    return jnp.where(state.step < state.task["hops"], onward, answer).astype(jnp.int32)


def make_behaviour(skill: float) -> Callable[[Web, Key], Array]:
    """Acts as it should with this chance; else does anything, or breaks the form."""

    def behave(state: Web, key: Key) -> Array:
        wise, kind, content = jax.random.split(key, 3)
        words = jax.random.randint(content, (2,), ENTITY, OPEN)
        pages = jax.random.randint(
            content, (2,), jnp.asarray([ADDRESS, RELATION]), jnp.asarray([len(ALPHABET), FAMILY])
        )
        chance = jax.random.uniform(kind)
        first = jnp.where(chance < 0.3, SEARCH, jnp.where(chance < 0.6, ANSWER, jnp.where(chance < 0.9, OPEN, DOT)))
        other = jnp.concatenate([first[None], jnp.where(first == OPEN, pages, words)]).astype(jnp.int32)
        return jnp.where(jax.random.uniform(wise) < skill, next_action(state), other)

    return behave


def figures(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """Those of ``multi_hop``, of actions in this form."""
    return multi_hop.figures(held, rows, formed=well_formed)


@lru_cache(maxsize=16)
def make_noisy_web(
    read: Callable = read_on, *, astray: float = 0.3, failing: float = 0.2, turns: int = 6, skill: float = 0.7,
) -> Arena:  # fmt: skip
    """A decoder of two layers, 512 questions of one and two hops to train on, and 48 that are not."""
    env = make_env(read, turns=turns, astray=astray, failing=failing)
    tasks = problems(512, 0, (1, 2)), problems(48, 1, (1, 2))
    return make_arena(env, *tasks, make_behaviour(skill), words=len(ALPHABET), turns=turns)
