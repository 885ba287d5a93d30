"""Tokens of puzzles, and five of them beside those of ``search_traces_task``: small forms of reasoning-gym families.

A prompt is the token of its family, then numbers and a few tokens of its own, padded. A puzzle is searched node by
node; what a node is, and what is written behind the last one, is said with each family.

* geometry (``simple_geometry``): ``[GEOMETRY, n, angles]``, all interior angles of a polygon of three to six sides but
  the last, in units of 20 degrees. Nodes: the sum of all angles, then what is left of it behind each known one.
* cube (``color_cube_rotation``): ``[CUBE, six colours, side, side, asked]``: the sides that are turned to the top, one
  after the other. Nodes: the six colours afterwards; the answer is the colour of the asked side, and right with the
  cube that it is of.
* list (``list_functions``): ``[LIST, a, f(a), b, f(b), c]``. The one node: a function and what it makes of both lists;
  the answer is ``f(c)``.
* zebra (``zebra_puzzles``): ``[ZEBRA, clues]`` of three houses with names 1 to 3 and drinks 4 to 6. Nodes: names from
  left to right, then drinks.
* self-reference (``self_reference``): ``[SELF, statements]``, four of them, each about how many are true. Nodes:
  whether each is true. Differs from the family in asking for the one solution, not for their number.
"""

from collections.abc import Callable
from itertools import permutations, product
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

LARGEST = 40  # numbers 0 .. 40 are their own tokens
PLUS, MINUS, TIMES, BACK, COUNTDOWN, SUDOKU, LINE, PAD, END = range(LARGEST + 1, LARGEST + 10)
RULE, LINE_RULE_COUNT = END + 1, 6  # token of the first rule of a line, and how many there are
GEOMETRY, CUBE, LIST, ZEBRA, SELF = range(RULE + LINE_RULE_COUNT, RULE + LINE_RULE_COUNT + 5)
FUNCTION = SELF + 1  # token of the first function of a list
IN, SAME, LEFT = range(FUNCTION + 8, FUNCTION + 11)  # kinds of clues
EXACTLY, LEAST, MOST = range(LEFT + 1, LEFT + 4)  # kinds of statements
VOCABULARY = MOST + 1
PROMPT_TOKENS = 17
UNITS = {GEOMETRY: 1, CUBE: 6, LIST: 3, ZEBRA: 1, SELF: 1}  # tokens of a node
DIRECT_TOKENS = {GEOMETRY: 6, CUBE: 13, LIST: 4, ZEBRA: 6, SELF: 4}  # of a solution without a search, at most
# see ``search_traces_task.FLOORS``: an angle, a value, the most frequent of 36 worlds and of 16 rows of truth values
FLOORS = {GEOMETRY: 0.09, CUBE: 0.0025, LIST: 0.1, ZEBRA: 0.036, SELF: 0.076}
STRAIGHT = 9  # 180 degrees in units of 20
# which old side each new side is, of (top, right, front, left, back, bottom), when a side is turned to the top
TURNS = {1: (1, 5, 2, 0, 4, 3), 2: (2, 1, 5, 3, 0, 4), 3: (3, 0, 2, 5, 4, 1), 4: (4, 1, 0, 3, 5, 2),
         5: (5, 1, 4, 3, 2, 0)}  # fmt: skip
FUNCTIONS: tuple[Callable[[tuple[int, ...]], int], ...] = (
    lambda x: x[0],
    lambda x: x[-1],
    max,
    min,
    sum,
    lambda x: max(x) - min(x),
    lambda x: sorted(x)[1],
    lambda x: x[0] + x[-1],
)
HOUSES, CLUES, STATEMENTS = 3, 5, 4
State = tuple[tuple[int, ...], ...]  # the nodes that are placed


class Puzzle(NamedTuple):
    """Prompt tokens; which nodes may come next; which states solve it; what is written behind the last node."""

    prompt: list[int]
    children: Callable[[State], list[tuple[int, ...]]]
    solved: Callable[[State], bool]
    depth: int  # nodes of a solution
    answer: Callable[[State], tuple[int, ...]] = lambda state: ()
    alike: tuple[int, int, int] = (0, 0, 1)  # first and last token of parts in any order, and how long each part is

    def identity(self) -> bytes:
        """What two prompts have in common that are the same puzzle: their parts in any order.

        >>> one, other = (Puzzle(said, None, None, 2, alike=(1, 4, 1)) for said in ([9, 3, 1, 2, 7], [9, 2, 3, 1, 7]))
        >>> one.identity() == other.identity() == bytes([9, 1, 2, 3, 7])
        True
        """
        first, last, size = self.alike
        parts = sorted(self.prompt[k : k + size] for k in range(first, last, size))
        return bytes([*self.prompt[:first], *(token for part in parts for token in part), *self.prompt[last:]])


def _padded(tokens: list[int]) -> list[int]:
    return tokens + [PAD] * (PROMPT_TOKENS - len(tokens))


def make_geometry(rng: np.random.Generator) -> Puzzle:
    """A convex polygon; a wrong node takes the sum of another one, or adds an angle where it is to be taken off."""
    sides = int(rng.integers(3, 7))
    while True:
        known = [int(a) for a in rng.integers(1, STRAIGHT, sides - 1)]
        total = (sides - 2) * STRAIGHT
        if 0 < total - sum(known) < STRAIGHT:
            break
    path = [total - sum(known[:k]) for k in range(sides)]

    def children(state: State) -> list[tuple[int, ...]]:
        if len(state) == sides:
            return []
        if not state:
            return [(n * STRAIGHT,) for n in range(1, 5)]
        (rest,), angle = state[-1], known[len(state) - 1]
        return [(x,) for x in (rest - angle, rest + angle) if 0 <= x <= LARGEST]

    solved = tuple((x,) for x in path)
    prompt = _padded([GEOMETRY, sides, *known])
    return Puzzle(prompt, children, lambda state: state == solved, sides, alike=(2, 1 + sides, 1))


def turned(colours: tuple[int, ...], side: int) -> tuple[int, ...]:
    """The cube with that side on its top.

    >>> turned((1, 2, 3, 4, 5, 6), 2)  # the front: the top goes to the back, the bottom to the front
    (3, 2, 6, 4, 1, 5)
    """
    return tuple(colours[k] for k in TURNS[side])


def make_cube(rng: np.random.Generator) -> Puzzle:
    """Two turns of a cube of six colours; a wrong node turns another side to the top."""
    colours = tuple(int(c) + 1 for c in rng.permutation(6))
    first, second = (int(s) for s in rng.integers(1, 6, 2))
    asked = int(rng.integers(0, 6))
    solved = (turned(colours, first), turned(turned(colours, first), second))
    return Puzzle(
        _padded([CUBE, *colours, first, second, asked]),
        lambda state: [turned((colours, *state)[-1], side) for side in TURNS] if len(state) < 2 else [],
        lambda state: state == solved,
        2,
        lambda state: (state[-1][asked],),
    )


def make_list(rng: np.random.Generator) -> Puzzle:
    """Two lists of three with what one function alone makes of both, and a third."""
    while True:
        one, other, asked = (tuple(int(x) for x in rng.integers(0, 10, 3)) for _ in range(3))
        rule = FUNCTIONS[int(rng.integers(len(FUNCTIONS)))]
        shown = rule(one), rule(other)
        if [(f(one), f(other)) for f in FUNCTIONS].count(shown) == 1:
            break
    nodes = [(FUNCTION + k, f(one), f(other)) for k, f in enumerate(FUNCTIONS)]
    return Puzzle(
        _padded([LIST, *one, shown[0], *other, shown[1], *asked]),
        lambda state: nodes if not state else [],
        lambda state: len(state) == 1 and state[0][1:] == shown,
        1,
        lambda state: (FUNCTIONS[state[0][0] - FUNCTION](asked),),
        alike=(1, 9, 4),
    )


WORLDS = [(*names, *drinks) for names in permutations((1, 2, 3)) for drinks in permutations((4, 5, 6))]


def holds(clue: tuple[int, int, int], world: tuple[int, ...]) -> bool:
    """Whether a clue is true of names and drinks from left to right.

    >>> [holds(clue, (2, 1, 3, 4, 6, 5)) for clue in ((IN, 1, 2), (SAME, 2, 4), (LEFT, 1, 5), (LEFT, 5, 1))]
    [True, True, True, False]
    """
    kind, one, other = clue
    place = world.index(one) % HOUSES
    if kind == IN:
        return place + 1 == other
    apart = world.index(other) % HOUSES - place
    return apart == (0 if kind == SAME else 1)


def make_zebra(rng: np.random.Generator) -> Puzzle:
    """Clues that one arrangement alone fits, at most five; a node is any item that is not placed yet."""
    every = [(IN, item, house) for item in range(1, 7) for house in range(1, 4)]
    every += [(SAME, name, drink) for name in range(1, 4) for drink in range(4, 7)]
    every += [(LEFT, a, b) for a, b in permutations(range(1, 7), 2)]
    while True:
        truth = WORLDS[int(rng.integers(len(WORLDS)))]
        true = [clue for clue in every if holds(clue, truth)]
        clues = [true[int(k)] for k in rng.permutation(len(true))[: int(rng.integers(3, CLUES + 1))]]
        if sum(all(holds(clue, world) for clue in clues) for world in WORLDS) == 1:
            break

    def children(state: State) -> list[tuple[int, ...]]:
        items = range(1, 4) if len(state) < HOUSES else range(4, 7)
        return [(x,) for x in items if (x,) not in state] if len(state) < 2 * HOUSES else []

    solved = tuple((x,) for x in truth)
    prompt = _padded([ZEBRA, *(x for clue in clues for x in clue)])
    apart = (1, 1 + 3 * len(clues), 3)
    return Puzzle(prompt, children, lambda state: state == solved, 2 * HOUSES, alike=apart)


def told(kind: int, number: int, true: int) -> bool:
    """Whether a statement about how many are true is so.

    >>> [told(kind, 2, 3) for kind in (EXACTLY, LEAST, MOST)]
    [False, True, False]
    """
    return {EXACTLY: true == number, LEAST: true >= number, MOST: true <= number}[kind]


def _fits(said: list[tuple[int, int]], values: tuple[int, ...]) -> bool:
    return all(told(*one, sum(values)) == value for one, value in zip(said, values, strict=True))


def make_self_reference(rng: np.random.Generator) -> Puzzle:
    """Four statements on how many of them are true, which fit together in one way alone."""
    while True:
        said = [(int(rng.integers(EXACTLY, MOST + 1)), int(rng.integers(0, STATEMENTS + 1))) for _ in range(STATEMENTS)]
        found = [v for v in product((0, 1), repeat=STATEMENTS) if _fits(said, v)]
        if len(found) == 1:
            break
    solved = tuple((x,) for x in found[0])
    return Puzzle(
        _padded([SELF, *(x for statement in said for x in statement)]),
        lambda state: [(0,), (1,)] if len(state) < STATEMENTS else [],
        lambda state: state == solved,
        STATEMENTS,
        alike=(1, 1 + 2 * STATEMENTS, 2),
    )


MAKERS = {
    GEOMETRY: make_geometry, CUBE: make_cube, LIST: make_list, ZEBRA: make_zebra, SELF: make_self_reference,
}  # fmt: skip


def _geometry_right(prompts: Array, path: Array, depth: Array) -> Array:
    sides = prompts[:, 1]
    column = jnp.arange(PROMPT_TOKENS - 2, dtype=jnp.int32)[None, :]
    known = jnp.sum(jnp.where(column < sides[:, None] - 1, prompts[:, 2:], 0), axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(path, jnp.clip(sides - 1, 0, path.shape[1] - 1)[:, None], axis=1)[:, 0]
    return (depth == sides) & (last == (sides - 2) * STRAIGHT - known)


def _cube_right(prompts: Array, path: Array, depth: Array) -> Array:
    table = jnp.asarray([[0] * 6, *(TURNS[k] for k in sorted(TURNS))], jnp.int32)
    cube = prompts[:, 1:7]
    for k in (7, 8):
        cube = jnp.take_along_axis(cube, table[jnp.clip(prompts[:, k], 0, 5)], axis=1)
    wanted = jnp.concatenate([cube, jnp.take_along_axis(cube, jnp.clip(prompts[:, 9:10], 0, 5), axis=1)], axis=1)
    return (depth == 13) & jnp.all(path[:, 6:13] == wanted, axis=1)


def _functions(lists: Int[Array, "N 3"]) -> Int[Array, "F N"]:
    first, last, ordered = lists[:, 0], lists[:, 2], jnp.sort(lists, axis=1)
    least, middle, most = (ordered[:, k] for k in range(3))
    return jnp.stack([first, last, most, least, first + lists[:, 1] + last, most - least, middle, first + last])


def _list_right(prompts: Array, path: Array, depth: Array) -> Array:
    one, other, asked = (_functions(prompts[:, k : k + 3]) for k in (1, 5, 9))
    explains = (one == prompts[None, :, 4]) & (other == prompts[None, :, 8])
    wanted = jnp.sum(jnp.where(explains, asked, 0), axis=0, dtype=jnp.int32)  # one function alone does
    return (depth == 4) & (path[:, 3] == wanted)


def _zebra_right(prompts: Array, path: Array, depth: Array) -> Array:
    world = path[:, : 2 * HOUSES]
    whole = jnp.all(jnp.sort(world, axis=1) == jnp.arange(1, 7, dtype=jnp.int32)[None, :], axis=1)
    whole &= jnp.all(world[:, :HOUSES] <= HOUSES, axis=1)

    def place(item: Array) -> Array:
        return jnp.argmax(world == item[:, None], axis=1).astype(jnp.int32) % HOUSES

    fine = whole & (depth == 2 * HOUSES)
    for k in range(CLUES):
        kind, one, other = (prompts[:, 1 + 3 * k + i] for i in range(3))
        here, apart = place(one) + 1 == other, place(other) - place(one)
        fine &= jnp.where(kind == IN, here, jnp.where(kind == SAME, apart == 0, (kind != LEFT) | (apart == 1)))
    return fine


def _self_right(prompts: Array, path: Array, depth: Array) -> Array:
    said = path[:, :STATEMENTS]
    kind, number = prompts[:, 1 : 1 + 2 * STATEMENTS : 2], prompts[:, 2 : 2 + 2 * STATEMENTS : 2]
    true = jnp.sum(said, axis=1, dtype=jnp.int32)[:, None]
    so = jnp.where(kind == EXACTLY, true == number, jnp.where(kind == LEAST, true >= number, true <= number))
    fits = jnp.all(said == so.astype(jnp.int32), axis=1)
    return (depth == STATEMENTS) & fits


def right(prompts: Int[Array, "N P"], path: Int[Array, "N S"], depth: Int[Array, " N"]) -> Bool[Array, " N"]:
    """Whether the nodes that are left, ``depth`` tokens of ``path``, answer a puzzle of this file; False for others."""
    judges = {
        GEOMETRY: _geometry_right, CUBE: _cube_right, LIST: _list_right, ZEBRA: _zebra_right, SELF: _self_right,
    }  # fmt: skip
    found = jnp.zeros(depth.shape, bool)
    for family, judge in judges.items():
        found |= (prompts[:, 0] == family) & judge(prompts, path, depth)
    return found
