"""Two search problems as token strings with search traces: Countdown of three numbers, and 4 x 4 Sudoku.

A trace is ``b`` wrong branches, each opened at the start and closed by ``BACK``, and then a path to the solution. Only
what follows the last ``BACK`` is judged. Problems are drawn by NumPy into tables; the judges are pure JAX.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

LARGEST = 40  # numbers 0 .. 40 are their own tokens
PLUS, MINUS, TIMES, BACK, COUNTDOWN, SUDOKU, PAD, END = range(LARGEST + 1, LARGEST + 9)
VOCABULARY = END + 1
BLANKS = 6  # of a sudoku
PROMPT_TOKENS, RESPONSE_TOKENS = 17, 42
MAX_BACK = 6
OPERATORS: dict[int, Callable[[int, int], int]] = {
    PLUS: lambda a, b: a + b, MINUS: lambda a, b: a - b, TIMES: lambda a, b: a * b,
}  # fmt: skip


class Puzzle(NamedTuple):
    """Prompt tokens, the path that solves it, and a generator of wrong branches: ``(rng) -> tokens``."""

    prompt: list[int]
    path: list[int]
    wrong: Callable[[np.random.Generator], list[int]]


def _steps(numbers: tuple[int, ...]):
    """Every step ``a ? b = c`` on two of the numbers, as tokens, with the numbers that are left."""
    for i, j in permutations(range(len(numbers)), 2):
        for operator, apply in OPERATORS.items():
            c = apply(numbers[i], numbers[j])
            if 0 < c <= LARGEST and (operator == MINUS or i < j):
                rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
                yield [numbers[i], operator, numbers[j], c], (*rest, c)


def make_countdown(rng: np.random.Generator) -> Puzzle:
    """Three numbers up to 9 and a target that some two steps reach; wrong branches begin with a step that cannot."""
    while True:
        numbers = tuple(int(n) for n in rng.integers(1, 10, 3))
        target = int(rng.integers(10, LARGEST + 1))
        paths, dead = [], []
        for first, rest in _steps(numbers):
            ends = [first + second for second, left in _steps(rest) if left == (target,)]
            paths += ends
            dead += [] if ends else [first]
        if paths and dead:
            break
    path = paths[int(rng.integers(len(paths)))]
    prompt = [COUNTDOWN, *numbers, target] + [PAD] * (PROMPT_TOKENS - 5)
    return Puzzle(prompt, path, lambda r: dead[int(r.integers(len(dead)))])


@lru_cache(maxsize=1)
def sudoku_grids() -> list[tuple[int, ...]]:
    """All 288 solved grids."""
    grids: list[tuple[int, ...]] = []

    def fill(cells: tuple[int, ...]) -> None:
        if len(cells) == 16:
            grids.append(cells)
            return
        for value in range(1, 5):
            if _fits(cells, len(cells), value):
                fill((*cells, value))

    fill(())
    return grids


def _fits(cells, place: int, value: int) -> bool:
    row, column = divmod(place, 4)
    for other, v in enumerate(cells):
        r, c = divmod(other, 4)
        same = r == row or c == column or (r // 2 == row // 2 and c // 2 == column // 2)
        if other != place and v == value and same:
            return False
    return True


def _completions(cells: list[int], blanks: list[int]) -> list[list[int]]:
    """All ways to fill the blanks in their order."""
    if not blanks:
        return [[]]
    out = []
    for value in range(1, 5):
        if _fits(cells, blanks[0], value):
            after = list(cells)
            after[blanks[0]] = value
            out += [[value, *rest] for rest in _completions(after, blanks[1:])]
    return out


def make_sudoku(rng: np.random.Generator) -> Puzzle:
    """A grid with ``BLANKS`` blanks (0) and one solution; the path is their values in reading order.

    A wrong branch places fitting values until none fits the next blank, or the third is placed.
    """
    grids = sudoku_grids()
    while True:
        solved = list(grids[int(rng.integers(len(grids)))])
        blanks = sorted(int(k) for k in rng.permutation(16)[:BLANKS])
        cells = [0 if k in blanks else v for k, v in enumerate(solved)]
        open_first = [v for v in range(1, 5) if _fits(cells, blanks[0], v) and v != solved[blanks[0]]]
        if open_first and len(_completions(cells, blanks)) == 1:
            break

    def wrong(r: np.random.Generator) -> list[int]:
        now, out = list(cells), []
        for depth, blank in enumerate(blanks[:3]):
            fitting = [v for v in range(1, 5) if _fits(now, blank, v)]
            choices = open_first if depth == 0 else fitting
            if not choices:
                break
            now[blank] = choices[int(r.integers(len(choices)))]
            out.append(now[blank])
        return out

    return Puzzle([SUDOKU, *cells], [solved[k] for k in blanks], wrong)


def write(rng: np.random.Generator, puzzle: Puzzle, back: int) -> list[int]:
    """Exactly ``back`` wrong branches, then the path."""
    if not 0 <= back <= MAX_BACK:
        raise ValueError(f"back={back} must lie in 0 .. {MAX_BACK}")
    tokens: list[int] = []
    for _ in range(back):
        tokens += [*puzzle.wrong(rng), BACK]
    return tokens + puzzle.path


MAKERS = {COUNTDOWN: make_countdown, SUDOKU: make_sudoku}


@lru_cache(maxsize=64)
def make_table(
    task: int, back: tuple[int, ...], n: int, seed: int, swapped: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """``(prompts [n, P], responses [n, T])``, each trace with a number of wrong branches drawn from ``back``.

    Args:
      swapped: every puzzle gets the trace of the one before it: the same structure, hardly ever right.
    """
    rng = np.random.default_rng([seed, task])
    prompts = np.zeros((n, PROMPT_TOKENS), np.int32)
    responses = np.full((n, RESPONSE_TOKENS), END, np.int32)
    for k in range(n):
        puzzle = MAKERS[task](rng)
        tokens = write(rng, puzzle, int(rng.choice(back)))
        prompts[k], responses[k, : len(tokens)] = puzzle.prompt, tokens
    return prompts, np.roll(responses, 1, axis=0) if swapped else responses


def last_path(responses: Int[Array, "N T"]) -> tuple[Int[Array, "N S"], Bool[Array, " N"]]:
    """``(tokens after the last BACK, ended)``, at most eight tokens, ``END`` behind them."""
    place = jnp.arange(RESPONSE_TOKENS)
    start = jnp.max(jnp.where(responses == BACK, place[None, :] + 1, 0), axis=1)
    padded = jnp.pad(responses, ((0, 0), (0, 9)), constant_values=END)
    found = jnp.take_along_axis(padded, start[:, None] + jnp.arange(9)[None, :], axis=1)
    return found, jnp.any(responses == END, axis=1)


def backs(responses: Int[Array, "N T"]) -> Int[Array, " N"]:
    """How many branches were given up before the first end."""
    alive = jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0
    return jnp.sum((alive & (responses == BACK)).astype(jnp.int32), axis=1)


def _applied(a: Array, operator: Array, b: Array) -> Array:
    return jnp.where(
        operator == PLUS, a + b, jnp.where(operator == MINUS, a - b, jnp.where(operator == TIMES, a * b, -1))
    )


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """Whether the last path solves the puzzle of the prompt."""
    path, ended = last_path(responses)
    a, op, b, c, a2, op2, b2, c2, tail = (path[:, k] for k in range(9))
    sound = (_applied(a, op, b) == c) & (_applied(a2, op2, b2) == c2) & (c2 == prompts[:, 4]) & (tail == END)
    used = jnp.zeros(sound.shape, bool)
    for i, j, k in permutations((1, 2, 3)):
        x, y, z = prompts[:, i], prompts[:, j], prompts[:, k]
        used |= (a == x) & (b == y) & (((a2 == c) & (b2 == z)) | ((a2 == z) & (b2 == c)))
    grid = prompts[:, 1:]
    filled = _filled(grid, path[:, :BLANKS])
    solved = (path[:, BLANKS] == END) & _valid(filled)
    return ended & jnp.where(prompts[:, 0] == SUDOKU, solved, sound & used)


def _filled(grid: Array, values: Array) -> Array:
    blank = grid == 0
    rank = jnp.clip(jnp.cumsum(blank.astype(jnp.int32), axis=1) - 1, 0, BLANKS - 1)
    return jnp.where(blank, jnp.take_along_axis(values, rank, axis=1), grid)


def _valid(grid: Array) -> Array:
    cells = grid.reshape(-1, 4, 4)
    boxes = jnp.swapaxes(cells.reshape(-1, 2, 2, 2, 2), 2, 3).reshape(-1, 4, 4)
    wanted = jnp.arange(1, 5)[None, None, :]
    lines = jnp.concatenate([cells, jnp.swapaxes(cells, 1, 2), boxes], axis=1)
    return jnp.all(jnp.sort(lines, axis=2) == wanted, axis=(1, 2))
