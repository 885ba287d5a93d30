"""What an arithmetic chain is made of, and chains made from such concepts: modulus, operators, number of operations."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError

OPERATORS = "+-*"


def names(levels: Sequence[int]) -> tuple[str, ...]:
    """All concepts of chains with these numbers of operations."""
    return (*(f"m{m}" for m in chain.MODULI), *OPERATORS, *(f"depth{k}" for k in levels))


def check_chains(problems: Sequence[Problem]) -> None:
    """UserError unless all problems are arithmetic chains, the only ones whose concepts are known."""
    others = sorted({p.task for p in problems} - {"chain"})
    if others:
        raise UserError(f"concepts are known of arithmetic chains, not of {', '.join(others)}: --data chain")


def concepts_of(problem: Problem) -> tuple[str, ...]:
    """The concepts of one problem.

    >>> concepts_of(chain.make(np.random.default_rng(0), 2))
    ('m11', '+', 'depth2')
    """
    used = problem.answer["operators"]
    return (f"m{problem.answer['modulus']}", *(o for o in OPERATORS if o in used), f"depth{problem.level}")


def make_from(rng: np.random.Generator, concepts: Sequence[str], levels: Sequence[int]) -> Problem:
    """A chain with the given concepts; where none of a kind is given, or several, one is drawn."""
    moduli = [m for m in chain.MODULI if f"m{m}" in concepts] or list(chain.MODULI)
    depths = [k for k in levels if f"depth{k}" in concepts] or list(levels)
    allowed = [o for o in OPERATORS if o in concepts] or list(OPERATORS)
    modulus, level = int(rng.choice(moduli)), int(rng.choice(depths))
    numbers = [int(n) for n in rng.integers(0, modulus, level + 1)]
    operators = "".join(allowed[i] for i in rng.integers(0, len(allowed), level))
    return chain.from_parts(numbers, operators, modulus)


def solver_answers(rng: np.random.Generator, problem: Problem, samples: int, *, error_rate: float) -> np.ndarray:
    """Answers of a strong but imperfect solver: right, or with chance ``error_rate`` any residue."""
    modulus, right = problem.answer["modulus"], problem.answer["value"]
    return np.where(rng.random(samples) < error_rate, rng.integers(0, modulus, samples), right)
