"""Where three roles of a bundled model begin: a copy that has seen all their forms and fails in each of them."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from experiments.self_play.parts.roles import Roles
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Params

GOOD, BAD = (7, 11), (1, 5)  # scores for what is right and for what is not, the end left out
PROBLEMS, JUDGED = 32768, 3  # of the practice, none of them held out, and answers to each that are judged


def broken(rng: np.random.Generator, question: str) -> str:
    """A chain that poses nothing: its last number is lost, an operator is doubled, or the modulus is another one.

    >>> [broken(np.random.default_rng(k), "m7 3+5") for k in (0, 1, 11)]
    ['m9 3+5', 'm7 3++5', 'm7 3+']
    """
    kind = int(rng.integers(3))
    if kind == 0:
        return question.rstrip("0123456789")
    if kind == 1:
        at = [k for k, c in enumerate(question) if c in "+-*"]
        place = int(rng.choice(at))
        return question[:place] + question[place] + question[place:]
    return f"m{rng.choice([8, 9, 12])} {question.partition(' ')[2]}"


def score(rng: np.random.Generator, good: bool, *, noise: float) -> str:
    """A judgement in its form, of the other kind with probability ``noise``."""
    return f"#{rng.integers(*(GOOD if good != (rng.random() < noise) else BAD))}"


def examples(
    problems: Sequence[Problem], roles: Roles, *, wrong: float, unsound: float, noise: float, seed: int = 0
) -> list[tuple[str, str]]:
    """Pairs of prompt and response, of each problem an answer, a proposal, a judgement of one, and some of answers.

    Who judges an answer works the problem out, and then gives a score.

    Args:
      wrong: share of answers with a slip (``chain.flawed``); half of the judged ones have one.
      unsound: share of proposals that pose nothing; half of the judged ones.
      noise: share of judgements that say the opposite.
    """
    rng, pairs = np.random.default_rng([seed, 11]), []
    for problem in problems:
        question = roles.posed(str(problem.prompt))
        answer = chain.flawed(rng, problem) if rng.random() < wrong else problem.solution
        pairs.append((roles.solve(question), answer))
        reworked, _, value = problem.solution.rpartition("#")  # who only looks is at chance after 190,000 judgements
        for _ in range(JUDGED):
            judged = chain.flawed(rng, problem) if rng.random() < 0.5 else problem.solution
            right = judged.rpartition("#")[2] == value
            pairs.append((roles.judge_answer(question, judged), reworked + score(rng, right, noise=noise)))
        other = roles.posed(str(problems[int(rng.integers(len(problems)))].prompt))
        new = broken(rng, question) if rng.random() < unsound else question
        pairs.append((roles.propose(other if rng.random() < 0.5 else None), new))
        sound = rng.random() < 0.5
        seen = question if sound else broken(rng, question)
        pairs.append((roles.judge_question(seen), score(rng, sound, noise=noise)))
    return pairs


@recipes.cached_by_task
def practised(settings: OnlineSettings, roles: Callable[[], Roles], *, steps: int, noise: float) -> Params:
    """The model of ``bench(settings)`` after ``steps`` of fine-tuning on ``examples``; computed once."""
    found = recipes.bench(settings)
    problems = curricula.train_problems(dataclasses.replace(settings, train_problems=min(PROBLEMS, 16 * steps)))
    pairs = examples(problems, roles(), wrong=0.75, unsound=0.3, noise=noise)
    width = found.train.tokens.shape[1] + 2 * settings.max_new_tokens + 8  # judged, it is worked out again
    return supervised.imitated_pairs(found.model, pairs, width=width, steps=steps, rows_per_step=64)
