r"""Composition of functions on strings as text for real models: 25 functions under meaningless names, and running sums.

A problem of level L is an expression L calls deep on a word of three to ten letters; one call in five joins a literal,
by ``concatenate`` or ``interlace``. A solution works one call a line, innermost first, and boxes the last word. Only
single functions are ever shown with their definitions. From arXiv:2509.25123, section 3, where the functions and the
drawn expressions are others.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_LETTERS = 20  # of any word on the way; a longer one is drawn again
SHARE = 0.2  # of calls with a literal
TRAIN = tuple(range(0, 25, 2))  # which are composed in training
HELD_OUT = tuple(range(1, 25, 2))  # and which never


class Function(NamedTuple):
    """Its definition as it is shown, and the function itself, of a word and a number that not all read."""

    shown: str
    apply: Callable[[str, int], str]


FUNCTIONS = (
    Function("s[::-1]", lambda s, n: s[::-1]),
    Function("s[n % len(s):] + s[:n % len(s)]", lambda s, n: s[n % len(s) :] + s[: n % len(s)]),
    Function("''.join(sorted(s))", lambda s, n: "".join(sorted(s))),
    Function("s + s[::-1]", lambda s, n: s + s[::-1]),
    Function("s[::2]", lambda s, n: s[::2]),
    Function("s[1::2] + s[::2]", lambda s, n: s[1::2] + s[::2]),
    Function("s[:(len(s) + 1) // 2]", lambda s, n: s[: (len(s) + 1) // 2]),
    Function("s[len(s) // 2:]", lambda s, n: s[len(s) // 2 :]),
    Function("s[len(s) // 2:] + s[:len(s) // 2]", lambda s, n: s[len(s) // 2 :] + s[: len(s) // 2]),
    Function("''.join(sorted(s, reverse=True))", lambda s, n: "".join(sorted(s, reverse=True))),
    Function(
        "''.join(chr((ord(c) - 97 + n) % 26 + 97) for c in s)",
        lambda s, n: "".join(chr((ord(c) - 97 + n) % 26 + 97) for c in s),
    ),
    Function("''.join(chr(219 - ord(c)) for c in s)", lambda s, n: "".join(chr(219 - ord(c)) for c in s)),
    Function("''.join(dict.fromkeys(s))", lambda s, n: "".join(dict.fromkeys(s))),
    Function("''.join(c * 2 for c in s)", lambda s, n: "".join(c * 2 for c in s)),
    Function("s[:1] + s[:0:-1]", lambda s, n: s[:1] + s[:0:-1]),
    Function("s[1:-1] or s", lambda s, n: s[1:-1] or s),
    Function("s[1:] + s[:1] + s[:1]", lambda s, n: s[1:] + s[:1] + s[:1]),
    Function("s[:n] + s[:n]", lambda s, n: s[:n] + s[:n]),
    Function(
        "''.join(s[k:k + 2][::-1] for k in range(0, len(s), 2))",
        lambda s, n: "".join(s[k : k + 2][::-1] for k in range(0, len(s), 2)),
    ),
    Function("s.replace(s[0], s[-1])", lambda s, n: s.replace(s[0], s[-1])),
    Function("min(s) + s", lambda s, n: min(s) + s),
    Function("s + max(s) * n", lambda s, n: s + max(s) * n),
    Function("s[-n:] + s[:-n]", lambda s, n: s[-n:] + s[:-n]),
    Function("s[0] + s + s[0]", lambda s, n: s[0] + s + s[0]),
    Function("s[::-1][:n] + s[n:]", lambda s, n: s[::-1][:n] + s[n:]),
)


def interlace(first: str, second: str) -> str:
    """Letters in turn, then what is left of the longer one.

    >>> interlace("abc", "xy")
    'axbyc'
    """
    turns = min(len(first), len(second))
    return "".join(a + b for a, b in zip(first, second, strict=False)) + first[turns:] + second[turns:]


BINARY = {"concatenate": lambda first, second: first + second, "interlace": interlace}


class Problem(NamedTuple):
    """A question, its answer, and the work."""

    prompt: str
    answer: str
    solution: str
    level: int
    unseen: bool  # composes functions that training does not compose
    sums: bool = False


class _Call(NamedTuple):
    name: str
    more: str  # arguments behind the word, as they are written
    apply: Callable[[str], str]
    definition: str = ""


def _literal(rng: np.random.Generator, least: int, most: int) -> str:
    return "".join(rng.choice(list(LETTERS), size=int(rng.integers(least, most + 1))))


def _call(rng: np.random.Generator, functions: tuple[int, ...]) -> _Call:
    if rng.random() < SHARE:
        name, word = str(rng.choice(list(BINARY))), _literal(rng, 2, 4)
        return _Call(name, f', "{word}"', lambda s: BINARY[name](s, word))
    number, n = int(rng.choice(functions)), int(rng.integers(1, 4))
    found = FUNCTIONS[number]
    reads = re.search(r"\bn\b", found.shown) is not None
    definition = f"def func_{number}(s{', n' if reads else ''}):\n    return {found.shown}\n"
    return _Call(f"func_{number}", f", {n}" if reads else "", lambda s: found.apply(s, n), definition)


def composed(
    rng: np.random.Generator, level: int, functions: tuple[int, ...], *, define: bool, unseen: bool
) -> Problem:
    """One problem of ``level`` calls.

    Args:
      define: whether the definitions of its functions stand above the question.
      unseen: what ``Problem.unseen`` is to say.
    """
    while True:
        start = _literal(rng, 3, 10)
        calls = [_call(rng, functions) for _ in range(level)]
        words = [start]
        for call in calls:
            words.append(call.apply(words[-1]))
        if all(1 <= len(word) <= MOST_LETTERS for word in words):
            break
    expression = "x"
    for call in calls:
        expression = f"{call.name}({expression}{call.more})"
    definitions = "".join(dict.fromkeys(call.definition for call in calls)) if define else ""
    prompt = f'{definitions}def main(x):\n    return {expression}\nWhat does main("{start}") return?\n'
    lines = [
        f'{call.name}("{before}"{call.more}) = "{after}"'
        for call, before, after in zip(calls, words, words[1:], strict=False)
    ]
    return Problem(prompt, words[-1], "\n".join([*lines, f"\\boxed{{{words[-1]}}}"]), level, unseen)


def summed(rng: np.random.Generator, level: int) -> Problem:
    """A running sum of ``level`` additions and subtractions: the task to transfer to."""
    value, asked, lines = int(rng.integers(10, 100)), [], []
    start = value
    for _ in range(level):
        more = int(rng.integers(1, 10)) * int(rng.choice([-1, 1]))
        asked.append(f"{'add' if more > 0 else 'subtract'} {abs(more)}")
        lines.append(f"{value} {'+' if more > 0 else '-'} {abs(more)} = {value + more}")
        value += more
    prompt = f"Start with {start}, then {', then '.join(asked)}. What is the result?\n"
    return Problem(prompt, str(value), "\n".join([*lines, f"\\boxed{{{value}}}"]), level, False, True)


def sums(each: int, seed: int = 0) -> list[Problem]:
    """``each`` different running sums of one, two and three steps."""
    rng = np.random.default_rng([seed, 1])
    return [problem for level in (1, 2, 3) for problem in _different(lambda k, q=level: summed(rng, q), each)]


def make_problems(levels: tuple[int, ...], each: int, seed: int = 0) -> list[Problem]:
    """``each`` different problems of every kind: single functions, compositions of both sets at ``levels``."""
    rng = np.random.default_rng([seed, 0])
    both = (*TRAIN, *HELD_OUT)
    # every second single function is shown with its definition
    found = _different(lambda k: composed(rng, 1, both, define=k % 2 == 0, unseen=False), each)
    for functions, unseen in ((TRAIN, False), (HELD_OUT, True)):
        for level in levels:
            found += _different(
                lambda k, q=level, f=functions, u=unseen: composed(rng, q, f, define=False, unseen=u), each
            )
    return found


def _different(draw: Callable[[int], Problem], count: int) -> list[Problem]:
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(len(found))
        found.setdefault(problem.prompt, problem)
    return list(found.values())
