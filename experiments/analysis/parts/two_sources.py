"""A pool of two sources for what training adds to a base: running sums, and runs of a machine of as many states.

A problem is a digit below 7 and seven inputs, its answer the seven states behind them. Inputs below 7 are digits, and
the next state is the running sum modulo 7, as in ``beyond_base``; inputs from 7 on are letters, each a map ``s -> a s +
b`` modulo 7 that has an inverse, and their order counts. Half of the problems are of each source. Inputs 4 to 6 of
either are unfamiliar; kinds and parities are those of ``beyond_base``, so that no problem of evaluation trains.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.analysis.parts import beyond_base
from experiments.analysis.parts.beyond_base import DIGITS, FAMILIAR, POOL, SLIPS, STRANGE_SLIPS
from experiments.parts import strings
from experiments.parts.running_sums_task import MODULUS
from jaxrl_llm.types import Key

MAPS = ((3, 1), (2, 4), (5, 0), (6, 3), (4, 5), (3, 6), (2, 2))  # (a, b) of each letter


def machine(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Problems of the machine."""
    return prompts[:, 1] >= MODULUS


def worked(prompts: Int[Array, "N P"], slips: Int[Array, "N T"]) -> Int[Array, "N T"]:
    """The states behind the inputs, each ``slips`` too high, from which it goes on.

    >>> sums, runs = [3, 6, 5], [3, 7 + 0, 7 + 1]  # 3 * 3 + 1 = 10, 2 * 3 + 4 = 10
    >>> worked(jnp.array([sums, runs, runs]), jnp.array([[0, 0], [0, 0], [1, 0]])).tolist()
    [[2, 0], [3, 3], [4, 5]]
    """
    of_machine, given = machine(prompts), prompts[:, 1:] % MODULUS
    maps, state, states = jnp.asarray(MAPS, jnp.int32), prompts[:, 0], []
    for k in range(given.shape[1]):
        mapped = maps[given[:, k], 0] * state + maps[given[:, k], 1]
        state = (jnp.where(of_machine, mapped, state + given[:, k]) + slips[:, k]) % MODULUS
        states.append(state)
    return jnp.stack(states, axis=1).astype(jnp.int32)


def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The states behind the inputs."""
    return worked(prompts, jnp.zeros((prompts.shape[0], prompts.shape[1] - 1), jnp.int32))


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """The whole answer: every state is right."""
    return jnp.all(responses == solution(prompts), axis=1)


def _lettered(key: Key, digits: Int[Array, "N P"]) -> Int[Array, "N P"]:
    of_machine = jax.random.bernoulli(key, 0.5, (digits.shape[0], 1))
    inputs = (jnp.arange(DIGITS) > 0)[None, :]
    return jnp.where(of_machine & inputs, digits + MODULUS, digits)


def draw_problems(key: Key, n: int, kinds: tuple[int, ...] = POOL) -> Int[Array, "N P"]:
    """Problems of training, of these kinds and of both sources alike often."""
    return _lettered(jax.random.fold_in(key, 1), beyond_base.draw_problems(jax.random.fold_in(key, 0), n, kinds))


def draw_fresh(key: Key, n: int) -> Int[Array, "N P"]:
    """Problems of evaluation, of all kinds and of both sources: training never draws one of them."""
    return _lettered(jax.random.fold_in(key, 1), beyond_base.draw_fresh(jax.random.fold_in(key, 0), n))


def draw_attempts(key: Key, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: problems of all kinds with slips, each carried on, most of them at unfamiliar inputs."""
    keys = jax.random.split(key, 3)
    prompts = draw_problems(keys[0], n)
    chance = jnp.where(prompts[:, 1:] % MODULUS >= FAMILIAR, STRANGE_SLIPS, SLIPS)
    offsets = jax.random.randint(keys[2], chance.shape, 1, MODULUS, jnp.int32)
    return prompts, worked(prompts, jnp.where(jax.random.bernoulli(keys[1], chance), offsets, 0))


def easy(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Problems without an unfamiliar input."""
    return jnp.all(prompts % MODULUS < FAMILIAR, axis=1)


MIXED = beyond_base.Pool(
    strings.make_world(2 * MODULUS, DIGITS, DIGITS - 1, width=48, heads=4),
    draw_problems, draw_fresh, right, solution, draw_attempts, easy,
)  # fmt: skip
