"""Questions of several hops over documents that a retriever finds, as an arena: search turn by turn, then answer.

Every task has documents of its own, one for each entity ``s`` and relation ``r``: ``sron``, "the r of s is o, of family
n". The prompt ``xy.a2x=`` asks for ``y`` of ``x`` of ``a`` (of family ``2``), and repeats what comes first. An action
has three tokens. ``?ax`` searches for the words ``a`` and ``x`` and is answered by the best documents and the relation
that is still asked for, ``axc4y=``, or a dot where none is; ``!c4`` answers "c of family 4" and ends the episode: the
reward is the F1 of its two words. Any other action is answered by no document.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts.arena import Arena, make_arena
from experiments.agents.parts.bm25 import best_documents, bm25_scores
from jaxrl_llm import reduce
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, Turns, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.overlap import token_bag_f1

ENTITIES, RELATIONS, FAMILIES, HOPS = 6, 3, 4, 3
ALPHABET = "_?!.=abcdefxyz1234"  # the first is padding
SEARCH, ANSWER, DOT, EQUALS = (ALPHABET.index(c) for c in "?!.=")
ENTITY, RELATION, FAMILY = (ALPHABET.index(c) for c in "ax1")
ACTION, WORDS = 3, 4  # tokens of an action, of a document


class Question(NamedTuple):
    """A task, and how far its chain has been followed; of one episode."""

    task: dict[str, Array]
    at: Int[Array, ""]  # entity that is known
    step: Int[Array, ""]  # hops that were found
    searches: Int[Array, ""]


def prompt(task: dict[str, Array]) -> Int[Array, " P"]:
    """How one question reads."""
    most, at = task["relations"].shape[0], task["start"]
    asked = jnp.where(jnp.arange(most, dtype=jnp.int32) < task["hops"], RELATION + task["relations"], DOT)
    named = [ENTITY + at, FAMILY + task["family"][at], asked[0], jnp.int32(EQUALS)]
    return jnp.concatenate([asked, jnp.stack(named)]).astype(jnp.int32)


def problems(count: int, seed: int, hops: tuple[int, ...], *, most: int = HOPS) -> Problems:
    """Questions of these numbers of hops in turn, with documents of their own; ``level`` is the number of hops.

    Args:
      most: hops for which tables and prompts have room.
    """
    rng = np.random.default_rng(seed)
    number, start = np.resize(hops, count), rng.integers(0, ENTITIES, count)
    relations = rng.integers(0, RELATIONS, (count, most))
    objects = np.stack([[rng.permutation(ENTITIES) for _ in range(RELATIONS)] for _ in range(count)])
    family = rng.integers(0, FAMILIES, (count, ENTITIES))
    table = {"hops": number, "start": start, "relations": relations, "objects": objects, "family": family}
    answers = {name: jnp.asarray(x, jnp.int32) for name, x in table.items()}
    tokens = jax.jit(jax.vmap(prompt))(answers)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, answers["hops"])


def documents(task: dict[str, Array]) -> Int[Array, "D 4"]:
    """All documents of one task, of relation ``r`` and subject ``s`` in row ``r * ENTITIES + s``."""
    subject = jnp.tile(jnp.arange(ENTITIES, dtype=jnp.int32), RELATIONS)
    relation = jnp.repeat(jnp.arange(RELATIONS, dtype=jnp.int32), ENTITIES)
    found = task["objects"].reshape(-1)
    return jnp.stack([ENTITY + subject, RELATION + relation, ENTITY + found, FAMILY + task["family"][found]], axis=1)


def indexed(task: dict[str, Array]) -> Int[Array, "D 5"]:
    """What the retriever reads of each document: its title, the subject, and its text."""
    text = documents(task)
    return jnp.concatenate([text[:, :1], text], axis=1)


def gold(task: dict[str, Array]) -> Int[Array, "2"]:
    """The two words that answer one task."""
    at = task["start"]
    for k in range(task["relations"].shape[0]):
        at = jnp.where(k < task["hops"], task["objects"][task["relations"][k], at], at)
    return jnp.stack([ENTITY + at, FAMILY + task["family"][at]]).astype(jnp.int32)


def written_answers(tasks: dict[str, Array]) -> dict[str, Array]:
    """The right answers of a table of tasks, in the form of ``answer_probability.golds``: its words count."""
    words = jax.vmap(gold)(tasks)
    begin = jnp.full((words.shape[0], 1), ANSWER, jnp.int32)
    kind = jnp.broadcast_to(jnp.asarray([1, 2, 2], jnp.int32), (words.shape[0], ACTION))
    return {"gold": jnp.concatenate([begin, words], axis=1), "gold_kind": kind}


def question_words(task: dict[str, Array]) -> Int[Array, " W"]:
    """The words of the question of one task."""
    asked = jnp.arange(task["relations"].shape[0], dtype=jnp.int32) < task["hops"]
    relations = jnp.where(asked, RELATION + task["relations"], 0)
    return jnp.concatenate([(ENTITY + task["start"])[None], relations]).astype(jnp.int32)


def by_query(state: Question, query: Array) -> Array:
    """What was searched for, every time."""
    return bm25_scores(query, indexed(state.task))


def by_question_once(state: Question, query: Array) -> Array:
    """The question itself, whatever was searched for, and only once: retrieval before generation."""
    scores = bm25_scores(question_words(state.task), indexed(state.task))
    return jnp.where(state.searches == 0, scores, jnp.zeros_like(scores))


def nothing(state: Question, query: Array) -> Array:
    """No search ever finds a document."""
    return jnp.zeros((RELATIONS * ENTITIES,), jnp.float32)


def well_formed(actions: Int[Array, "... 3"]) -> Bool[Array, "..."]:
    """A search or an answer of two words."""
    known = (actions[..., 0] == SEARCH) | (actions[..., 0] == ANSWER)
    return known & jnp.all(actions[..., 1:] >= ENTITY, axis=-1)


def _asked(state: Question) -> Array:
    """Relation that leads on."""
    relations = state.task["relations"]
    return relations[jnp.minimum(state.step, relations.shape[0] - 1)]


def _wanted(state: Question) -> Array:
    """Row of the document that leads on."""
    return _asked(state) * ENTITIES + state.at


def make_env(retrieve: Callable[[Question, Array], Array] = by_query, *, shown: int = 1) -> Env:
    """The world; ``retrieve(state, query [2])`` scores all documents, of which ``shown`` are shown."""

    def step(state: Question, action: Array, count: Array) -> Answered:
        searched = (action[0] == SEARCH) & well_formed(action)
        answered = action[0] == ANSWER
        ids, found = best_documents(retrieve(state, action[1:]), count=shown)
        found = found & searched
        text = jnp.where(found[:, None], documents(state.task)[ids], 0).reshape(-1)
        onward = jnp.any(found & (ids == _wanted(state))) & (state.step < state.task["hops"])
        after = Question(
            state.task, jnp.where(onward, state.task["objects"].reshape(-1)[_wanted(state)], state.at),
            state.step + onward.astype(jnp.int32), state.searches + searched.astype(jnp.int32),
        )  # fmt: skip
        asked = jnp.where(after.step < after.task["hops"], RELATION + _asked(after), DOT)
        return Answered(
            state=after,
            tokens=jnp.concatenate([text, jnp.stack([asked, jnp.int32(EQUALS)])]).astype(jnp.int32),
            count=jnp.int32(2 + WORDS * shown),
            reward=jnp.where(answered, token_bag_f1(action[1:], gold(state.task)), 0.0),
            done=answered,
            valid=jnp.ones((), bool),
        )

    def reset(key: Key, task: dict[str, Array]) -> Question:
        return Question(task, task["start"], jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def identity(state: Question) -> Array:
        return state.at * (state.task["relations"].shape[0] + 1) + state.step

    return Env(reset, step, identity, action_tokens=ACTION, observation_tokens=2 + WORDS * shown)


def next_action(state: Question) -> Int[Array, "3"]:
    """The search that leads on, or the answer."""
    search = jnp.stack([jnp.int32(SEARCH), ENTITY + state.at, RELATION + _asked(state)])
    answer = jnp.stack([jnp.int32(ANSWER), ENTITY + state.at, FAMILY + state.task["family"][state.at]])
    return jnp.where(state.step < state.task["hops"], search, answer).astype(jnp.int32)


def make_behaviour(skill: float) -> Callable[[Question, Key], Array]:
    """Acts as it should with this chance; else searches or answers anything, or breaks the form."""

    def behave(state: Question, key: Key) -> Array:
        wise, kind, content = jax.random.split(key, 3)
        chance = jax.random.uniform(kind)
        first = jnp.where(chance < 0.45, SEARCH, jnp.where(chance < 0.9, ANSWER, DOT))
        rest = jax.random.randint(content, (2,), ENTITY, len(ALPHABET))
        other = jnp.concatenate([first[None], rest]).astype(jnp.int32)
        return jnp.where(jax.random.uniform(wise) < skill, next_action(state), other)

    return behave


@lru_cache(maxsize=16)
def make_multi_hop(
    retrieve: Callable[[Question, Array], Array] = by_query, *, hops: tuple[int, ...] = (2,), shown: int = 1,
    turns: int = HOPS + 1, skill: float = 0.6, layers: int = 2,
) -> Arena:  # fmt: skip
    """A decoder, 512 questions of ``hops`` to train on, and 48 of one, two and three hops that are not.

    Args:
      turns: actions of an episode; the longest question needs all of them.
    """
    env = make_env(retrieve, shown=shown)
    held = problems(48, 1, tuple(range(1, HOPS + 1)))
    more = {"words": len(ALPHABET), "turns": turns, "layers": layers}
    return make_arena(env, problems(512, 0, hops), held, make_behaviour(skill), **more)


def asked_first(task: dict[str, Array], *, shown: int = 1) -> tuple[Question, Int[Array, " W"]]:
    """One question after a search for itself: the state, and the tokens of that search and of what it found.

    The best document comes last, next to what follows, where the only one of the policy's own searches stands.
    """
    env, start = make_env(by_question_once, shown=shown), make_env().reset(jax.random.key(0), task)
    search = next_action(start)
    found = env.step(start, search, jnp.int32(ACTION))
    text, rest = found.tokens[: WORDS * shown], found.tokens[WORDS * shown :]
    return found.state, jnp.concatenate([search, text.reshape(shown, WORDS)[::-1].reshape(-1), rest])


def read_off(task: dict[str, Array], *, shown: int) -> tuple[Int[Array, "3"], Bool[Array, ""]]:
    """``(answer, known)``: what the ``shown`` documents of a search for the question itself say.

    The chain is followed as far as they hold its links. Where one is missing, nothing is known, and the answer is that
    of the last entity that was reached.
    """
    ids, found = best_documents(bm25_scores(question_words(task), indexed(task)), count=shown)
    at, known = task["start"], jnp.ones((), bool)
    for k in range(task["relations"].shape[0]):
        wanted = task["relations"][k] * ENTITIES + at
        asked, there = k < task["hops"], jnp.any(found & (ids == wanted))
        known = known & (there | ~asked)
        at = jnp.where(asked & known, task["objects"].reshape(-1)[wanted], at)
    return jnp.stack([jnp.int32(ANSWER), ENTITY + at, FAMILY + task["family"][at]]).astype(jnp.int32), known


def make_reader(skill: float, *, shown: int) -> Callable[[Question, Key], Array]:
    """Answers from what was retrieved with this chance, by a guess where that does not suffice; else as others do."""
    other = make_behaviour(0.0)

    def behave(state: Question, key: Key) -> Array:
        wise, guess, rest = jax.random.split(key, 3)
        answer, known = read_off(state.task, shown=shown)
        words = jax.random.randint(guess, (2,), jnp.asarray([ENTITY, FAMILY]), jnp.asarray([RELATION, len(ALPHABET)]))
        guessed = jnp.concatenate([answer[:1], words]).astype(jnp.int32)
        said = jnp.where(known, answer, guessed)
        return jnp.where(jax.random.uniform(wise) < skill, said, other(state, rest))

    return behave


@lru_cache(maxsize=8)
def make_retrieved(
    retrieve: Callable[[Question, Array], Array] = nothing, *, hops: tuple[int, ...] = (2,), shown: int = 5,
    turns: int = HOPS + 1, skill: float = 0.6,
) -> Arena:  # fmt: skip
    """``make_multi_hop`` with one retrieval before the policy's first action, in its prompt.

    It reads as the policy's own search for the first hop would, with what the question as a query finds; no search of
    its own finds anything. The behaviour to imitate is that of ``make_reader``, as skilled as that of the other world:
    one who was never shown so many documents at once would have to learn to read them from the reward alone.

    Args:
      shown: documents of that retrieval. With one of them a question of two hops cannot be answered; five, as in
        "ReSearch", arXiv:2503.19470, at times hold both hops.
    """
    plain = make_multi_hop(retrieve, hops=hops, turns=turns)
    read = jax.jit(jax.vmap(lambda task: asked_first(task, shown=shown)[1]))

    def opened(found: Problems) -> Problems:
        tokens = jnp.concatenate([found.tokens, read(found.answers)], axis=1)
        return Problems(tokens, jnp.ones(tokens.shape, bool), found.answers, found.level)

    env = plain.env._replace(reset=lambda key, task: asked_first(task, shown=shown)[0])
    more = {"words": len(ALPHABET), "turns": turns, "layers": 2}
    return make_arena(env, opened(plain.train), opened(plain.heldout), make_reader(skill, shown=shown), **more)


class Played(NamedTuple):
    """What came of episodes, read from their tokens."""

    f1: Float[Array, " B"]  # of the answer; 0 without one
    exact: Bool[Array, " B"]
    formed: Bool[Array, " B"]  # every action is well formed and the last one answers
    searches: Float[Array, " B"]


def actions_of(rows: Trajectories, found: Turns) -> Int[Array, "B K 3"]:
    """The tokens of every action, 0 where none was taken."""
    index = jnp.maximum(found.end[:, :, None] - jnp.arange(ACTION - 1, -1, -1, dtype=jnp.int32)[None, None, :], 0)
    taken = jnp.take_along_axis(rows.tokens, index.reshape(index.shape[0], -1), axis=1).reshape(index.shape)
    return jnp.where(found.taken[:, :, None], taken, 0)


def read(tasks: dict[str, Array], rows: Trajectories, formed: Callable[[Array], Array] = well_formed) -> Played:
    """The outcome of episodes of ``tasks`` (one a row); ``formed(actions [B, K, 3])`` knows the form."""
    found = turns_of(rows)
    actions = actions_of(rows, found)
    answers = jnp.sum(jnp.where((actions[:, :, 0] == ANSWER)[:, :, None], actions, 0), axis=1)[:, 1:]
    wanted = jax.vmap(gold)(tasks)
    searched = found.taken & (actions[:, :, 0] == SEARCH)
    return Played(
        f1=jnp.where(found.done, jax.vmap(token_bag_f1)(answers, wanted), 0.0),
        exact=found.done & jnp.all(answers == wanted, axis=1),
        formed=found.done & jnp.all(formed(actions) | ~found.taken, axis=1),
        searches=jnp.sum(searched.astype(jnp.float32), axis=1),
    )


def score_by_f1(
    reward: Callable[[Array, Array], Array], *, formed: Callable[[Array], Array] = well_formed
) -> Callable[..., Rewards]:
    """The ``score`` of a ``reward(f1, formed)``; ``formed`` as in ``read``."""

    def score(tasks: dict[str, Array], rows: Trajectories) -> Rewards:
        played = read(tasks, rows, formed)
        return Rewards(reward(played.f1, played.formed), turns_of(rows).valid)

    return score


def figures(held: Problems, rows: Trajectories, *, formed: Callable[[Array], Array] = well_formed) -> dict[str, Array]:
    """F1, exact answers, form and searches, also by hops."""
    played = read(jax.tree.map(lambda x: x[rows.problem_ids], held.answers), rows, formed)
    values = {name: x.astype(jnp.float32) for name, x in played._asdict().items()}
    level = held.level[rows.problem_ids]
    shown = {f"eval/{name}": reduce.scalars(x) for name, x in values.items()}
    for n in range(1, HOPS + 1):
        shown |= {f"eval/{name}_{n}": reduce.scalars(values[name], level == n) for name in ("f1", "searches")}
    return shown | {"eval/searches_rise": shown[f"eval/searches_{HOPS}"] - shown["eval/searches_1"]}
