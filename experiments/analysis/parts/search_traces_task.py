"""Search problems as token strings with depth-first traces: Countdown, 4 x 4 Sudoku, a one-dimensional rule, and more.

The other five are those of ``search_puzzles``.

A trace places nodes one after another; ``BACK`` takes the last one off, from whatever state the search is in. A node is
a value (Sudoku), a step ``a ? b = c`` (Countdown), or a rule with what it makes of the example (the line). What is
judged is the stack of nodes that is left at ``END``. Problems are drawn by NumPy into tables; the judges are pure JAX.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.analysis.parts import search_puzzles
from experiments.analysis.parts.search_puzzles import (
    BACK,
    COUNTDOWN,
    END,
    LARGEST,
    LINE,
    MINUS,
    PAD,
    PLUS,
    PROMPT_TOKENS,
    RULE,
    SUDOKU,
    TIMES,
    VOCABULARY,
    Puzzle,
    State,
)

CELLS, COLOURS = 5, 4  # of a line: colours 1 .. 4, 0 is empty
LINE_RULES: tuple[Callable[[tuple[int, ...]], tuple[int, ...]], ...] = (
    lambda x: x[1:] + x[:1],
    lambda x: x[-1:] + x[:-1],
    lambda x: x[::-1],
    lambda x: tuple(c % COLOURS + 1 if c else 0 for c in x),
    lambda x: tuple(sorted(x)),
    lambda x: x[:1] * CELLS,
)
BLANKS = 8  # of a sudoku
# nodes off the way to its solution that a sudoku's tree has: from so many on searches go back, to so many on they fit
DEAD = (6, 24)
NUMBERS, TARGETS = 9, (5, 40)  # of Countdown: the largest number, and the targets
RESPONSE_TOKENS = 60
SEARCH_TOKENS = 180  # the longest search of Countdown has 178: eight dead first steps with three below each
HELD_OUT_SHARE = 5  # one puzzle of so many is never trained on
MAX_BACK = 6
UNITS = {COUNTDOWN: 4, SUDOKU: 1, LINE: 1 + CELLS} | search_puzzles.UNITS  # tokens of a node
# of a solution without a search, at most
DIRECT_TOKENS = {COUNTDOWN: 8, SUDOKU: BLANKS, LINE: 1 + 2 * CELLS} | search_puzzles.DIRECT_TOKENS
# share of puzzles that the best response solves which is the same for all of them; a solver's traces solve them all
FLOORS = {COUNTDOWN: 0.005, SUDOKU: 0.001, LINE: 0.04} | search_puzzles.FLOORS
OPERATORS: dict[int, Callable[[int, int], int]] = {
    PLUS: lambda a, b: a + b, MINUS: lambda a, b: a - b, TIMES: lambda a, b: a * b,
}  # fmt: skip


def _steps(numbers: tuple[int, ...]):
    """Every step ``a ? b = c`` on two of the numbers, as a node, with the numbers that are left."""
    for i, j in permutations(range(len(numbers)), 2):
        for operator, apply in OPERATORS.items():
            c = apply(numbers[i], numbers[j])
            if 0 < c <= LARGEST and (operator == MINUS or i < j):
                rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
                yield (numbers[i], operator, numbers[j], c), (*rest, c)


def make_countdown(rng: np.random.Generator) -> Puzzle:
    """Three numbers and a target that some two steps reach; some first step must be a dead end."""
    while True:
        numbers = tuple(int(n) for n in rng.integers(1, NUMBERS + 1, 3))
        target = int(rng.integers(TARGETS[0], TARGETS[1] + 1))
        ends = [any(left == (target,) for _, left in _steps(rest)) for _, rest in _steps(numbers)]
        if any(ends) and not all(ends):
            break

    def left(state: State) -> tuple[int, ...]:
        now = numbers
        for node in state:
            now = next(rest for step, rest in _steps(now) if step == node)
        return now

    return Puzzle(
        [COUNTDOWN, *numbers, target] + [PAD] * (PROMPT_TOKENS - 5),
        lambda state: list(dict.fromkeys(step for step, _ in _steps(left(state)))) if len(state) < 2 else [],
        lambda state: left(state) == (target,),
        2,
        alike=(1, 4, 1),
    )


@lru_cache(maxsize=1)
def sudoku_grids() -> list[tuple[int, ...]]:
    """All 288 solved grids."""
    grids: list[tuple[int, ...]] = []

    def fill(cells: tuple[int, ...]) -> None:
        if len(cells) == 16:
            grids.append(cells)
            return
        for value in range(1, 5):
            if _fits((*cells, *[0] * (16 - len(cells))), len(cells), value):
                fill((*cells, value))

    fill(())
    return grids


_ROWS, _COLUMNS = np.divmod(np.arange(16), 4)
_BOXES = _ROWS // 2 * 2 + _COLUMNS // 2
# of every cell those that may not have its value
_PEERS = [
    np.flatnonzero(((_ROWS == r) | (_COLUMNS == c) | (_BOXES == b)) & (np.arange(16) != k)).tolist()
    for k, (r, c, b) in enumerate(zip(_ROWS, _COLUMNS, _BOXES, strict=True))
]


def _fits(cells: Sequence[int], place: int, value: int) -> bool:
    return all(cells[other] != value for other in _PEERS[place])


def _tree(cells: list[int], blanks: list[int]) -> tuple[int, int]:
    """In how many ways the blanks can be filled in their order, and how many nodes a search of all of them places."""
    if not blanks:
        return 1, 0
    ways, nodes = 0, 0
    for value in range(1, 5):
        if _fits(cells, blanks[0], value):
            cells[blanks[0]] = value
            below = _tree(cells, blanks[1:])
            ways, nodes = ways + below[0], nodes + 1 + below[1]
            cells[blanks[0]] = 0
    return ways, nodes


def make_sudoku(rng: np.random.Generator) -> Puzzle:
    """A grid with ``BLANKS`` blanks (0) and one solution; nodes are their values in reading order.

    Its tree has ``DEAD`` nodes off the way: most boards of so few cells have none or two, and whoever searches them
    hardly ever goes back.
    """
    grids = sudoku_grids()
    while True:
        cells = list(grids[int(rng.integers(len(grids)))])
        blanks = sorted(int(k) for k in rng.permutation(16)[:BLANKS])
        for blank in blanks:
            cells[blank] = 0
        ways, nodes = _tree(cells, blanks)
        if ways == 1 and DEAD[0] <= nodes - BLANKS <= DEAD[1]:
            break

    def children(state: State) -> list[tuple[int, ...]]:
        if len(state) == BLANKS:
            return []
        now = list(cells)
        for blank, (value,) in zip(blanks, state, strict=False):
            now[blank] = value
        return [(v,) for v in range(1, 5) if _fits(now, blanks[len(state)], v)]

    return Puzzle([SUDOKU, *cells], children, lambda state: len(state) == BLANKS, BLANKS)


def make_line(rng: np.random.Generator) -> Puzzle:
    """An example ``line -> line`` that one rule alone explains, and a line to which it is to be applied."""
    while True:
        given, asked = (tuple(int(c) for c in rng.integers(0, COLOURS + 1, CELLS)) for _ in range(2))
        rule = int(rng.integers(len(LINE_RULES)))
        shown = LINE_RULES[rule](given)
        if [f(given) for f in LINE_RULES].count(shown) == 1:
            break
    nodes = [(RULE + k, *f(given)) for k, f in enumerate(LINE_RULES)]
    return Puzzle(
        [LINE, *given, *shown, *asked, PAD],
        lambda state: nodes if not state else [],
        lambda state: len(state) == 1 and state[0][1:] == shown,
        1,
        lambda state: LINE_RULES[state[0][0] - RULE](asked),
    )


FIRST = {COUNTDOWN: make_countdown, SUDOKU: make_sudoku, LINE: make_line}
MAKERS = FIRST | search_puzzles.MAKERS


def _shuffled(rng: np.random.Generator, nodes: list) -> list:
    return [nodes[int(k)] for k in rng.permutation(len(nodes))]


def depth_first(rng: np.random.Generator, puzzle: Puzzle, *, shown: float = 1.0, ordered: bool = False) -> list[int]:
    """A depth-first search as it goes: a node, the search below it, ``BACK`` where that finds nothing.

    Args:
      shown: share of the failed subtrees that are written; the others are left out whole ("think less").
      ordered: the children in their own order, the same for every puzzle, instead of by chance.
    """

    def below(state: State) -> tuple[list[int], State | None]:
        if puzzle.solved(state):
            return [], state
        said: list[int] = []
        nodes = puzzle.children(state)
        for node in nodes if ordered else _shuffled(rng, nodes):
            inner, found = below((*state, node))
            if found is not None:
                return [*said, *node, *inner], found
            if rng.random() < shown:
                said += [*node, *inner, BACK]
        return said, None

    said, found = below(())
    assert found is not None, "a puzzle has a solution"
    return [*said, *puzzle.answer(found)]


def solution(rng: np.random.Generator, puzzle: Puzzle, start: State = ()) -> State | None:
    """One of the states behind ``start`` that solve the puzzle; None where there is none."""
    if puzzle.solved(start):
        return start
    for node in _shuffled(rng, puzzle.children(start)):
        found = solution(rng, puzzle, (*start, node))
        if found is not None:
            return found
    return None


def with_backs(rng: np.random.Generator, puzzle: Puzzle, back: int) -> list[int]:
    """The path to a solution with exactly ``back`` dead ends, each placed in a state of that path and taken off.

    Raises:
      ValueError: for a number that does not fit.
    """
    if not 0 <= back <= MAX_BACK:
        raise ValueError(f"back={back} must lie in 0 .. {MAX_BACK}")
    path = solution(rng, puzzle)
    assert path is not None, "a puzzle has a solution"
    wrong = {}
    for depth in range(puzzle.depth):
        dead = [x for x in puzzle.children(path[:depth]) if solution(rng, puzzle, (*path[:depth], x)) is None]
        if dead:
            wrong[depth] = dead
    places = [int(rng.choice(list(wrong))) for _ in range(back)]
    said: list[int] = []
    for depth, node in enumerate(path):
        for _ in range(places.count(depth)):
            said += [*wrong[depth][int(rng.integers(len(wrong[depth])))], BACK]
        said += node
    return [*said, *puzzle.answer(path)]


# How a trace is written: ``(rng, puzzle, numbers of backtracks, share shown) -> tokens``.
Writer = Callable[[np.random.Generator, Puzzle, tuple[int, ...], float], list[int]]


def by_number(rng: np.random.Generator, puzzle: Puzzle, back: tuple[int, ...], shown: float) -> list[int]:
    """The path with a number of dead ends."""
    return with_backs(rng, puzzle, int(rng.choice(back)))


def by_search(rng: np.random.Generator, puzzle: Puzzle, back: tuple[int, ...], shown: float) -> list[int]:
    """A depth-first search in any order."""
    return depth_first(rng, puzzle, shown=shown)


def by_fixed_order(rng: np.random.Generator, puzzle: Puzzle, back: tuple[int, ...], shown: float) -> list[int]:
    """A depth-first search in the same order for all."""
    return depth_first(rng, puzzle, shown=shown, ordered=True)


def held_out(puzzle: Puzzle) -> bool:
    """Whether a puzzle is one to be measured on: a fifth of all, by what they are, not by where they are drawn."""
    return zlib.crc32(puzzle.identity()) % HELD_OUT_SHARE == 0


@lru_cache(maxsize=64)
def make_table(
    task: int, back: tuple[int, ...], n: int, seed: int, swapped: str = "", how: Writer = by_number, shown: float = 1.0,
    *, measured: bool = False, width: int = RESPONSE_TOKENS,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """``(prompts [n, P], responses [n, width])``, each trace with a number of wrong nodes drawn from ``back``.

    A seed draws the same puzzles whatever is written about them, so that arms differ in their traces alone.

    Args:
      swapped: ``traces``: every puzzle gets the whole trace of the one before it; ``nodes``: the dead nodes of its
        trace are those of the one before it, so that the work is wrong and the answer stays.
      how: who writes the traces.
      measured: puzzles that are held out, of which no other table has any.

    Raises:
      ValueError: for a trace that does not fit: another one in its place would be a choice among searches.
    """
    asked, written = np.random.default_rng([seed, task]), np.random.default_rng([seed, task, 1])
    prompts = np.zeros((n, PROMPT_TOKENS), np.int32)
    texts: list[list[int]] = []
    while len(texts) < n:
        puzzle = MAKERS[task](asked)
        if held_out(puzzle) == measured:
            prompts[len(texts)] = puzzle.prompt
            texts.append(how(written, puzzle, back, shown))
    if swapped == "nodes":
        size = UNITS[task]
        texts = [with_work_of(own, other, size) for own, other in zip(texts, [texts[-1], *texts[:-1]], strict=True)]
    longest = max(map(len, texts), default=0)
    if longest >= width:
        raise ValueError(f"width={width} is too short for a trace of {longest} tokens and its end; give {longest + 1}")
    responses = np.full((n, width), END, np.int32)
    for k, tokens in enumerate(texts):
        responses[k, : len(tokens)] = tokens
    return prompts, np.roll(responses, 1, axis=0) if swapped == "traces" else responses


def _dead(tokens: list[int], size: int) -> list[int]:
    """Where the nodes start that ``BACK`` takes off."""
    stack, dead, k = [], [], 0
    while k < len(tokens):
        if tokens[k] == BACK:
            dead.append(stack.pop())
            k += 1
        else:
            stack.append(k)
            k += size
    return sorted(dead)


def with_work_of(own: list[int], other: list[int], size: int) -> list[int]:
    """One's own trace with the dead nodes of another in the places of its own, one after another, from the first again.

    The nodes of its path stay where they are, and with them what is left in the end. Nodes have ``size`` tokens.

    >>> with_work_of([1, BACK, 2, 9, BACK, 3], [4, 5, BACK, 6, 7, BACK], 1) == [5, BACK, 2, 7, BACK, 3]
    True
    """
    there, here, said = _dead(other, size), _dead(own, size), list(own)
    for k, place in enumerate(here if there else []):
        start = there[k % len(there)]
        said[place : place + size] = other[start : start + size]
    return said


def units(prompts: Int[Array, "N P"]) -> Int[Array, " N"]:
    """How many tokens a node of each puzzle has."""
    table = np.full(VOCABULARY, UNITS[COUNTDOWN], np.int32)
    table[list(UNITS)] = list(UNITS.values())
    return jnp.asarray(table)[jnp.clip(prompts[:, 0], 0, VOCABULARY - 1)]


STACK = 14  # tokens of the longest solution, and one


def replay(
    prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> tuple[Int[Array, "N S"], Int[Array, " N"], Bool[Array, " N"]]:
    """``(stack, depth, ended)`` after the trace: tokens are put on, ``BACK`` takes the last node off.

    A trace that puts on more than a solution holds, or takes off from nothing, is not ended: it solves nothing.
    """
    size = units(prompts)

    def step(carry, token):
        stack, depth, alive, ended, broken = carry
        pops, ends = alive & (token == BACK), alive & (token == END)
        puts = alive & ~pops & ~ends
        broken = broken | (puts & (depth >= STACK)) | (pops & (depth == 0))
        here = puts[:, None] & (jnp.arange(STACK)[None, :] == depth[:, None])
        stack = jnp.where(here, token[:, None], stack)
        fallen = jnp.maximum(depth - 1, 0) // size * size
        depth = jnp.where(pops, fallen, jnp.where(puts, jnp.minimum(depth + 1, STACK), depth))
        stack = jnp.where(jnp.arange(STACK)[None, :] < depth[:, None], stack, END)
        return (stack, depth, alive & ~ends, ended | ends, broken), None

    n = prompts.shape[0]
    first = (
        jnp.full((n, STACK), END, jnp.int32), jnp.zeros((n,), jnp.int32), jnp.ones((n,), bool), jnp.zeros((n,), bool),
        jnp.zeros((n,), bool),
    )  # fmt: skip
    (stack, depth, _, ended, broken), _ = jax.lax.scan(step, first, responses.T)
    return stack, depth, ended & ~broken


def backs(responses: Int[Array, "N T"]) -> Int[Array, " N"]:
    """How many nodes were taken off before the first end."""
    alive = jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0
    return jnp.sum((alive & (responses == BACK)).astype(jnp.int32), axis=1)


def _applied(a: Array, operator: Array, b: Array) -> Array:
    return jnp.where(
        operator == PLUS, a + b, jnp.where(operator == MINUS, a - b, jnp.where(operator == TIMES, a * b, -1))
    )


def _ruled(cells: Int[Array, "N 5"]) -> Int[Array, "R N 5"]:
    """What every rule makes of lines."""
    cycled = jnp.where(cells > 0, cells % COLOURS + 1, 0)
    made = (
        jnp.roll(cells, -1, axis=1), jnp.roll(cells, 1, axis=1), cells[:, ::-1], cycled, jnp.sort(cells, axis=1),
        jnp.broadcast_to(cells[:, :1], cells.shape),
    )  # fmt: skip
    return jnp.stack(made)


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """Whether what is left of the trace solves the puzzle of the prompt."""
    path, depth, ended = replay(prompts, responses)
    a, op, b, c, a2, op2, b2, c2 = (path[:, k] for k in range(8))
    sound = (_applied(a, op, b) == c) & (_applied(a2, op2, b2) == c2) & (c2 == prompts[:, 4]) & (depth == 8)
    used = jnp.zeros(sound.shape, bool)
    for i, j, k in permutations((1, 2, 3)):
        x, y, z = prompts[:, i], prompts[:, j], prompts[:, k]
        used |= (a == x) & (b == y) & (((a2 == c) & (b2 == z)) | ((a2 == z) & (b2 == c)))
    solved = (depth == BLANKS) & _valid(_filled(prompts[:, 1:], path[:, :BLANKS]))
    given, shown, asked = (prompts[:, 1 + CELLS * k : 1 + CELLS * (k + 1)] for k in range(3))
    explains = jnp.all(_ruled(given) == shown[None], axis=2)
    wanted = jnp.sum(jnp.where(explains[:, :, None], _ruled(asked), 0), axis=0)  # one rule alone does
    lined = (depth == 1 + 2 * CELLS) & jnp.all(path[:, 1 + CELLS : 1 + 2 * CELLS] == wanted, axis=1)
    first = prompts[:, 0]
    old = jnp.where(first == SUDOKU, solved, jnp.where(first == LINE, lined, (first == COUNTDOWN) & sound & used))
    return ended & (old | search_puzzles.right(prompts, path, depth))


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
