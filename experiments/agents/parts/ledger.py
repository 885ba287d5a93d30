"""A ledger that is longer than the context: pages are turned one at a time, their running total is the answer.

The action ``r`` turns a page, which shows ``2,``, an amount and that there is more, or ``2!``, the last. The actions
``A`` to ``E`` answer 0 to 4, the total of the ledger modulo 5, and end the episode: reward 1 where it is right. A
summary is a line like those of the ledger: ``3,`` says that the total is 3 so far and that there is more.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import summaries
from jaxrl_llm import reduce
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import contexts, multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.train import seed_axis
from jaxrl_llm.types import Key, Params, Problems, Trajectories

MODULUS, PAGES, TURNS = 5, 8, 9
ALPHABET = "_L01234,!rABCDES"  # the first is padding
READ, FIRST_ANSWER, FIRST_DIGIT, ASKED = (ALPHABET.index(c) for c in "rA0S")
MORE, LAST = (ALPHABET.index(c) for c in ",!")
SUMMARY_TOKENS = 2
ALL = contexts.Context()


class Ledger(NamedTuple):
    """Where the reader is."""

    amounts: Int[Array, " P"]
    pages: Int[Array, ""]
    read: Int[Array, ""]
    total: Int[Array, ""]  # of the pages read
    answer: Int[Array, ""]


def problems(count: int, seed: int, *, pages: int = PAGES) -> Problems:
    """Ledgers of 1 to ``pages`` pages with amounts 0 and 1; ``level`` is the number of pages."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, pages + 1, count)
    amounts = rng.integers(0, 2, (count, PAGES))
    answer = np.where(np.arange(PAGES) < length[:, None], amounts, 0).sum(1) % MODULUS
    found = {"amounts": amounts, "pages": length, "answer": answer}
    answers = {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}
    tokens = jnp.full((count, 1), ALPHABET.index("L"), jnp.int32)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, answers["pages"])


def asked(tasks: Problems) -> Int[np.ndarray, " B"]:
    """What a ledger shows, as one number: its pages and their amounts."""
    amounts, pages = (np.asarray(tasks.answers[name]) for name in ("amounts", "pages"))
    shown = np.where(np.arange(PAGES) < pages[:, None], amounts, 0)
    return pages * 2**PAGES + (shown << np.arange(PAGES)).sum(1)


def _step(state: Ledger, action: Array, count: Array) -> Answered:
    token, said = action[0], action[0] - FIRST_ANSWER
    answers = (said >= 0) & (said < MODULUS)
    turns = (token == READ) & (state.read < state.pages)
    amount = state.amounts[jnp.minimum(state.read, PAGES - 1)]
    after = state._replace(
        read=state.read + turns.astype(jnp.int32),
        total=jnp.where(turns, (state.total + amount) % MODULUS, state.total),
    )
    mark = jnp.where(after.read < state.pages, MORE, LAST)
    return Answered(
        state=after,
        tokens=jnp.stack([jnp.where(turns, FIRST_DIGIT + amount, 0), mark]).astype(jnp.int32),
        count=jnp.int32(2),
        reward=(answers & (said == state.answer)).astype(jnp.float32),
        done=answers,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Ledger:
    none = jnp.zeros((), jnp.int32)
    return Ledger(task["amounts"], task["pages"], none, none, task["answer"])


ENV = Env(_reset, _step, lambda state: state.read * MODULUS + state.total, action_tokens=1, observation_tokens=2)


def context_of(tokens: int | None, times: int, **how: Any) -> contexts.Context:
    """A context of so many tokens, with summaries so many times; ``how`` are further fields of ``Context``."""
    return contexts.Context(tokens, times, SUMMARY_TOKENS, (ASKED,), **how)


IMITATED = context_of(7, 4)


def expert(state: Ledger) -> Int[Array, " 1"]:
    """Turns pages to the last, then answers."""
    return jnp.where(state.read < state.pages, READ, FIRST_ANSWER + state.total)[None].astype(jnp.int32)


def right_summary(state: Ledger) -> Int[Array, " 2"]:
    """The line that says all that is needed."""
    mark = jnp.where(state.read < state.pages, MORE, LAST)
    return jnp.stack([FIRST_DIGIT + state.total, mark]).astype(jnp.int32)


class Skill(NamedTuple):
    """Chances that the behaviour to imitate does what it should; else it does anything of the kind."""

    turning: float = 0.95
    adding: float = 0.7


@lru_cache(maxsize=4)
def make_ledger(skill: Skill = Skill()) -> arenas.Arena:
    """A decoder of two layers, 512 ledgers to train on and 64 other ones; ``Skill(1.0, 1.0)`` makes no mistake."""

    def behave(state: Ledger, key: Key) -> Array:
        first, second = jax.random.split(key)
        turns = state.read < state.pages
        wise = jax.random.uniform(first) < jnp.where(turns, skill.turning, skill.adding)
        lowest = jnp.where(turns, READ, FIRST_ANSWER)
        anything = jax.random.randint(second, (1,), lowest, FIRST_ANSWER + MODULUS, jnp.int32)
        return jnp.where(wise, expert(state), anything)

    tables = arenas.drawn_apart(problems, asked, train=512, heldout=64)
    return arenas.make_arena(ENV, *tables, behave, words=len(ALPHABET), turns=TURNS)


@lru_cache(maxsize=4)
def make_played(skill: Skill = Skill(), context: contexts.Context = IMITATED) -> Callable[..., Trajectories]:
    """What ``arena.make_base`` imitates: half of the episodes seen as a whole, half with summaries.

    The total of a summary is right as often as an answer.
    """

    def summarise(state: Ledger, key: Key) -> Array:
        first, second = jax.random.split(key)
        digit = jax.random.randint(second, (), FIRST_DIGIT, FIRST_DIGIT + MODULUS, jnp.int32)
        right = right_summary(state)
        return jnp.where(jax.random.uniform(first) < skill.adding, right, right.at[0].set(digit))

    def played(arena: arenas.Arena, key: Key, rows: int) -> Trajectories:
        table = arena.train
        ids = jax.random.randint(jax.random.fold_in(key, 0), (rows,), 0, table.tokens.shape[0], jnp.int32)
        keys, half = jax.random.split(jax.random.fold_in(key, 1), rows), rows // 2
        found = []
        for seen, part in ((context, slice(half)), (ALL, slice(half, rows))):
            play = summaries.make_played(arena.env, table.answers, seen, arena.behave, summarise, max_turns=arena.turns)
            mine = ids[part]
            found.append(play(table.tokens[mine], table.valid[mine], keys[part], mine)._replace(extras={}))
        width = max(x.tokens.shape[1] for x in found)

        def wide(x: Array) -> Array:
            return x if x.ndim == 1 else jnp.pad(x, ((0, 0), (0, width - x.shape[1])))

        return jax.tree.map(lambda *x: jnp.concatenate([wide(one) for one in x]), *found)

    return played


def episodes_in_context(
    arena: arenas.Arena, context: contexts.Context, tasks: Problems, *, group_size: int
) -> Callable[..., Trajectories]:
    """Episodes with this context, in the form that is fast for many seeds."""
    return summaries.make_episodes(
        arena.policy, arena.env, tasks.answers, context, group_size=group_size, max_turns=arena.turns,
        end_ids=arena.end_ids, early_exit=seed_axis.in_turn(),
    )  # fmt: skip


def right_summaries(tasks: dict[str, Array], rows: Trajectories) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """``(right, first)``: where a summary begins, and whether it begins with the total of the pages turned so far."""
    written = rows.extras[contexts.WRITTEN]
    first = written & ~jnp.pad(written[:, :-1], ((0, 0), (1, 0)))
    turned = jnp.cumsum((rows.mask & (rows.tokens == READ)).astype(jnp.int32), axis=1)
    totals = jnp.pad(jnp.cumsum(tasks["amounts"], axis=1), ((0, 0), (1, 0))) % MODULUS
    now = jnp.take_along_axis(totals, jnp.minimum(turned, tasks["pages"][:, None]), axis=1)
    return first & (rows.tokens == FIRST_DIGIT + now), first


def measure(
    arena: arenas.Arena,
    context: contexts.Context,
    more: contexts.Context,
    params: Params,
    key: Key,
    *,
    samples: int,
    far: int,
) -> dict[str, Array]:
    """Success on the ledgers that are measured with the context of training, and with one of more summaries.

    ``eval/far``: with more summaries, ledgers of more than ``far`` pages. ``eval/context``: tokens seen at once, of the
    longest ones. ``eval/overlong``: episodes without an answer. ``eval/right_summaries``: of those that were written.
    """
    held = arena.heldout
    with jax.core.eval_context():
        ids = jnp.arange(held.tokens.shape[0], dtype=jnp.int32)

    def episodes_of(seen: contexts.Context, params: Params, key: Key):
        rows = episodes_in_context(arena, seen, held, group_size=samples)(
            params, held.tokens, held.valid, sample_keys(key, 0, ids, samples), ids
        )
        return rows, multi_turn.episode_rewards({}, rows).value

    rows, rewards = episodes_of(context, params, key)
    longer, reached = (rows, rewards) if more == context else episodes_of(more, params, key)
    tasks = jax.tree.map(lambda x: x[longer.problem_ids], held.answers)
    right, first = right_summaries(tasks, longer)
    return {
        "eval/success": reduce.scalars(rewards),
        "eval/more": reduce.scalars(reached),
        "eval/gained": reduce.scalars(reached) - reduce.scalars(rewards),
        "eval/far": reduce.scalars(reached, tasks["pages"] > far),
        "eval/summaries": reduce.scalars(contexts.summaries_of(longer).astype(jnp.float32)),
        "eval/context": jnp.max(contexts.context_sizes(longer)).astype(jnp.float32),
        "eval/overlong": reduce.scalars(rows.truncated.astype(jnp.float32)),
        "eval/right_summaries": reduce.tokens(right.astype(jnp.float32), first),
    }
