"""String-function composition: ``fn rev(dup(ab))=>`` gives ``dup:abab,rev:baba#baba`` (innermost first)."""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (1, 2, 3)  # nested functions
LETTERS = "abcdef"


def _next(s: str) -> str:
    return "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in s)


FUNCTIONS = {
    "rev": lambda s: s[::-1],
    "rot": lambda s: s[1:] + s[:1],
    "nxt": _next,
    "tail": lambda s: s[1:] or s,
    "dup": lambda s: (s + s)[:6],
    "srt": lambda s: "".join(sorted(s)),
}


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws ``level`` nested functions on a word of two to four letters."""
    if level not in LEVELS:
        raise ValueError(f"level={level} nested functions is not one of {LEVELS}")
    word = "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), int(rng.integers(2, 5))))
    names = [list(FUNCTIONS)[i] for i in rng.integers(0, len(FUNCTIONS), level)]
    expression, value, steps = word, word, []
    for name in names:
        expression = f"{name}({expression})"
        value = FUNCTIONS[name](value)
        steps.append(f"{name}:{value}")
    prompt = f"fn {expression}=>"
    return Problem("strings", prompt, f"{','.join(steps)}#{value}", {"value": value}, level, prompt)
