"""Sokoban with one box on a square board: levels drawn and solved here, one step of a game, plans as labels of squares.

A level is ``walls [N] bool`` and the cells of ``goal``, ``agent`` and ``box``, numbered row by row. Actions are stay,
up, down, left and right; whoever walks into the box pushes it, if the cell behind it is free. Outside is wall.
"""

import pathlib
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.errors import DataError

ACTIONS = 5  # stay, up, down, left, right; as labels of squares 0 is never
PLANES = 4  # of what is seen: walls, goal, agent, box
FAR = 10_000
_SHIFTS = np.asarray([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])


class Level(NamedTuple):
    """One board, or with a leading axis many."""

    walls: Bool[Array, "*B N"]
    goal: Int[Array, "*B"]
    agent: Int[Array, "*B"]
    box: Int[Array, "*B"]


@lru_cache(maxsize=4)
def neighbours(side: int) -> Int[np.ndarray, "5 N"]:
    """The cell that each action leads to from each cell; ``N`` itself is outside.

    >>> neighbours(2).tolist()
    [[0, 1, 2, 3], [4, 4, 0, 1], [2, 3, 4, 4], [4, 0, 4, 2], [1, 4, 3, 4]]
    """
    rows, columns = np.divmod(np.arange(side * side), side)
    found = []
    for down, right in _SHIFTS:
        row, column = rows + down, columns + right
        inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
        found.append(np.where(inside, row * side + column, side * side))
    return np.asarray(found, np.int32)


def move(walls: Bool[Array, " N"], agent: Array, box: Array, action: Array, *, side: int) -> tuple[Array, Array]:
    """Where agent and box are after an action."""
    table = jnp.asarray(np.pad(neighbours(side), ((0, 0), (0, 1)), constant_values=side * side))
    closed = jnp.concatenate([walls, jnp.ones((1,), bool)])
    there = table[action, agent]
    behind = table[action, there]
    pushes = (there == box) & (action > 0)
    free = ~closed[there] & (~pushes | ~closed[behind])
    return jnp.where(free, there, agent), jnp.where(free & pushes, behind, box)


def distances(walls: Bool[Array, " N"], goal: Array, *, side: int, most: int) -> Int[Array, "N N"]:
    """``[agent, box]``: actions until the box is on the goal; ``FAR`` beyond ``most``, or where it cannot be."""
    cells = side * side
    agent, box = (x.reshape(-1) for x in jnp.meshgrid(*[jnp.arange(cells, dtype=jnp.int32)] * 2, indexing="ij"))
    each = jnp.arange(1, ACTIONS, dtype=jnp.int32)
    step = jax.vmap(jax.vmap(lambda a, b, k: move(walls, a, b, k, side=side), (0, 0, None)), (None, None, 0))
    after_agent, after_box = step(agent, box, each)
    able = ~walls[agent] & ~walls[box] & (agent != box)
    done = able & (box == goal)
    start = jnp.where(done, 0, FAR).astype(jnp.int32)

    def nearer(_: Array, found: Array) -> Array:
        onward = jnp.min(found[after_agent * cells + after_box], axis=0) + 1
        return jnp.where(done, 0, jnp.where(able, jnp.minimum(onward, FAR), FAR))

    return jax.lax.fori_loop(0, most, nearer, start).reshape(cells, cells)


def best_action(found: Int[Array, "N N"], walls: Bool[Array, " N"], agent: Array, box: Array, *, side: int) -> Array:
    """The first action that comes nearer to the end; stay where none does."""
    each = jnp.arange(ACTIONS, dtype=jnp.int32)
    after = jax.vmap(lambda k: move(walls, agent, box, k, side=side))(each)
    nearer = found[after] < found[agent, box]
    return jnp.where(jnp.any(nearer), jnp.argmax(nearer), 0).astype(jnp.int32)


def detour(level: Level, shut: Array, *, side: int, most: int, length: int) -> tuple[Array, Array, Array]:
    """``(squares [length], actions [length], there is one)``: how a shortest solution around a square begins.

    A solution that is over sooner stays where it ends.
    """
    walls = level.walls.at[shut].set(True)
    far = distances(walls, level.goal, side=side, most=most)

    def step(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        action = best_action(far, walls, *at, side=side)
        after = move(walls, *at, action, side=side)
        return after, (after[0], action)

    _, (squares, actions) = jax.lax.scan(step, (level.agent, level.box), None, length)
    return squares, actions, (far[level.agent, level.box] < FAR) & (shut != level.agent)


@lru_cache(maxsize=8)
def levels(count: int, side: int, *, seed: int = 0, shortest: int = 4, longest: int = 16) -> tuple[Level, Level]:
    """``(train, heldout)``: ``count`` and a quarter as many different levels whose shortest solution is as long.

    Boards are drawn at random, an eighth of the cells walls, and solved; no board of one is in the other.
    """
    wanted, cells, rng = count + count // 4, side * side, np.random.default_rng(seed)
    solve = jax.jit(
        jax.vmap(lambda level: distances(level.walls, level.goal, side=side, most=longest + 1)[level.agent, level.box])
    )
    kept: dict[bytes, np.ndarray] = {}
    while len(kept) < wanted:
        rows = max(64, wanted)
        walls = rng.random((rows, cells)) < 0.125
        places = np.argsort(rng.random((rows, cells)), axis=1)[:, :3].astype(np.int32)
        walls[np.arange(rows)[:, None], places] = False
        lengths = np.asarray(solve(Level(jnp.asarray(walls), *(jnp.asarray(places[:, k]) for k in range(3)))))
        for k in np.flatnonzero((lengths >= shortest) & (lengths <= longest)):
            row = np.concatenate([places[k], walls[k].astype(np.int32)])
            kept.setdefault(row.tobytes(), row)
    table = np.asarray(list(kept.values())[:wanted])
    every = Level(jnp.asarray(table[:, 3:] > 0), *(jnp.asarray(table[:, k], jnp.int32) for k in range(3)))
    return jax.tree.map(lambda x: x[:count], every), jax.tree.map(lambda x: x[count:], every)


_SIGNS = "#@$. "


@lru_cache(maxsize=4)
def read(path: str) -> tuple[int, Level, Level]:
    """``(side, train, heldout)`` from a text file: square boards of one size, each fifth of them held out.

    A board is lines of ``#`` (wall), ``@`` (agent), ``$`` (box), ``.`` (goal) and spaces, as in the files of Boxoban;
    an empty line, or one that begins with ``;``, stands between two.

    Raises:
      DataError: for a board of another size or with other signs, or with more than one box, agent or goal.
    """
    boards: list[list[str]] = [[]]
    for line in pathlib.Path(path).read_text().splitlines():
        if not line or line.startswith(";"):
            boards.append([])
        else:
            boards[-1].append(line)
    boards = [board for board in boards if board]
    side, rows = (len(boards[0]) if boards else 0), []
    for number, board in enumerate(boards, start=1):
        text = "".join(line.ljust(side) for line in board)
        if len(board) != side or len(text) != side * side or set(text) - set(_SIGNS):
            raise DataError(f"{path}: board {number} is no square of {side} lines of #, @, $, . and spaces")
        places = [[k for k, sign in enumerate(text) if sign == mark] for mark in ".@$"]
        if any(len(found) != 1 for found in places):
            raise DataError(f"{path}: board {number} needs one goal, one agent and one box, each on a cell of its own")
        rows.append([*(found[0] for found in places), *(sign == "#" for sign in text)])
    if len(rows) < 5:
        raise DataError(f"{path}: {len(rows)} boards are too few; give 5 at least")
    table = np.asarray(rows, np.int32)
    every = Level(jnp.asarray(table[:, 3:] > 0), *(jnp.asarray(table[:, k]) for k in range(3)))
    held = np.arange(len(rows)) % 5 == 4
    return side, jax.tree.map(lambda x: x[~held], every), jax.tree.map(lambda x: x[held], every)


def seen(level: Level, agent: Array, box: Array) -> Float[Array, "N 4"]:
    """The board as planes: walls, goal, agent, box."""
    cell = jnp.arange(level.walls.shape[0], dtype=jnp.int32)
    planes = [level.walls, cell == level.goal, cell == agent, cell == box]
    return jnp.stack(planes, axis=1).astype(jnp.float32)


def entered(
    agents: Int[Array, " T1"], actions: Int[Array, " T"], used: Bool[Array, " T"], cells: int
) -> Int[Array, "T N"]:
    """``C_A``: at each step, by which action the agent next steps onto each square; 0: never again.

    >>> entered(jnp.array([0, 1, 3]), jnp.array([4, 2]), jnp.ones(2, bool), 4).tolist()
    [[0, 4, 0, 2], [0, 0, 0, 2]]
    """
    return _next(agents[1:], agents[1:] != agents[:-1], actions, used, cells)


def pushed(
    boxes: Int[Array, " T1"], actions: Int[Array, " T"], used: Bool[Array, " T"], cells: int
) -> Int[Array, "T N"]:
    """``C_B``: at each step, in which direction the box is next pushed off each square; 0: never again.

    >>> pushed(jnp.array([1, 1, 3]), jnp.array([4, 2]), jnp.ones(2, bool), 4).tolist()
    [[0, 2, 0, 0], [0, 2, 0, 0]]
    """
    return _next(boxes[:-1], boxes[1:] != boxes[:-1], actions, used, cells)


def _next(square: Array, happens: Array, actions: Array, used: Array, cells: int) -> Array:
    def earlier(label: Array, step: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        here, now, action = step
        label = jnp.where(now & (jnp.arange(cells, dtype=jnp.int32) == here), action, label)
        return label, label

    steps = (square, happens & used, actions.astype(jnp.int32))
    return jax.lax.scan(earlier, jnp.zeros((cells,), jnp.int32), steps, reverse=True)[1]
