"""Countdown: reach a target from two to four numbers, each used exactly once, by + - and *.

Prompt ``cd 3 5 7 26=>``; response in steps ``7*3=21,21+5=26``: every step takes two values that are still on the
table and puts its result back, the last result is the target. Values stay in 0..99. Many answers are right.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (2, 3, 4)  # how many numbers
MAX_NUMBER = 12
MAX_VALUE = 99
MAX_TARGET = 60


def apply(operator: str, a: int, b: int) -> int:
    """One step of integer arithmetic."""
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def attempt(rng: np.random.Generator, numbers: list[int]) -> tuple[list[str], int]:
    """Random legal steps that use every number once: ``(["7*3=21", "21+5=26"], 26)``."""
    table, steps = list(numbers), []
    while len(table) > 1:
        i, j = rng.permutation(len(table))[:2]
        a, b = table[i], table[j]
        operator = "+-*"[rng.integers(3)]
        if operator == "-" and a < b:
            a, b = b, a
        value = apply(operator, a, b)
        if value > MAX_VALUE:
            operator, value = "+", a + b
        if value > MAX_VALUE:
            operator, a, b = "-", max(a, b), min(a, b)
            value = a - b
        steps.append(f"{a}{operator}{b}={value}")
        table = [v for k, v in enumerate(table) if k not in (i, j)] + [value]
    return steps, table[0]


def make(rng: np.random.Generator, level: int, *, largest: int = 0) -> Problem:
    """Draws a solvable problem with ``level`` numbers up to ``MAX_NUMBER``, one of which is larger if that is asked.

    Args:
      largest: one number is drawn from ``MAX_NUMBER + 1`` to it; 0: none is.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level} is not a number count of Countdown; choose one of {LEVELS}")
    while True:
        numbers = [int(n) for n in rng.integers(1, MAX_NUMBER + 1, level)]
        if largest:
            numbers[int(rng.integers(level))] = int(rng.integers(MAX_NUMBER + 1, largest + 1))
        steps, target = attempt(rng, numbers)
        if 1 <= target <= MAX_TARGET:
            break
    shown = " ".join(map(str, numbers))
    return Problem(
        task="countdown",
        prompt=f"cd {shown} {target}=>",
        solution=",".join(steps),
        answer={"numbers": numbers, "target": target},
        level=level,
        identity=f"{sorted(numbers)}:{target}",
    )


def flawed(rng: np.random.Generator, problem: Problem) -> str:
    """A plausible wrong attempt: legal steps with right arithmetic that end anywhere, as a hasty solver writes."""
    steps, _ = attempt(rng, problem.answer["numbers"])
    return ",".join(steps)
