"""Key-door world on a square grid: ``kd ..D/.K./A..=>``; rows from the top, moves ``l r u d``, then ``p`` and ``o``.

As ``keydoor``, with rows: the door is a cell of the border, opened from a cell beside it; nobody walks through it.
"""

import collections

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (3, 4, 5)  # side of the grid
MOVES = {"l": (0, -1), "r": (0, 1), "u": (-1, 0), "d": (1, 0)}


def parse(world: str) -> tuple[int, int, dict[str, int]]:
    """``(height, width, cells of A, K and D)`` of a grid as text; cells are numbered row by row.

    >>> parse("..D/.K./A..")
    (3, 3, {'A': 6, 'K': 4, 'D': 2})
    """
    rows = world.split("/")
    flat = "".join(rows)
    return len(rows), len(rows[0]), {name: flat.index(name) for name in "AKD"}


def shortest(height: int, width: int, start: int, goals: set[int], closed: int) -> str:
    """The first of the shortest walks from a cell to any of the goals without entering ``closed``, as moves."""
    seen, queue = {start}, collections.deque([(start, "")])
    while queue:
        cell, walk = queue.popleft()
        if cell in goals:
            return walk
        for move, (down, right) in MOVES.items():
            row, column = cell // width + down, cell % width + right
            beside = row * width + column
            if 0 <= row < height and 0 <= column < width and beside != closed and beside not in seen:
                seen.add(beside)
                queue.append((beside, walk + move))
    raise ValueError(f"cell {start} reaches none of {sorted(goals)} in a grid of {height} x {width}")


def plan(world: str) -> str:
    """A shortest sequence of actions that opens the door.

    >>> plan("..D/.K./A..")
    'rupro'
    """
    height, width, at = parse(world)
    beside = {
        (at["D"] // width + down) * width + at["D"] % width + right
        for down, right in MOVES.values()
        if 0 <= at["D"] // width + down < height and 0 <= at["D"] % width + right < width
    }
    to_key = shortest(height, width, at["A"], {at["K"]}, at["D"])
    return to_key + "p" + shortest(height, width, at["K"], beside, at["D"]) + "o"


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a grid of ``level`` by ``level`` cells."""
    if level < 3:
        raise ValueError(f"level={level} is too small a side; at least 3")
    cells = np.arange(level * level)
    row, column = cells // level, cells % level
    border = cells[(row % (level - 1) == 0) | (column % (level - 1) == 0)]
    door = int(rng.choice(border))
    agent, key = (int(c) for c in rng.permutation(cells[cells != door])[:2])
    names = {agent: "A", key: "K", door: "D"}
    text = "".join(names.get(c, ".") for c in range(level * level))
    world = "/".join(text[k : k + level] for k in range(0, level * level, level))
    prompt = f"kd {world}=>"
    return Problem("keydoor_grid", prompt, plan(world), {"world": world}, level, prompt)
