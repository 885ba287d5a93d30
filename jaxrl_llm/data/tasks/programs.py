"""Small programs from examples: ``py 1>5 2>7 3>9=>`` asks for a Python expression of ``x``, such as ``x*2+3``.

The answer is a program and is judged as one, by the tests shown and by others that are not, in the sandbox. Many
answers are right.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError

LEVELS = (1, 2, 3)  # how many operations
SHOWN, HIDDEN = (1, 2, 3), (0, 5)  # inputs of the tests
MAX_NUMBER = 9
MAX_VALUE = 999
START = "f = lambda x: "  # what the response goes on from

Operation = tuple[str, int | None]  # an operator, and a number or x


def text(operations: list[Operation]) -> str:
    """The expression, worked from left to right.

    >>> text([("*", 2), ("+", 3)]), text([("+", 3), ("*", None)])
    ('x*2+3', '(x+3)*x')
    """
    found, last = "x", "*"
    for operator, number in operations:
        found = f"({found})" if operator == "*" and last != "*" else found
        found, last = f"{found}{operator}{'x' if number is None else number}", operator
    return found


def value(operations: list[Operation], x: int) -> int:
    """What the expression gives for an input.

    >>> value([("*", 2), ("+", 3)], 5)
    13
    """
    found = x
    for operator, number in operations:
        other = x if number is None else number
        found = found + other if operator == "+" else found - other if operator == "-" else found * other
    return found


def _draw(rng: np.random.Generator, level: int) -> list[Operation]:
    """At most one product with x, so that three examples tell one polynomial from another."""
    found: list[Operation] = []
    for _ in range(level):
        operator, number = "+-*"[rng.integers(3)], int(rng.integers(2, MAX_NUMBER + 1))
        squared = ("*", None) in found
        found.append((operator, None if not squared and operator == "*" and rng.random() < 0.25 else number))
    return found


def _checks(operations: list[Operation]) -> list[str]:
    return [f"assert f({x}) == {value(operations, x)}" for x in (*SHOWN, *HIDDEN)]


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a program of ``level`` operations."""
    if level < 1:
        raise ValueError(f"level={level} must be at least 1 operation")
    while True:
        operations = _draw(rng, level)
        values = [value(operations, x) for x in (*SHOWN, *HIDDEN)]
        if max(map(abs, values)) <= MAX_VALUE:
            break
    shown = " ".join(f"{x}>{value(operations, x)}" for x in SHOWN)
    answer = {"checks": _checks(operations), "entries": ["f"], "start": START, "operations": operations}
    return Problem("programs", f"py {shown}=>", text(operations), answer, level, shown)


def flawed(rng: np.random.Generator, problem: Problem) -> str:
    """The solution with one operation drawn anew; right by luck at times.

    Raises:
      UserError: for a problem of another task.
    """
    if problem.task != "programs":
        raise UserError(f"programs with a slip are made of small programs, not of {problem.task}: --data programs")
    operations = list(problem.answer["operations"])
    operations[int(rng.integers(len(operations)))] = _draw(rng, 1)[0]
    return text(operations)
