"""Parts of experiments on relational reasoning: puzzles of a calculus as token strings, worked solutions, accuracy.

A prompt is three paths of six places, on which the edges of a path lie in their order, anywhere: training fills every
place, whatever the length (``FILL`` where there is no edge). A scratchpad is, path by path, the set of relations at
each place (``FILL`` before the first edge, the last set where there is no further one; all relations for a path that is
not there); then the answer and ``END``. The calculus is RCC-8 or Allen's algebra, given by the function that makes it.

A puzzle of several paths is known by its paths, in whatever order and at whatever places: a quarter of these puzzles is
never in training, and evaluation draws from that quarter alone.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.analysis.parts import qualitative_calculi
from experiments.analysis.parts.qualitative_calculi import Calculus
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

PATHS, EDGES = 3, 6
TABLE = 2048  # training puzzles
POOL = 192  # puzzles of evaluation, of each cell
FILL, END, FIRST_SET = 13, 14, 15  # relations of either calculus are tokens below
PROMPT_TOKENS, RESPONSE_TOKENS = PATHS * EDGES, PATHS * EDGES + 2
CELLS = tuple((edges, paths) for edges in (2, 3, 4, 5, 6) for paths in (2, 3))  # that are measured
NEAR = 3  # edges of the longest path in training
TRAINED = ((1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))
Maker = Callable[[], Calculus]
OWN_ROWS = "experiments.analysis.parts.text_relations"  # opens ``Questions`` of problems of one's own


@lru_cache(maxsize=2)
def reachable(make: Maker) -> dict[int, int]:
    """Token of every set that compositions of the calculus reach."""
    calculus = make()
    size = len(calculus.names)
    known = {1 << k for k in range(size)} | {calculus.everything}
    while True:
        more = {qualitative_calculi.compose(calculus, s, 1 << k) for s in known for k in range(size)} - known
        if not more:
            return {mask: FIRST_SET + k for k, mask in enumerate(sorted(known))}
        known |= more


@lru_cache(maxsize=2)
def world(make: Maker) -> strings.World:
    """A decoder for the puzzles of a calculus."""
    vocabulary = FIRST_SET + len(reachable(make))
    return strings.make_world(vocabulary, PROMPT_TOKENS, RESPONSE_TOKENS, end=END, width=48, layers=2, heads=4)


class Table(NamedTuple):
    """Puzzles as arrays, ``[N, ...]``."""

    prompts: Array
    worked: Array
    answers: Array
    allowed: Array  # mask of the relations that at least one path allows


def held_out(edges: np.ndarray) -> bool:
    """Whether a puzzle ``[paths, length]`` is of evaluation alone; the order of its paths says nothing.

    Puzzles of one path are all of training: there are 8 of one edge, and a few dozen of two.

    >>> bool(held_out(np.array([[3, 4]]))), held_out(np.array([[1, 2], [0, 5]])) == held_out(np.array([[0, 5], [1, 2]]))
    (False, True)
    """
    paths = sorted(tuple(int(x) for x in path) for path in edges)
    return len(paths) > 1 and zlib.crc32(repr(paths).encode()) % 4 == 0


def _drawn(rng: np.random.Generator, make: Maker, cell: tuple[int, int], apart: bool) -> tuple[np.ndarray, int]:
    while True:
        edges, answer = qualitative_calculi.draw_puzzle(rng, make, length=cell[0], paths=cell[1])
        if held_out(edges) == apart:
            return edges, answer


@lru_cache(maxsize=64)
def make_table(make: Maker, cells: tuple[tuple[int, int], ...], n: int, seed: int, apart: bool = False) -> Table:
    """``n`` puzzles, every cell equally often; ``apart``: of those that training never has."""
    rng, calculus = np.random.default_rng(seed), make()
    prompts = np.full((n, PATHS, EDGES), FILL, np.int32)
    worked = np.full((n, PATHS, EDGES), reachable(make)[calculus.everything], np.int32)
    answers, allowed = np.zeros(n, np.int32), np.zeros(n, np.int32)
    for k in range(n):
        length, paths = cells[k % len(cells)]
        edges, answers[k] = _drawn(rng, make, (length, paths), apart)
        for p in range(paths):
            places = np.sort(rng.permutation(EDGES)[:length])
            sets = qualitative_calculi.closures(calculus, [int(x) for x in edges[p]])
            tokens = np.array([FILL, *(reachable(make)[s] for s in sets)], np.int32)
            prompts[k, p, places] = edges[p]
            worked[k, p] = tokens[np.searchsorted(places, np.arange(EDGES), side="right")]
            allowed[k] |= sets[-1]
    tail = np.stack([answers, np.full(n, END, np.int32)], axis=1)
    whole = np.concatenate([worked.reshape(n, -1), tail], axis=1)
    with jax.core.eval_context():  # kept for all traces, so of none of them
        return Table(*(jnp.asarray(x) for x in (prompts.reshape(n, -1), whole, answers, allowed)))


def _rows(make: Maker, key: Key, n: int) -> Table:
    table = make_table(make, TRAINED, TABLE, 0)
    ids = jax.random.randint(key, (n,), 0, TABLE, jnp.int32)
    return jax.tree.map(lambda x: x[ids], table)


def _worked(make: Maker, key: Key, n: int) -> tuple[Array, Array]:
    rows = _rows(make, key, n)
    return rows.prompts, rows.worked


def _direct(make: Maker, key: Key, n: int) -> tuple[Array, Array]:
    rows = _rows(make, key, n)
    fill = jnp.full((n, RESPONSE_TOKENS - 1), END, jnp.int32)
    return rows.prompts, jnp.concatenate([rows.answers[:, None], fill], axis=1)


@lru_cache(maxsize=2)
def draw_worked(make: Maker) -> Callable[[Key, int], tuple[Array, Array]]:
    """``draw(key, n)``: training puzzles with their scratchpads."""
    return partial(_worked, make)


@lru_cache(maxsize=2)
def draw_direct(make: Maker) -> Callable[[Key, int], tuple[Array, Array]]:
    """``draw(key, n)``: training puzzles with the answer alone."""
    return partial(_direct, make)


def answer_of(responses: Array) -> Array:
    """The token before the first ``END``; -1 without one."""
    ended = responses == END
    place = jnp.argmax(ended, axis=1)
    given = jnp.take_along_axis(responses, jnp.maximum(place - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(jnp.any(ended, axis=1) & (place > 0), given, -1)


def macro_f1(given: Array, answers: Array, size: int) -> Array:
    """Mean over the relations that are an answer of ``2 hits / (times said + times true)``.

    >>> round(float(macro_f1(jnp.array([0, 0, 1, 2]), jnp.array([0, 1, 1, 0]), 3)), 4)
    0.5833
    """
    said, true = (x[:, None] == jnp.arange(size)[None, :] for x in (given, answers))
    hits, either = (jnp.sum(x.astype(jnp.float32), axis=0) for x in (said & true, jnp.concatenate([said, true])))
    return reduce.scalars(2.0 * hits / jnp.maximum(either, 1.0), jnp.any(true, axis=0))


def pool(make: Maker, size: int) -> Table:
    """Puzzles of evaluation, ``size`` of every cell, cell by cell."""
    tables = [make_table(make, (cell,), size, 1 + k, True) for k, cell in enumerate(CELLS)]
    with jax.core.eval_context():
        return jax.tree.map(lambda *x: jnp.concatenate(x), *tables)


@lru_cache(maxsize=8)
def _measure(make: Maker, draws: int, *, given_of: Callable[..., Array]) -> Callable[[Params, Key], Metrics]:
    whole, relations = pool(make, max(draws, POOL)), len(make().names)
    each = whole.answers.shape[0] // len(CELLS)
    asked = given_of(make, whole)

    def measure(params, key):
        keys = jax.random.split(jax.random.fold_in(key, 0), len(CELLS))
        ids = jax.vmap(lambda k: jax.random.permutation(k, each)[:draws])(keys).astype(jnp.int32)
        ids = (ids + each * jnp.arange(len(CELLS), dtype=jnp.int32)[:, None]).reshape(-1)
        rows = jax.tree.map(lambda x: x[ids], whole)
        given = asked(params, rows.prompts, ids, jax.random.fold_in(key, 1))
        right = (given == rows.answers).astype(jnp.float32).reshape(len(CELLS), draws)
        relation = (given >= 0) & (given < relations)
        allowed = relation & ((rows.allowed >> jnp.where(relation, given, 0)) & 1 == 1)
        both = zip(given.reshape(right.shape), rows.answers.reshape(right.shape), strict=True)
        f1 = jnp.stack([macro_f1(*pair, relations) for pair in both])
        figures = {}
        for k, (edges, paths) in enumerate(CELLS):
            figures |= {f"k{edges}b{paths}/accuracy": reduce.scalars(right[k]), f"k{edges}b{paths}/f1": f1[k]}
        near, means = jnp.asarray([k <= NEAR for k, _ in CELLS]), jnp.mean(right, axis=1)
        inside, beyond = reduce.scalars(means, near), reduce.scalars(means, ~near)
        return figures | {
            "near/accuracy": inside,
            "far/accuracy": beyond,
            "near/f1": reduce.scalars(f1, near),
            "far/f1": reduce.scalars(f1, ~near),
            "near/room": 1.0 - inside,
            "eval/drop": inside - beyond,
            "eval/consistent": reduce.scalars(allowed.astype(jnp.float32)),
        }

    return measure


def _sampled(make: Maker, whole: Table) -> Callable[..., Array]:
    """Answers of a policy."""
    return lambda params, prompts, ids, key: answer_of(
        strings.sample(world(make), params, prompts, key, temperature=0.3)
    )


def _folded(make: Maker, whole: Table) -> Callable[..., Array]:
    """Answers of the solver, to the whole pool at once."""
    with jax.core.eval_context():
        solved = jnp.asarray([_solved(make, row) for row in np.asarray(whole.prompts)], jnp.int32)
    return lambda params, prompts, ids, key: solved[ids]


def _solved(make: Maker, prompt: np.ndarray) -> int:
    paths = [[int(x) for x in row if x != FILL] for row in prompt.reshape(PATHS, EDGES)]
    return qualitative_calculi.solved(make, [path for path in paths if path])


# ------------------------------------------------------------------ what the experiment is given


class Questions(NamedTuple):
    """Questions of several sizes of a calculus: the puzzles of this module, or problems of one's own.

    ``world(make)`` is the decoder; ``worked(make)`` and ``direct(make)`` are ``draw(key, n)`` of training questions
    with their scratchpads or with the answer alone; ``asked(make) -> (prompts [N, P], right(responses, rows) -> [B])``
    is a table of them; ``measured(make, draws)`` and ``solved(make, draws)`` measure samples of a policy, and the
    answers of a solver.
    """

    world: Callable[[Maker], strings.World]
    worked: Callable[[Maker], Callable[..., tuple[Array, Array]]]
    direct: Callable[[Maker], Callable[..., tuple[Array, Array]]]
    asked: Callable[[Maker], tuple[Array, Callable[[Array, Array], Array]]]
    measured: Callable[[Maker, int], Callable[[Params, Key], Metrics]]
    solved: Callable[[Maker, int], Callable[[Params, Key], Metrics]]


def asked(make: Maker) -> tuple[Array, Callable[[Array, Array], Array]]:
    """Training puzzles and whether responses to them are right."""
    table = make_table(make, TRAINED, TABLE, 0)
    return table.prompts, lambda responses, rows: answer_of(responses) == table.answers[rows]


def worked(questions: Questions, make: Maker) -> Callable[..., tuple[Array, Array]]:
    """Questions with their work."""
    return questions.worked(make)


def direct(questions: Questions, make: Maker) -> Callable[..., tuple[Array, Array]]:
    """Questions with the answer alone."""
    return questions.direct(make)


def make_policy_measure(questions: Questions, make: Maker, draws: int = 64) -> Callable[[Params, Key], Metrics]:
    """Accuracy in every cell, in the trained range and beyond it, and how often some path allows the answer."""
    return questions.measured(make, draws)


def make_solver_measure(questions: Questions, make: Maker, draws: int = 64) -> Callable[[Params, Key], Metrics]:
    """``make_policy_measure`` of what is right, which reads no parameters."""
    return questions.solved(make, draws)


PUZZLES = Questions(
    world, draw_worked, draw_direct, asked, partial(_measure, given_of=_sampled), partial(_measure, given_of=_folded)
)
