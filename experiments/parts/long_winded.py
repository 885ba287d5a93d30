"""A reasoner that writes its work over and over: where methods that shorten begin."""

from collections.abc import Callable, Sequence

import optax

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params

MARK = "#"  # before the answer of a chain


def written_over(problem: Problem, times: int = 2) -> str:
    """The work of a chain so many ``times``: what a long-winded reasoner writes.

    >>> from jaxrl_llm.data.tasks import chain
    >>> written_over(chain.from_parts([3, 5], "+", 11))
    '3+5=8;3+5=8#8'

    Raises:
      UserError: for a solution without an answer behind ``#``.
    """
    if MARK not in problem.solution:
        raise UserError(
            f"a solution without {MARK} has no work apart from its answer that could be written over: "
            f"{problem.solution[:80]!r}; choose --data chain"
        )
    work, answer = problem.solution.rsplit(MARK, 1)
    return ";".join([work] * times) + MARK + answer


def rows_of(found: Bench, problems: Sequence[Problem], texts: Sequence[str], times: int = 2) -> SupervisedRows:
    """Rows of problems with these texts, as wide as work that is written so many ``times``."""
    width = found.train.tokens.shape[1] + times * max(len(p.solution) for p in problems)
    return supervised.supervised_rows(
        found.model, [(p.prompt, text) for p, text in zip(problems, texts, strict=True)], width=width
    )


def warm_stage(found: Bench, problems: Sequence[Problem], *, steps: int, times: int = 2) -> Stage:
    """Supervised training that makes a model write its work so many ``times``."""
    rows = rows_of(found, problems, [written_over(p, times) for p in problems], times)
    warm = supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(1e-3))
    return Stage(warm, steps)


def warm_base(found: Bench, problems: Sequence[Problem], *, steps: int, times: int = 2) -> Callable[[Key], Params]:
    """The ``init`` of a plan: the model after ``warm_stage``, so that the first measurement is of what was taught."""
    method = warm_stage(found, problems, steps=steps, times=times).method

    def init(key: Key) -> Params:
        state = offline.init_state(method, found.model.params, key)
        return offline.scan_steps(method, state, steps)[0].params

    return init
