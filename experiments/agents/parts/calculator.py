"""Chains of arithmetic beside a calculator, as an arena: an expression may be written for it, or the answer guessed.

The prompt ``3+4*2=`` asks for the value from left to right, modulo 10. Five tokens without an answer among them are a
call: the calculator shows ``4=`` for the expression ``3+4*2`` and ``!=``, an error, for what is none. Calls beyond the
first ``C`` are not executed: nothing is shown and the text goes on. ``A`` to ``J`` answer 0 to 9 and end the episode:
reward 1 where it is right.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts import lookup
from experiments.agents.parts.arena import Arena, make_arena
from jaxrl_llm import reduce
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env, observations, turns_of
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

ALPHABET = "_0123456789+-*ABCDEFGHIJ!="  # the first is padding
FIRST_DIGIT, FIRST_SIGN, FIRST_ANSWER = (ALPHABET.index(c) for c in "0+A")
ERROR, EQUALS = (ALPHABET.index(c) for c in "!=")
WRITTEN = 5  # tokens of an expression
ANSWERS = tuple(range(FIRST_ANSWER, FIRST_ANSWER + 10))


class Chain(NamedTuple):
    """A question and what the calculator has said; ``shown`` is its last value, 10 an error, -1 nothing yet."""

    written: Int[Array, " W"]
    value: Int[Array, ""]
    calls: Int[Array, ""]
    shown: Int[Array, ""]


def calculate(expression: Int[Array, " W"]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """``(value modulo 10, whether it is an expression)`` of digits and signs in turn, from left to right.

    >>> import jax.numpy as jnp
    >>> [int(x) for x in calculate(jnp.array([ALPHABET.index(c) for c in "3+4*2"]))]
    [4, 1]
    """
    digits, signs = expression[0::2] - FIRST_DIGIT, expression[1::2] - FIRST_SIGN
    fine = jnp.all((digits >= 0) & (digits < 10)) & jnp.all((signs >= 0) & (signs < 3))
    value = digits[0]
    for k in range(signs.shape[0]):
        after = jnp.stack([value + digits[k + 1], value - digits[k + 1], value * digits[k + 1]])
        value = after[jnp.clip(signs[k], 0, 2)] % 10
    return jnp.where(fine, value, 0).astype(jnp.int32), fine


def problems(first: int, last: int) -> Problems:
    """Some of the 9000 chains of three digits, numbered in a random order."""
    order = np.random.default_rng(0).permutation(9000)[first:last]
    count, sizes = order.shape[0], (10, 3, 10, 3, 10)
    chosen = np.stack(np.unravel_index(order, sizes), axis=1)
    starts = [FIRST_DIGIT if size == 10 else FIRST_SIGN for size in sizes]
    tokens = np.concatenate([chosen + np.asarray(starts)[None, :], np.full((count, 1), EQUALS)], axis=1)
    tokens = jnp.asarray(tokens, jnp.int32)
    written = tokens[:, :WRITTEN]
    value, _ = jax.vmap(calculate)(written)
    answers = {"written": written, "value": value}
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, jnp.full((count,), 2, jnp.int32))


def make_env(*, calls: int) -> Env:
    """The world in which the first ``calls`` calls of an episode are executed; with 0 it has no calculator."""
    if calls < 0:
        raise ValueError(f"calls={calls} must not be negative")

    def step(state: Chain, action: Array, count: Array) -> Answered:
        said = action[jnp.maximum(count - 1, 0)] - FIRST_ANSWER
        answers = (said >= 0) & (said < 10)
        executed = ~answers & (state.calls < calls)
        value, fine = calculate(action)
        shown = jnp.where(fine, value, 10)
        return Answered(
            state=Chain(
                state.written,
                state.value,
                state.calls + executed.astype(jnp.int32),
                jnp.where(executed, shown, state.shown).astype(jnp.int32),
            ),
            tokens=jnp.stack([jnp.where(fine, FIRST_DIGIT + value, ERROR), jnp.int32(EQUALS)]).astype(jnp.int32),
            count=jnp.where(executed, 2, 0).astype(jnp.int32),
            reward=(answers & (said == state.value)).astype(jnp.float32),
            done=answers,
            valid=jnp.ones((), bool),
        )

    def reset(key: Key, task: dict[str, Array]) -> Chain:
        return Chain(task["written"], task["value"], jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32))

    return Env(reset, step, lambda state: state.calls * 12 + state.shown + 1, WRITTEN, 2)


def outputs(rows: Trajectories) -> Bool[Array, "B T"]:
    """The calculator's tokens: forced, outside the mask."""
    return observations(rows, prompt_tokens=WRITTEN + 1)


def failed(rows: Trajectories) -> Bool[Array, " B"]:
    """Whether a call of the episode was answered by an error."""
    return jnp.any(outputs(rows) & (rows.tokens == ERROR), axis=1)


def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """Shares of episodes in which a call was written, and of executed calls without an error."""
    found, shown = turns_of(rows), outputs(rows)
    executed = (shown & (rows.tokens == EQUALS)).reshape(-1)
    errors = (shown & (rows.tokens == ERROR)).astype(jnp.float32).reshape(-1)
    # an error stands one token before the sign that closes what is shown
    return {
        "eval/code": reduce.scalars((lookup.calls(found) > 0).astype(jnp.float32), rewards.valid),
        "eval/passed": reduce.scalars(1.0 - jnp.pad(errors[:-1], (1, 0)), executed),
    }


@lru_cache(maxsize=8)
def make_calculator(*, calls: int, turns: int = 3, code: float = 0.4, skill: float = 0.8, slips: float = 0.1) -> Arena:
    """A decoder of two layers and 512 chains to train on; arenas of one number of turns share the decoder.

    Args:
      calls: how many calls are executed.
      code: chance that the behaviour to imitate writes a call where it knows nothing; else it guesses.
      skill: chance that it believes what the calculator shows; else it guesses.
      slips: chance that a token of its expression is any digit or sign.
    """

    def behave(state: Chain, key: Key) -> Array:
        keys = jax.random.split(key, 5)
        anything = jax.random.randint(keys[0], (WRITTEN,), FIRST_DIGIT, FIRST_ANSWER, jnp.int32)
        slipped = jnp.where(jax.random.uniform(keys[1], (WRITTEN,)) < slips, anything, state.written)
        guess = jax.random.randint(keys[2], (), 0, 10, jnp.int32)
        known = (state.shown >= 0) & (state.shown < 10)
        said = jnp.where(known & (jax.random.uniform(keys[3]) < skill), state.shown, guess)
        spoken = jnp.full((WRITTEN,), FIRST_ANSWER + said, jnp.int32)
        return jnp.where(~known & (jax.random.uniform(keys[4]) < code), slipped, spoken)

    more = {"words": len(ALPHABET), "turns": turns, "end_ids": ANSWERS}
    return make_arena(make_env(calls=calls), problems(64, 576), problems(0, 64), behave, **more)
