"""Workflows for an executor that solves chains of sums and errs: short programs that a meta-agent writes.

An item is a chain of steps modulo 10. Every step errs with a chance of its own and then adds a number from 1 to 9, so a
solved chain is off by nothing with chance ``0.1 + 0.9 (1 - 10 e / 9)^n`` and by each other number equally often. What
helps differs between executors and stands nowhere: decomposing, a calculator and verifying are good or bad.

A program is up to six of these letters: ``s`` solves (price 1); ``d`` decomposes and ``c`` takes a calculator (1 each),
which change the errors from there on, and decomposed solving costs 2; ``v`` verifies and solves again what it rejects
(1 and a solve); ``w`` and ``W`` solve 3 and 5 times and take the majority of all answers so far; ``.`` stops. A program
above the executor's limit, or with anything else in it, answers nothing.

A context is ``57:`` (chains of 5 steps, limit 7) and a window of earlier programs, the last at its end, each with the
tenth of its validation accuracy and whether that rose, fell or neither: ``dcs...6+``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Key

ALPHABET = "_sdcvwW.0123456789:+-="  # the first is padding
SOLVE, DECOMPOSE, CALCULATOR, VERIFY, VOTE3, VOTE5, STOP = (ALPHABET.index(c) for c in "sdcvwW.")
LENGTH, WINDOW, ENTRY = 6, 3, 8  # tokens of a program, entries of a context, tokens of an entry
PROMPT = 3 + WINDOW * ENTRY
WORLD = strings.make_world(len(ALPHABET), PROMPT, LENGTH, end=STOP, layers=2)
LIMITS, CHAINS = (4, 6, 9), (3, 6)  # of the executors: what a program may cost; fewest and most steps
WRITTEN = "sssssdddcccvvwwWW"  # what the untaught meta-agent writes, each letter as often


class Executor(NamedTuple):
    """A solver of chains; a table of them has a leading axis."""

    steps: Int[Array, "..."]  # of a chain
    limit: Int[Array, "..."]  # of the cost of a program
    error: Float[Array, "..."]  # of a step, when all are done in one go
    decomposed: Float[Array, "..."]  # factors of the error
    calculator: Float[Array, "..."]
    finds: Float[Array, "..."]  # chance that verifying rejects a wrong answer
    alarms: Float[Array, "..."]  # that it rejects a right one


def encode(text: str, length: int = LENGTH) -> list[int]:
    """One token a character, then stops.

    >>> encode("cs")
    [3, 1, 7, 7, 7, 7]
    """
    return [ALPHABET.index(c) for c in text.ljust(length, ".")]


def executors(count: int, seed: int, *, limits: tuple[int, ...] = LIMITS, chains: tuple[int, int] = CHAINS) -> Executor:
    """Executors, each of whose three means is good or bad, by even chances.

    Args:
      limits: what a program may cost, one of them each.
      chains: their fewest and most steps. A context has one digit for these and for the limit.
    """
    least, most = chains
    if not (1 <= least <= most <= 9 and limits and all(1 <= limit <= 9 for limit in limits)):
        raise UserError(f"--limits {limits} --chains {chains}: numbers of 1 to 9, of chains the fewest steps first")
    rng = np.random.default_rng(seed)
    good = rng.random((3, count)) < 0.5
    tables = (
        rng.integers(least, most + 1, count),
        rng.choice(limits, count),
        rng.uniform(0.1, 0.25, count),
        np.where(good[0], 0.4, 1.3),
        np.where(good[1], 0.3, 2.0),
        np.where(good[2], 0.9, 0.5),
        np.where(good[2], 0.1, 0.5),
    )
    return Executor(*(jnp.asarray(x, jnp.int32 if i < 2 else jnp.float32) for i, x in enumerate(tables)))


def solve_chance(error: Float[Array, ""], steps: Int[Array, ""]) -> Float[Array, ""]:
    """The chance that a chain comes out right: ``0.1 + 0.9 (1 - 10 e / 9)^n``, errors of steps may cancel."""
    kept = 1.0 - jnp.clip(error, 0.0, 0.9) / 0.9
    return 0.1 + 0.9 * kept ** steps.astype(jnp.float32)


def cost(program: Int[Array, " A"]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The price of a program for one item, and whether it consists of letters of the language.

    >>> [int(cost(jnp.array(encode(p)))[0]) for p in ("s", "csw", "dcsw", "dsv")]
    [1, 5, 10, 6]
    """
    ended = jnp.cumsum((program == STOP).astype(jnp.int32)) > 0
    price = 1 + (jnp.cumsum(((program == DECOMPOSE) & ~ended).astype(jnp.int32)) > 0).astype(jnp.int32)
    one = {SOLVE: price, VOTE3: 3 * price, VOTE5: 5 * price, VERIFY: 1 + price}
    paid = ((program == DECOMPOSE) | (program == CALCULATOR)).astype(jnp.int32)
    for letter, value in one.items():
        paid = jnp.where(program == letter, value, paid)
    known = (program >= SOLVE) & (program <= STOP)
    return jnp.sum(jnp.where(ended, 0, paid)), jnp.all(known | ended)


class _Item(NamedTuple):
    """What the executor has of each of ``I`` items."""

    decomposed: Array
    calculates: Array
    stopped: Array
    answer: Array  # [I] how far off the last answer is; -1: none
    votes: Array  # [I, 10] all answers so far


def _letter(executor: Executor, at: _Item, given: tuple[Array, Array]) -> tuple[_Item, None]:
    """One letter of a program; the uniforms ``[I, 7]`` are for five solutions, a verdict and a tie."""
    letter, drawn = given
    acts = ~at.stopped & (letter != STOP)
    factor = jnp.where(at.decomposed, executor.decomposed, 1.0) * jnp.where(at.calculates, executor.calculator, 1.0)
    chance = solve_chance(executor.error * factor, executor.steps)
    solved = drawn[:, :5]
    wrong = 1 + jnp.clip(jnp.floor((solved - chance) / (1.0 - chance) * 9.0), 0.0, 8.0).astype(jnp.int32)
    fresh = jnp.where(solved < chance, 0, wrong)

    rejects = drawn[:, 5] < jnp.where(at.answer == 0, executor.alarms, executor.finds)
    anew = (letter == SOLVE) | ((letter == VERIFY) & (at.answer >= 0) & rejects)
    votes = jnp.where(letter == VOTE3, 3, jnp.where(letter == VOTE5, 5, 0))
    counted = jnp.maximum(votes, anew.astype(jnp.int32))[:, None] > jnp.arange(5, dtype=jnp.int32)[None, :]
    number = jnp.arange(10, dtype=jnp.int32)
    said = (fresh[:, :, None] == number[None, None, :]) & counted[:, :, None]
    pool = at.votes + jnp.sum(said.astype(jnp.float32), axis=1)
    # of equally many votes the last from a random number on wins: the right answer has no place of its own
    turned = (number[None, :] + jnp.floor(10.0 * drawn[:, 6:]).astype(jnp.int32)) % 10
    most = jnp.argmax(pool + 0.05 * turned.astype(jnp.float32), axis=1).astype(jnp.int32)
    answer = jnp.where(votes > 0, most, jnp.where(anew, fresh[:, 0], at.answer))
    return _Item(
        at.decomposed | (acts & (letter == DECOMPOSE)),
        at.calculates | (acts & (letter == CALCULATOR)),
        ~acts,
        jnp.where(acts, answer, at.answer),
        jnp.where(acts, pool, at.votes),
    ), None


def accuracy(executor: Executor, program: Int[Array, " A"], noise: Float[Array, "A I 7"]) -> Float[Array, ""]:
    """The share of ``I`` chains that a program gets right on one executor."""
    no, items = jnp.zeros((), bool), noise.shape[1]
    start = _Item(no, no, no, jnp.full((items,), -1, jnp.int32), jnp.zeros((items, 10), jnp.float32))
    end, _ = jax.lax.scan(lambda at, x: _letter(executor, at, x), start, (program, noise))
    paid, known = cost(program)
    right = jnp.sum((end.answer == 0).astype(jnp.float32)) / items
    return jnp.where(known & (paid <= executor.limit), right, 0.0)


def accuracies(table: Executor, programs: Int[Array, "N A"], key: Key, *, items: int) -> Float[Array, " N"]:
    """``accuracy`` of one program on each executor, with ``items`` chains of its own."""
    # drawn in one piece: inside the loop the compiler would take ten times as long
    noise = jax.random.uniform(key, (*programs.shape, items, 7))
    return jax.vmap(accuracy)(table, programs, noise)


def can_run(table: Executor, programs: Int[Array, "N A"]) -> Bool[Array, " N"]:
    """Within the limit, in the language."""
    paid, known = jax.vmap(cost)(programs)
    return known & (paid <= table.limit)


def told(programs: Int[Array, "N A"], scores: Float[Array, " N"], before: Float[Array, " N"]) -> Int[Array, "N S"]:
    """The entry of a program in later contexts: itself, the tenth of its accuracy, ``+``, ``-`` or ``=``."""
    tenth = ALPHABET.index("0") + jnp.minimum(jnp.floor(10.0 * scores + 1e-4), 9.0).astype(jnp.int32)
    rose, fell, same = (jnp.int32(ALPHABET.index(c)) for c in "+-=")
    trend = jnp.where(scores > before, rose, jnp.where(scores < before, fell, same))
    return jnp.concatenate([programs, tenth[:, None], trend[:, None]], axis=1)


def contexts(table: Executor, entries: Int[Array, "N W S"]) -> Int[Array, "N P"]:
    """What the meta-agent reads: steps, limit, and the window of entries."""
    digit, colon = ALPHABET.index("0"), jnp.full(table.steps.shape, ALPHABET.index(":"), jnp.int32)
    head = jnp.stack([digit + table.steps, digit + table.limit, colon], axis=1)
    return jnp.concatenate([head, entries.reshape(entries.shape[0], -1)], axis=1)


def scribble(contexts: Int[Array, "N P"], key: Key, samples: int) -> Int[Array, "R A"]:
    """The behaviour to imitate: one to five letters of ``WRITTEN`` whatever was told, ``samples`` to each context."""
    which, lengths = jax.random.split(key)
    rows = contexts.shape[0] * samples
    letters = jnp.asarray(encode(WRITTEN, 0), jnp.int32)
    drawn = letters[jax.random.randint(which, (rows, LENGTH), 0, letters.shape[0], jnp.int32)]
    size = jax.random.randint(lengths, (rows, 1), 1, LENGTH, jnp.int32)
    return jnp.where(jnp.arange(LENGTH, dtype=jnp.int32)[None, :] < size, drawn, STOP)
