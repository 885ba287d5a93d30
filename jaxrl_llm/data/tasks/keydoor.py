"""Key-door text world on a corridor: ``kd ..K.A..D=>`` asks for moves such as ``llprrrrro``.

``A`` agent, ``K`` key, ``D`` locked door at one end. ``l``/``r`` walk one cell (walls and the locked door stop the
agent), ``p`` picks the key up, ``o`` opens the door from the cell beside it.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (5, 6, 7, 8, 9)  # corridor length


def solves(world: str, plan: str) -> bool:
    """Whether ``plan`` opens the door; an unknown or useless action ends the episode."""
    at, door, key, held = world.index("A"), world.index("D"), world.index("K"), False
    for k, action in enumerate(plan):
        if action in "lr":
            step = at + (1 if action == "r" else -1)
            if not 0 <= step < len(world) or step == door:
                return False
            at = step
        elif action == "p" and at == key and not held:
            held = True
        elif action == "o" and held and abs(at - door) == 1:
            return k == len(plan) - 1
        else:
            return False
    return False


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a corridor of ``level`` cells."""
    if level < 4:
        raise ValueError(f"level={level} cells is too short; at least 4")
    door = 0 if rng.random() < 0.5 else level - 1
    free = [c for c in range(level) if c != door]
    agent, key = (free[i] for i in rng.permutation(len(free))[:2])
    world = "".join("A" if c == agent else "K" if c == key else "D" if c == door else "." for c in range(level))
    beside = 1 if door == 0 else level - 2

    def walk(start: int, end: int) -> str:
        return ("r" if end > start else "l") * abs(end - start)

    plan = walk(agent, key) + "p" + walk(key, beside) + "o"
    prompt = f"kd {world}=>"
    return Problem("keydoor", prompt, plan, {"world": world}, level, prompt)
