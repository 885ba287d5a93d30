"""Sokoban on a square board: levels drawn and solved here, one step of a game, plans as labels of squares.

A level is ``walls [N] bool`` and the cells of ``goals``, ``agent`` and as many ``boxes``, numbered row by row. Actions
are stay, up, down, left and right; whoever walks into a box pushes it, if the cell behind it is free. Outside is wall.
It is solved when every box is on a goal; box k and goal k belong together in the plan of the solver alone.
"""

import pathlib
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.types import Key

ACTIONS = 5  # stay, up, down, left, right; as labels of squares 0 is never
PLANES = 4  # of what is seen: walls, goals, agent, boxes
OPPOSITE = np.asarray([0, 2, 1, 4, 3])
FAR = 10_000
_SHIFTS = np.asarray([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])


class Level(NamedTuple):
    """One board, or with a leading axis many."""

    walls: Bool[Array, "*B N"]
    goals: Int[Array, "*B K"]
    agent: Int[Array, "*B"]
    boxes: Int[Array, "*B K"]


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


def move(walls: Bool[Array, " N"], agent: Array, boxes: Int[Array, " K"], action: Array, *, side: int) -> Any:
    """Where agent and boxes are after an action."""
    table = jnp.asarray(np.pad(neighbours(side), ((0, 0), (0, 1)), constant_values=side * side))
    closed = jnp.concatenate([walls, jnp.ones((1,), bool)])
    there = table[action, agent]
    behind = table[action, there]
    pushed = (boxes == there) & (action > 0)
    free = ~closed[there] & (~jnp.any(pushed) | ~(closed[behind] | jnp.any(boxes == behind)))
    return jnp.where(free, there, agent), jnp.where(free & pushed, behind, boxes)


def solved(level: Level, boxes: Int[Array, " K"]) -> Bool[Array, ""]:
    """Whether every box is on a goal."""
    return jnp.all(jnp.any(boxes[:, None] == level.goals[None, :], axis=1))


def closed_by(walls: Bool[Array, " N"], boxes: Int[Array, " K"], but: Array) -> Bool[Array, " N"]:
    """Walls, and the cells of all boxes but one."""
    others = jnp.where(jnp.arange(boxes.shape[0]) == but, walls.shape[0], boxes)
    return walls.at[others].set(True, mode="drop")


def distances(walls: Bool[Array, " N"], goal: Array, *, side: int, most: int) -> Int[Array, "N N"]:
    """``[agent, box]``: actions until one box is on the goal; ``FAR`` beyond ``most``, or where it cannot be."""
    cells = side * side
    agent, box = (x.reshape(-1) for x in jnp.meshgrid(*[jnp.arange(cells, dtype=jnp.int32)] * 2, indexing="ij"))
    each = jnp.arange(1, ACTIONS, dtype=jnp.int32)
    step = jax.vmap(jax.vmap(lambda a, b, k: _with_one(walls, a, b, k, side), (0, 0, None)), (None, None, 0))
    after_agent, after_box = step(agent, box, each)
    able = ~walls[agent] & ~walls[box] & (agent != box)
    done = able & (box == goal)
    start = jnp.where(done, 0, FAR).astype(jnp.int32)

    def nearer(_: Array, found: Array) -> Array:
        onward = jnp.min(found[after_agent * cells + after_box], axis=0) + 1
        return jnp.where(done, 0, jnp.where(able, jnp.minimum(onward, FAR), FAR))

    return jax.lax.fori_loop(0, most, nearer, start).reshape(cells, cells)


def _with_one(walls: Array, agent: Array, box: Array, action: Array, side: int) -> tuple[Array, Array]:
    agent, boxes = move(walls, agent, box[None], action, side=side)
    return agent, boxes[0]


def best_action(found: Int[Array, "N N"], walls: Bool[Array, " N"], agent: Array, box: Array, *, side: int) -> Array:
    """The first action that brings one box nearer to its end; stay where none does."""
    each = jnp.arange(ACTIONS, dtype=jnp.int32)
    after = jax.vmap(lambda k: _with_one(walls, agent, box, k, side))(each)
    nearer = found[after] < found[agent, box]
    return jnp.where(jnp.any(nearer), jnp.argmax(nearer), 0).astype(jnp.int32)


def in_turn(level: Level, *, side: int, most: int) -> tuple[Level, Int[Array, ""]]:
    """``(level, actions)``: boxes and goals in the order in which a simple solver pushes them, one after another.

    The next box, and its goal, are those with the fewest actions while the other boxes stand where they are; ``FAR``
    and more actions where it comes to an end.
    """
    count, none = level.boxes.shape[0], jnp.int32(FAR)
    agent, boxes, goals, total = level.agent, level.boxes, level.goals, jnp.int32(0)
    for k in range(count):  # the first k boxes are on the first k goals
        rest = jnp.arange(k, count, dtype=jnp.int32)
        closed = jax.vmap(partial(closed_by, level.walls, boxes))(rest)
        each_goal = jax.vmap(partial(distances, side=side, most=most), (None, 0))
        tables = jax.vmap(each_goal, (0, None))(closed, goals[k:])
        ways = tables[:, :, agent, :][jnp.arange(count - k), :, boxes[rest]]
        least = jnp.argmin(ways)
        box, goal = least // (count - k), least % (count - k)
        boxes, goals = (_swapped(x, k, k + at) for x, at in ((boxes, box), (goals, goal)))
        way, walls = tables[box, goal], closed_by(level.walls, boxes, jnp.int32(k))

        def step(at: tuple[Array, Array], _: None, way=way, walls=walls) -> tuple[tuple[Array, Array], None]:
            return _with_one(walls, *at, best_action(way, walls, *at, side=side), side), None

        total = jnp.minimum(total + ways[box, goal], 2 * none)
        (agent, _), _ = jax.lax.scan(step, (agent, boxes[k]), None, most)
        level, boxes = level._replace(boxes=_swapped(level.boxes, k, k + box)), boxes.at[k].set(goals[k])
    return level._replace(goals=goals), total


def _swapped(values: Array, one: int, other: Array) -> Array:
    return values.at[one].set(values[other]).at[other].set(values[one])


def tables_of(level: Level, *, side: int, most: int) -> Int[Array, "K N N"]:
    """``distances`` of each box in turn: those before it are on their goals, those behind it where they were."""

    def of(k: Array) -> Array:
        stand = jnp.where(jnp.arange(level.boxes.shape[0]) < k, level.goals, level.boxes)
        return distances(closed_by(level.walls, stand, k), level.goals[k], side=side, most=most)

    return jax.lax.map(of, jnp.arange(level.boxes.shape[0], dtype=jnp.int32))


def turn_of(level: Level, boxes: Int[Array, " K"]) -> Int[Array, ""]:
    """The first box that is not on its own goal."""
    return jnp.argmax(boxes != level.goals).astype(jnp.int32)


def expert_action(
    tables: Int[Array, "K N N"], level: Level, agent: Array, boxes: Int[Array, " K"], *, side: int
) -> Int[Array, ""]:
    """What ``in_turn``'s solver does here, while the boxes are where its plan has them; stay at its end."""
    turn = turn_of(level, boxes)
    action = best_action(tables[turn], closed_by(level.walls, boxes, turn), agent, boxes[turn], side=side)
    return jnp.where(jnp.all(boxes == level.goals), 0, action)


class Way(NamedTuple):
    """How a shortest solution of one box goes on around a square, to its end and ``there``: whether there is one."""

    agents: Int[Array, " T"]
    boxes: Int[Array, " T1"]
    actions: Int[Array, " T"]
    there: Bool[Array, ""]


def around(level: Level, shut: Array, box: Array, *, side: int, most: int) -> Way:
    """A shortest way of one box to its goal on which neither it nor the agent enters a square; the others stand."""
    walls = closed_by(level.walls, level.boxes, box).at[shut].set(True)
    far, first = distances(walls, level.goals[box], side=side, most=most), level.boxes[box]

    def step(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        action = best_action(far, walls, *at, side=side)
        after = _with_one(walls, *at, action, side)
        return after, (*after, action)

    _, (agents, boxes, actions) = jax.lax.scan(step, (level.agent, first), None, most)
    there = (far[level.agent, first] < FAR) & (shut != level.agent)
    return Way(agents, jnp.concatenate([first[None], boxes]), actions, there)


def detour(level: Level, shut: Array, *, side: int, most: int, length: int) -> tuple[Array, Array, Array]:
    """``(squares [length], actions [length], there is one)``: how the first box's way around a square begins.

    A way that is over sooner stays where it ends.
    """
    way = around(level, shut, jnp.int32(0), side=side, most=most)
    return way.agents[:length], way.actions[:length], way.there


def pushes(boxes: Int[Array, " T1"], actions: Int[Array, " T"], length: int) -> tuple[Array, Array, Array, Array]:
    """The first pushes of one box: squares it is pushed off, directions, squares it comes to, which there are.

    Those that there are not repeat the last one.

    >>> [x.tolist() for x in pushes(jnp.array([5, 5, 6, 7, 7]), jnp.array([1, 4, 4, 2]), 3)]
    [[5, 6, 6], [4, 4, 4], [6, 7, 7], [True, True, False]]
    """
    moved = boxes[1:] != boxes[:-1]
    order, number = jnp.cumsum(moved.astype(jnp.int32)), jnp.arange(1, length + 1, dtype=jnp.int32)
    wanted = jnp.minimum(number, order[-1])
    at = jnp.argmax(moved[None, :] & (order[None, :] == wanted[:, None]), axis=1)
    return boxes[at], actions[at], boxes[at + 1], number <= order[-1]


def _rooms(key: Key, count: int, side: int, boxes: int) -> Level:
    """Boards with several boxes, from their ends backwards: a box stands where a way to its goal begins.

    The boxes before it are on their goals then, and those behind it where they begin.
    """
    cells = side * side

    def one(key: Key) -> Level:
        draw, *keys = jax.random.split(key, boxes + 1)
        wall, place = jax.random.split(draw)
        walls = jax.random.uniform(wall, (cells,)) < 0.125
        goals = jax.random.permutation(place, cells)[:boxes].astype(jnp.int32)
        walls, stand, agent = walls.at[goals].set(False), goals, jnp.int32(0)
        for k in reversed(range(boxes)):
            closed = closed_by(walls, stand, jnp.int32(k))
            way = distances(closed, goals[k], side=side, most=4 * side)
            free = (way > 1) & (way < FAR) & jnp.ones((cells,), bool).at[goals].set(False)[None, :]
            begin = jax.random.categorical(keys[k], jnp.where(free, 0.0, -jnp.inf).reshape(-1))
            agent, box = (x.astype(jnp.int32) for x in jnp.divmod(begin, cells))
            stand = stand.at[k].set(jnp.where(jnp.any(free), box, stand[k]))
        return Level(walls, goals, agent, stand)

    return jax.vmap(one)(jax.random.split(key, count))


def _drawn(rng: np.random.Generator, count: int, side: int) -> Level:
    """Boards with one box, goal and agent anywhere."""
    walls = rng.random((count, side * side)) < 0.125
    places = np.argsort(rng.random((count, side * side)), axis=1)[:, :3].astype(np.int32)
    walls[np.arange(count)[:, None], places] = False
    return Level(jnp.asarray(walls), *(jnp.asarray(x) for x in (places[:, :1], places[:, 1], places[:, 2:])))


@lru_cache(maxsize=4)
def _solver(side: int, most: int):
    return jax.jit(lambda given: jax.lax.map(lambda one: in_turn(one, side=side, most=most), given, batch_size=64))


@lru_cache(maxsize=8)
def levels(
    count: int, side: int, boxes: int = 1, *, seed: int = 0, shortest: int = 4, longest: int = 0
) -> tuple[Level, Level]:
    """``(train, heldout)``: ``count`` and a quarter as many different levels whose solution ``in_turn`` is as long.

    An eighth of the cells are walls. Boards with several boxes are made from their ends backwards, so that most can be
    solved; all are solved once more. No board of one part is in the other.

    Args:
      longest: 0: 16 with one box, 8 more with each further one.
    """
    longest = longest or 8 + 8 * boxes
    wanted, rng = count + count // 4, np.random.default_rng(seed)
    solve = _solver(side, longest + 1)
    rooms = jax.jit(lambda key: _rooms(key, max(64, wanted), side, boxes))
    kept: dict[bytes, np.ndarray] = {}
    for number in range(1000):
        if len(kept) >= wanted:
            break
        key = jax.random.fold_in(jax.random.key(seed), number)
        found, lengths = solve(_drawn(rng, max(64, wanted), side) if boxes == 1 else rooms(key))
        rows = np.column_stack([np.asarray(x) for x in (found.goals, found.agent, found.boxes, found.walls)])
        clear = ~np.asarray(found.walls)[np.arange(len(rows))[:, None], found.boxes].any(1)
        for k in np.flatnonzero((lengths >= shortest) & (lengths <= longest) & clear):
            kept.setdefault(rows[k].astype(np.int32).tobytes(), rows[k])
    if len(kept) < wanted:
        raise UserError(f"--boxes {boxes}: only {len(kept)} of {wanted} boards of side {side} were found; give another "
                        "--side, fewer --boxes or --levels")  # fmt: skip
    every = _of_rows(np.asarray(list(kept.values())[:wanted]), boxes)
    return jax.tree.map(lambda x: x[:count], every), jax.tree.map(lambda x: x[count:], every)


def _of_rows(table: np.ndarray, boxes: int) -> Level:
    """Levels of rows of goals, agent, boxes and walls."""
    goals, agent, stand, walls = np.split(table, (boxes, boxes + 1, 2 * boxes + 1), axis=1)
    places = (jnp.asarray(x, jnp.int32) for x in (goals, agent[:, 0], stand))
    return Level(jnp.asarray(walls > 0), *places)


_SIGNS = "#@$. "


@lru_cache(maxsize=4)
def read(path: str) -> tuple[int, Level, Level]:
    """``(side, train, heldout)`` from a text file: square boards of one size, each fifth of them held out.

    A board is lines of ``#`` (wall), ``@`` (agent), ``$`` (box), ``.`` (goal) and spaces, as in the files of Boxoban;
    an empty line, or one that begins with ``;``, stands between two. All have equally many boxes. Boards that the
    solver of one box after another does not solve train nobody: it is imitated.

    Raises:
      DataError: for a board of another size or with other signs, or without one agent and as many boxes as goals; and
        where none is left to train on.
    """
    texts: list[list[str]] = [[]]
    for line in pathlib.Path(path).read_text().splitlines():
        if not line or line.startswith(";"):
            texts.append([])
        else:
            texts[-1].append(line)
    texts = [board for board in texts if board]
    side, rows, boxes = (len(texts[0]) if texts else 0), [], 0
    for number, board in enumerate(texts, start=1):
        text = "".join(line.ljust(side) for line in board)
        if len(board) != side or len(text) != side * side or set(text) - set(_SIGNS):
            raise DataError(f"{path}: board {number} is no square of {side} lines of #, @, $, . and spaces")
        goals, agents, stand = ([k for k, sign in enumerate(text) if sign == mark] for mark in ".@$")
        boxes = boxes or len(stand)
        if len(agents) != 1 or not len(goals) == len(stand) == boxes > 0:
            raise DataError(f"{path}: board {number} needs one agent and as many boxes as goals, {boxes or 1} as the "
                            "first board has, each on a cell of its own")  # fmt: skip
        rows.append([*goals, *agents, *stand, *(sign == "#" for sign in text)])
    if len(rows) < 5:
        raise DataError(f"{path}: {len(rows)} boards are too few; give 5 at least")
    every, lengths = _solver(side, 8 * side)(_of_rows(np.asarray(rows, np.int32), boxes))
    held, able = np.arange(len(rows)) % 5 == 4, np.asarray(lengths) < FAR
    if not (~held & able).any():
        raise DataError(f"{path}: no board is solved by pushing one box after the other; give easier ones")
    if (left := int((~held & ~able).sum())) > 0:
        print(f"{path}: {left} boards are not solved by pushing one box after the other and do not train", flush=True)
    return side, jax.tree.map(lambda x: x[~held & able], every), jax.tree.map(lambda x: x[held], every)


def seen(level: Level, agent: Array, boxes: Int[Array, " K"]) -> Float[Array, "N 4"]:
    """The board as planes: walls, goals, agent, boxes."""
    cell = jnp.arange(level.walls.shape[0], dtype=jnp.int32)
    goals, stand = (jnp.any(cell[None, :] == x[:, None], axis=0) for x in (level.goals, boxes))
    return jnp.stack([level.walls, goals, cell == agent, stand], axis=1).astype(jnp.float32)


def entered(
    agents: Int[Array, " T1"], actions: Int[Array, " T"], used: Bool[Array, " T"], cells: int
) -> Int[Array, "T N"]:
    """``C_A``: at each step, by which action the agent next steps onto each square; 0: never again.

    >>> entered(jnp.array([0, 1, 3]), jnp.array([4, 2]), jnp.ones(2, bool), 4).tolist()
    [[0, 4, 0, 2], [0, 0, 0, 2]]
    """
    return _next(agents[1:], agents[1:] != agents[:-1], actions, used, cells)


def pushed(
    boxes: Int[Array, "T1 K"], actions: Int[Array, " T"], used: Bool[Array, " T"], cells: int
) -> Int[Array, "T N"]:
    """``C_B``: at each step, in which direction a box is next pushed off each square; 0: never again.

    >>> pushed(jnp.array([[1], [1], [3]]), jnp.array([4, 2]), jnp.ones(2, bool), 4).tolist()
    [[0, 2, 0, 0], [0, 2, 0, 0]]
    """
    moved = boxes[1:] != boxes[:-1]  # of one box at most
    square = jnp.take_along_axis(boxes[:-1], jnp.argmax(moved, axis=1)[:, None], axis=1)[:, 0]
    return _next(square, jnp.any(moved, axis=1), actions, used, cells)


def _next(square: Array, happens: Array, actions: Array, used: Array, cells: int) -> Array:
    def earlier(label: Array, step: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        here, now, action = step
        label = jnp.where(now & (jnp.arange(cells, dtype=jnp.int32) == here), action, label)
        return label, label

    steps = (square, happens & used, actions.astype(jnp.int32))
    return jax.lax.scan(earlier, jnp.zeros((cells,), jnp.int32), steps, reverse=True)[1]
