"""A reasoner that writes its work twice: where methods that shorten begin."""

from collections.abc import Sequence

import optax

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.plan import Stage

MARK = "#"  # before the answer of a chain


def written_twice(problem: Problem) -> str:
    """The work of a chain, then all of it again: what a long-winded reasoner writes.

    >>> from jaxrl_llm.data.tasks import chain
    >>> written_twice(chain.from_parts([3, 5], "+", 11))
    '3+5=8;3+5=8#8'
    """
    work, answer = problem.solution.rsplit(MARK, 1)
    return f"{work};{work}{MARK}{answer}"


def rows_of(found: Bench, problems: Sequence[Problem], texts: Sequence[str]) -> SupervisedRows:
    """Rows of problems with these texts, as wide as work that is written twice."""
    width = found.train.tokens.shape[1] + 2 * max(len(p.solution) for p in problems)
    return supervised.supervised_rows(
        found.model, [(p.prompt, text) for p, text in zip(problems, texts, strict=True)], width=width
    )


def warm_stage(found: Bench, problems: Sequence[Problem], *, steps: int) -> Stage:
    """Supervised training that makes a model long-winded."""
    rows = rows_of(found, problems, [written_twice(p) for p in problems])
    warm = supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(1e-3))
    return Stage(warm, steps)
