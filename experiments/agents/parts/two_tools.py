"""Sums over a hidden table as an arena with two tools: entries are looked up, the calculator does the rest.

The prompt ``a+b=`` asks for a sum, difference or product of two entries, modulo 10, of a table that differs in every
task; ``a+0=`` for an entry, for which a look-up is enough, and ``3+4=`` for a sum of numbers, for which the calculator
is. An action is the name of an entry (answered ``3=``), an expression ``3+4`` for the calculator (``7=``), or an
answer, ``A`` to ``J`` for 0 to 9, which ends the episode: reward 1 where it is right. Anything else is answered ``!=``.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts import calculator
from experiments.agents.parts.arena import Arena, drawn_apart, make_arena
from experiments.agents.parts.lookup import calls
from jaxrl_llm import reduce
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, observations, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

ENTITIES = 6
NAMES = "abcdef"
ALPHABET = calculator.ALPHABET + NAMES
FIRST_NAME = ALPHABET.index("a")
FIRST_DIGIT, FIRST_SIGN, FIRST_ANSWER = calculator.FIRST_DIGIT, calculator.FIRST_SIGN, calculator.FIRST_ANSWER
PROMPT, WRITTEN = 4, 3
ENDS = (*calculator.ANSWERS, *range(FIRST_NAME, FIRST_NAME + ENTITIES))


class Sum(NamedTuple):
    """A question, the entries seen so far and the calculator's last value, 10 before the first.

    Operands that are numbers, and no entries, are ``ENTITIES`` and more: ``ENTITIES + 3`` is 3.
    """

    asked: Int[Array, " 2"]
    sign: Int[Array, ""]
    table: Int[Array, " E"]
    seen: Bool[Array, " E"]
    computed: Int[Array, ""]


def problems(count: int, seed: int, *, alone: float = 0.0) -> Problems:
    """Questions with tables of their own, over two different entries.

    Args:
      alone: share of questions for which one tool is enough, the look-up of an entry or the calculator, by turns.
    """
    rng = np.random.default_rng(seed)
    asked = np.stack([rng.permutation(ENTITIES)[:2] for _ in range(count)])
    sign, table = FIRST_SIGN + rng.integers(0, 3, count), rng.integers(0, 10, (count, ENTITIES))
    chance, digits = rng.random(count), ENTITIES + rng.integers(0, 10, (count, 2))
    entry, numbers = chance < alone / 2, (chance >= alone / 2) & (chance < alone)
    asked = np.where(numbers[:, None], digits, asked)
    asked[:, 1] = np.where(entry, ENTITIES, asked[:, 1])  # and 0
    sign = np.where(entry, FIRST_SIGN, sign)
    words = np.where(asked < ENTITIES, FIRST_NAME + asked, FIRST_DIGIT + asked - ENTITIES)
    columns = [words[:, 0], sign, words[:, 1], np.full(count, calculator.EQUALS)]
    tokens = jnp.asarray(np.stack(columns, axis=1), jnp.int32)
    answers = {name: jnp.asarray(x, jnp.int32) for name, x in (("asked", asked), ("sign", sign), ("table", table))}
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, jnp.full((count,), 2, jnp.int32))


def what_is_asked(tasks: Problems) -> Int[np.ndarray, " B"]:
    """What a question asks, as one number: its words, and the entries of the table that they name."""
    asked, sign, table = (np.asarray(tasks.answers[name]) for name in ("asked", "sign", "table"))
    entries = np.take_along_axis(table, np.minimum(asked, ENTITIES - 1), axis=1)
    first, second = np.where(asked < ENTITIES, asked * 10 + entries, 10 * ENTITIES + asked).T
    return (first * 100 + second) * len(ALPHABET) + sign


def operands(state: Sum) -> Int[Array, " 2"]:
    """What is to be calculated with."""
    entries = state.table[jnp.minimum(state.asked, ENTITIES - 1)]
    return jnp.where(state.asked < ENTITIES, entries, state.asked - ENTITIES)


def missing(state: Sum) -> Bool[Array, " 2"]:
    """Which operands are entries that were not looked up yet."""
    return (state.asked < ENTITIES) & ~state.seen[jnp.minimum(state.asked, ENTITIES - 1)]


def needed(state: Sum) -> Int[Array, " 3"]:
    """The expression that the calculator has to be given."""
    first, second = operands(state)
    return jnp.stack([FIRST_DIGIT + first, state.sign, FIRST_DIGIT + second]).astype(jnp.int32)


def no_calculator(expression: Int[Array, " W"]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """In the place of ``calculator.calculate``: every expression is an error, and sums are to be done in the head."""
    return jnp.zeros((), jnp.int32), jnp.zeros((), bool)


def _step(calculate: Callable[..., tuple[Array, Array]], state: Sum, action: Array, count: Array) -> Answered:
    named, said = action[0] - FIRST_NAME, action[0] - FIRST_ANSWER
    alone = count == 1
    looks, answers = alone & (named >= 0) & (named < ENTITIES), alone & (said >= 0) & (said < 10)
    value, fine = calculate(action)
    computes = (count == WRITTEN) & fine
    shown = FIRST_DIGIT + jnp.where(looks, state.table[jnp.clip(named, 0, ENTITIES - 1)], value)
    shown = jnp.where(looks | computes, shown, calculator.ERROR)
    return Answered(
        state=state._replace(
            seen=state.seen | (looks & (jnp.arange(ENTITIES, dtype=jnp.int32) == named)),
            computed=jnp.where(computes, value, state.computed).astype(jnp.int32),
        ),
        tokens=jnp.stack([shown, jnp.int32(calculator.EQUALS)]).astype(jnp.int32),
        count=jnp.int32(2),
        reward=(answers & (said == calculator.calculate(needed(state))[0])).astype(jnp.float32),
        done=answers,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Sum:
    nothing = jnp.zeros((ENTITIES,), bool)
    return Sum(task["asked"], task["sign"], task["table"], nothing, jnp.full((), 10, jnp.int32))


def _identity(state: Sum) -> Array:
    bits = jnp.sum(state.seen.astype(jnp.int32) * 2 ** jnp.arange(ENTITIES, dtype=jnp.int32), dtype=jnp.int32)
    return bits * 11 + state.computed


def make_env(calculate: Callable[..., tuple[Array, Array]] = calculator.calculate) -> Env:
    """The world; ``calculate(action) -> (value, fine)`` is its calculator, or ``no_calculator``."""
    return Env(_reset, partial(_step, calculate), _identity, WRITTEN, 2)


def conduct(rows: Trajectories) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    """``(well_formed, both)``: an answer was given and no action was malformed; both tools were called."""
    errors = jnp.any(observations(rows, prompt_tokens=PROMPT) & (rows.tokens == calculator.ERROR), axis=1)
    looked = jnp.any(rows.mask & (rows.tokens >= FIRST_NAME), axis=1)
    # a sign outside of an expression is malformed
    computed = jnp.any(rows.mask & (rows.tokens >= FIRST_SIGN) & (rows.tokens < FIRST_ANSWER), axis=1)
    well_formed = turns_of(rows).done & ~errors
    return well_formed, well_formed & looked & computed


def score_by_conduct(*, bonus: float):
    """The ``score`` slot: the hierarchical reward of an episode, see ``shaping.multi_tool_rewards``."""

    def score(answers: dict[str, Array], rows: Trajectories) -> Rewards:
        found, (well_formed, both) = turns_of(rows), conduct(rows)
        accuracy = jnp.sum(found.reward, axis=1)
        return Rewards(shaping.multi_tool_rewards(accuracy, well_formed, both, bonus=bonus), found.valid)

    return score


def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """Shares of episodes that call both tools and that are malformed; calls of an episode."""
    found, (well_formed, both) = turns_of(rows), conduct(rows)
    return {
        "eval/both": reduce.scalars(both.astype(jnp.float32)),
        "eval/malformed": reduce.scalars(1.0 - well_formed.astype(jnp.float32)),
        "eval/calls": reduce.scalars(calls(found).astype(jnp.float32)),
    }


@lru_cache(maxsize=8)
def make_two_tools(
    *,
    turns: int = 4,
    diligence: float = 0.5,
    slips: float = 0.1,
    hurry: float = 0.2,
    alone: float = 0.0,
    calculate: Callable[..., tuple[Array, Array]] = calculator.calculate,
) -> Arena:
    """A decoder of two layers, 512 questions to train on and 64 that are measured, which ask for other things.

    Args:
      turns: one more than the calls that an episode may have.
      diligence: chance that the behaviour to imitate gives the expression to the calculator; else it guesses, or says
        the entry that was asked for.
      slips: chance that a token of an expression is any digit or sign.
      hurry: chance that it guesses before it has looked up.
      alone: share of questions for which one tool is enough.
      calculate: as in ``make_env``; without a calculator the behaviour should have no ``diligence``.
    """

    def behave(state: Sum, key: Key) -> Array:
        keys = jax.random.split(key, 5)
        guess = FIRST_ANSWER + jax.random.randint(keys[0], (), 0, 10, jnp.int32)
        anything = jax.random.randint(keys[1], (WRITTEN,), FIRST_DIGIT, FIRST_ANSWER, jnp.int32)
        written = jnp.where(jax.random.uniform(keys[2], (WRITTEN,)) < slips, anything, needed(state))
        absent = missing(state)
        looked = FIRST_NAME + jnp.where(absent[0], state.asked[0], state.asked[1])
        first = jnp.where(jax.random.uniform(keys[3]) < hurry, guess, looked)
        known = state.computed < 10
        entry = (state.asked[0] < ENTITIES) & (state.asked[1] == ENTITIES)  # and 0
        said = jnp.where(known, state.computed, operands(state)[0])
        last = jnp.where(known | entry, FIRST_ANSWER + said, guess)
        computes = ~jnp.any(absent) & ~known & (jax.random.uniform(keys[4]) < diligence)
        spoken = jnp.where(jnp.any(absent), first, last).astype(jnp.int32)
        return jnp.where(computes, written, jnp.full((WRITTEN,), spoken, jnp.int32))

    more = {"words": len(ALPHABET), "turns": turns, "end_ids": ENDS}
    tables = drawn_apart(partial(problems, alone=alone), what_is_asked, train=512, heldout=64)
    return make_arena(make_env(calculate), *tables, behave, **more)
