"""4x4 sudoku with one to six blanks: ``sd 1234/34.2/...=>`` gives the whole grid; the solution is unique."""

import itertools

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (1, 2, 3, 4, 5, 6)  # blanks


def _valid(grid: np.ndarray) -> bool:
    boxes = [grid[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]
    return all(len(set(map(int, line))) == 4 for line in (*grid, *grid.T, *boxes))


def all_grids() -> np.ndarray:
    """The 288 complete grids ``[288, 4, 4]``."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    grids = []
    for a, b in itertools.product(rows, rows):
        if set(a[:2]) & set(b[:2]):
            continue
        for c, d in itertools.product(rows, rows):
            if len({a[0], b[0], c[0], d[0]}) == 4:
                grid = np.array([a, b, c, d])
                if _valid(grid):
                    grids.append(grid)
    return np.stack(grids)


_GRIDS: list[np.ndarray] = []


def _grids() -> np.ndarray:
    if not _GRIDS:  # about 0.3 s once
        _GRIDS.append(all_grids())
    return _GRIDS[0]


def text(grid: np.ndarray) -> str:
    """Rows joined by ``/``, 0 shown as a dot."""
    return "/".join("".join("." if v == 0 else str(int(v)) for v in row) for row in grid)


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a grid and blanks ``level`` cells such that the solution stays unique."""
    if level not in LEVELS:
        raise ValueError(f"level={level} blanks is not one of {LEVELS}")
    grids = _grids()
    while True:
        full = grids[rng.integers(len(grids))]
        shown = full.copy()
        shown[np.unravel_index(rng.permutation(16)[:level], (4, 4))] = 0
        if int(((grids == shown) | (shown == 0)).all(axis=(1, 2)).sum()) == 1:
            break
    prompt = f"sd {text(shown)}=>"
    return Problem("sudoku", prompt, text(full), {"value": text(full)}, level, prompt)
