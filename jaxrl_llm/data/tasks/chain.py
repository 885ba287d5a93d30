"""Arithmetic chains modulo p, worked from left to right: ``m11 3+5*4=>`` gives ``3+5=8,8*4=10#10``.

The scratchpad is optional: the answer is the text after the last ``#``, so length is free.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks.countdown import apply
from jaxrl_llm.errors import UserError

LEVELS = (1, 2, 3, 4, 5)  # how many operations
MODULI = (7, 10, 11)


def work(numbers: list[int], operators: str, modulus: int, *, slip: tuple[int, int] | None = None) -> tuple[str, int]:
    """The scratchpad and its last value; ``slip=(step, offset)`` makes one step wrong and carries the error on."""
    value, steps = numbers[0], []
    for k, (operator, number) in enumerate(zip(operators, numbers[1:], strict=True)):
        result = apply(operator, value, number) % modulus
        if slip is not None and slip[0] == k:
            result = (result + slip[1]) % modulus
        steps.append(f"{value}{operator}{number}={result}")
        value = result
    return ",".join(steps), value


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a chain of ``level`` operations."""
    if level < 1:
        raise ValueError(f"level={level} must be at least 1 operation")
    modulus = int(rng.choice(MODULI))
    numbers = [int(n) for n in rng.integers(0, modulus, level + 1)]
    operators = "".join("+-*"[i] for i in rng.integers(0, 3, level))
    return from_parts(numbers, operators, modulus)


def from_parts(numbers: list[int], operators: str, modulus: int) -> Problem:
    """The chain of these numbers, one operator between each two.

    >>> from_parts([3, 5, 4], "+*", 11).solution
    '3+5=8,8*4=10#10'
    """
    text = str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operators, numbers[1:], strict=True))
    pad, value = work(numbers, operators, modulus)
    prompt = f"m{modulus} {text}=>"
    answer = {"value": value, "numbers": numbers, "operators": operators, "modulus": modulus}
    return Problem("chain", prompt, f"{pad}#{value}", answer, len(operators), prompt)


def direct(problem: Problem) -> str:
    """The right answer without a scratchpad."""
    return f"#{problem.answer['value']}"


def flawed(rng: np.random.Generator, problem: Problem) -> str:
    """One slip in a random step, carried on; or, in a fifth of the cases, a guess without scratchpad.

    Raises:
      UserError: for a problem of another task.
    """
    if problem.task != "chain":
        raise UserError(f"attempts with a slip are made of arithmetic chains, not of {problem.task}: --data chain")
    a = problem.answer
    if rng.random() < 0.2:
        return f"#{rng.integers(a['modulus'])}"
    slip = (int(rng.integers(problem.level)), int(rng.integers(1, a["modulus"])))
    pad, value = work(a["numbers"], a["operators"], a["modulus"], slip=slip)
    return f"{pad}#{value}"
