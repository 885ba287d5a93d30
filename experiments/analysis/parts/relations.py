"""Parts of experiments on relational reasoning: RCC-8 puzzles as token strings, their worked solutions, accuracy.

A prompt is three paths of five edges (``FILL`` where there is none). A scratchpad is, path by path, the set of
relations after each edge (the last one repeated; all relations for a path that is not there); then the answer and
``END``.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.analysis.parts import qualitative_calculi
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

PATHS, EDGES = 3, 5
TABLE = 2048  # training puzzles
FILL, END, FIRST_SET = 8, 9, 10


@lru_cache(maxsize=1)
def reachable() -> dict[int, int]:
    """Token of every set that compositions of RCC-8 reach."""
    calculus = qualitative_calculi.rcc8()
    known = {1 << k for k in range(8)} | {calculus.everything}
    while True:
        more = {qualitative_calculi.compose(calculus, s, 1 << k) for s in known for k in range(8)} - known
        if not more:
            return {mask: FIRST_SET + k for k, mask in enumerate(sorted(known))}
        known |= more


VOCABULARY = FIRST_SET + len(reachable())
PROMPT_TOKENS, RESPONSE_TOKENS = PATHS * EDGES, PATHS * EDGES + 2
WORLD = strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, end=END, width=48, layers=2, heads=4)
CELLS = ((2, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (5, 2))  # (edges, paths) that are measured
TRAINED = ((1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))


class Table(NamedTuple):
    """Puzzles as arrays, ``[N, ...]``."""

    prompts: Array
    worked: Array
    answers: Array
    allowed: Array  # mask of the relations that at least one path allows


@lru_cache(maxsize=32)
def make_table(cells: tuple[tuple[int, int], ...], n: int, seed: int) -> Table:
    """``n`` puzzles, every cell equally often."""
    rng, calculus = np.random.default_rng(seed), qualitative_calculi.rcc8()
    prompts = np.full((n, PATHS, EDGES), FILL, np.int32)
    worked = np.full((n, PATHS, EDGES), reachable()[calculus.everything], np.int32)
    answers, allowed = np.zeros(n, np.int32), np.zeros(n, np.int32)
    for k in range(n):
        length, paths = cells[k % len(cells)]
        edges, answers[k] = qualitative_calculi.draw_puzzle(rng, calculus, length=length, paths=paths, tries=100_000)
        prompts[k, :paths, :length] = edges
        for p in range(paths):
            sets = qualitative_calculi.closures(calculus, [int(x) for x in edges[p]])
            tokens = [reachable()[s] for s in sets]
            worked[k, p] = tokens + [tokens[-1]] * (EDGES - length)
            allowed[k] |= sets[-1]
    tail = np.stack([answers, np.full(n, END, np.int32)], axis=1)
    whole = np.concatenate([worked.reshape(n, -1), tail], axis=1)
    with jax.ensure_compile_time_eval():  # kept for all traces, so of none of them
        return Table(*(jnp.asarray(x) for x in (prompts.reshape(n, -1), whole, answers, allowed)))


def _rows(key: Key, n: int) -> Table:
    table = make_table(TRAINED, TABLE, 0)
    ids = jax.random.randint(key, (n,), 0, TABLE, jnp.int32)
    return jax.tree.map(lambda x: x[ids], table)


def draw_worked(key: Key, n: int) -> tuple[Array, Array]:
    """Training puzzles with their scratchpads."""
    rows = _rows(key, n)
    return rows.prompts, rows.worked


def draw_direct(key: Key, n: int) -> tuple[Array, Array]:
    """Training puzzles with the answer alone."""
    rows = _rows(key, n)
    fill = jnp.full((n, RESPONSE_TOKENS - 1), END, jnp.int32)
    return rows.prompts, jnp.concatenate([rows.answers[:, None], fill], axis=1)


def answer_of(responses: Array) -> Array:
    """The token before the first ``END``; -1 without one."""
    ended = responses == END
    place = jnp.argmax(ended, axis=1)
    given = jnp.take_along_axis(responses, jnp.maximum(place - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(jnp.any(ended, axis=1) & (place > 0), given, -1)


@lru_cache(maxsize=8)
def make_measure(draws: int = 64) -> Callable[[Params, Key], Metrics]:
    """Accuracy in every cell, in the trained range and beyond it, and how often some path allows the answer."""
    tables = [make_table((cell,), draws, 1 + k) for k, cell in enumerate(CELLS)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *tables)

    def measure(params, key):
        given = answer_of(strings.sample(WORLD, params, whole.prompts, key, temperature=0.3))
        right = (given == whole.answers).astype(jnp.float32).reshape(len(CELLS), draws)
        relation = (given >= 0) & (given < 8)
        allowed = relation & ((whole.allowed >> jnp.where(relation, given, 0)) & 1 == 1)
        found = {f"k{k}b{b}/accuracy": reduce.scalars(x) for (k, b), x in zip(CELLS, right, strict=True)}
        near = jnp.asarray([k <= 3 for k, _ in CELLS])
        means = jnp.mean(right, axis=1)
        inside, beyond = reduce.scalars(means, near), reduce.scalars(means, ~near)
        return found | {
            "near/accuracy": inside,
            "far/accuracy": beyond,
            "eval/drop": inside - beyond,
            "eval/consistent": reduce.scalars(allowed.astype(jnp.float32)),
        }

    return measure
