"""Problems that ask whether a solution is right, beside those that ask for one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import critique_verifier
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain, programs
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.types import Params, Problems, Rewards, Trajectories
from jaxrl_llm.verifiers import code

Attempt = Callable[[np.random.Generator, Problem], str]
TRIES = 100  # of an attempt that is to be wrong


class Kind(NamedTuple):
    """What is judged: how wrong solutions come about, which are right, and what is written before the label."""

    attempt: Attempt
    right: Callable[[Problem, str], bool]
    same: Callable[[str, str], bool]  # of two solutions: what a judge goes by who works for itself
    work: Callable[[str], str]


def answer_of(solution: str) -> str:
    """What follows the last ``#``."""
    return solution.rpartition("#")[2]


def _work(solution: str) -> str:
    return solution.rpartition("#")[0]


def _same_answer(one: str, other: str) -> bool:
    return answer_of(one) == answer_of(other)


def _right_chain(problem: Problem, candidate: str) -> bool:
    return _same_answer(candidate, problem.solution)


def _right_program(problem: Problem, candidate: str) -> bool:
    return candidate == problem.solution or code.verify(problem.answer, candidate).value == 1.0


def early_slip(rng: np.random.Generator, problem: Problem) -> str:
    """A wrong solution whose slip is in the first step that the answer depends on, and is carried on.

    Who judges it finds the error in the first step that he works himself: he need not solve the whole.

    Raises:
      UserError: for a problem of another task than chains.

    >>> early_slip(np.random.default_rng(0), chain.from_parts([3, 5, 0], "+*", 7))[:5]
    '3+5=1'
    """
    if problem.task != "chain":
        raise UserError(f"attempts with a slip are made of arithmetic chains, not of {problem.task}: --data chain")
    numbers, operators, modulus = (problem.answer[name] for name in ("numbers", "operators", "modulus"))
    slips = [(step, int(by)) for step in range(problem.level) for by in 1 + rng.permutation(modulus - 1)]
    made = (chain.work(numbers, operators, modulus, slip=slip) for slip in slips)
    return next(f"{pad}#{value}" for pad, value in made if value != problem.answer["value"])  # the last step's serve


CHAINS = Kind(early_slip, _right_chain, _same_answer, _work)
PROGRAMS = Kind(programs.flawed, _right_program, str.__eq__, str)  # labelled by their tests, in the sandbox


def kind_of(settings: OnlineSettings) -> Kind:
    """Programs, or else chains, which refuse problems of other tasks."""
    return PROGRAMS if settings.data == "programs" else CHAINS


def labelled(problem: Problem, prompt: Any, label: bool, worked: str = "") -> Problem:
    """The question whether a candidate, which ``prompt`` shows, is right."""
    answer = problem.answer | {"label": label}
    return problem._replace(prompt=prompt, solution=f"{worked}#{'T' if label else 'F'}", answer=answer)


def critique_problems(
    problems: Sequence[Problem], kind: Kind = CHAINS, *, right_share: float = 0.5, seed: int = 0
) -> list[Problem]:
    """One question about each problem: its prompt, a candidate solution and ``?``; the answer is ``T`` or ``F``.

    The candidate of ``round(right_share n)`` problems is the solution, of the others an attempt; one that is right by
    luck is drawn again. From "Critique-Coder", arXiv:2509.22824, section 3.

    Raises:
      UserError: where a problem has no wrong attempt.
    """
    rng, asked = np.random.default_rng([seed, 5]), []
    right = {int(k) for k in rng.permutation(len(problems))[: round(right_share * len(problems))]}
    for k, problem in enumerate(problems):
        candidate = problem.solution if k in right else _wrong(rng, kind, problem)
        prompt = f"{problem.prompt}{candidate}?"
        asked.append(labelled(problem, prompt, k in right, kind.work(problem.solution)))
    return asked


def _wrong(rng: np.random.Generator, kind: Kind, problem: Problem) -> str:
    for _ in range(TRIES):
        candidate = kind.attempt(rng, problem)
        if not kind.right(problem, candidate):
            return candidate
    raise UserError(f"{TRIES} attempts at {problem.prompt!r} are all right, so none is there to be found wrong")


def evenly_labelled(rng: np.random.Generator, judging: Sequence[Problem]) -> list[int]:
    """An order of questions, any first part of which has right and wrong candidates in the share of the whole.

    >>> p = [Problem("t", "", "", {"label": k < 2}, 1, "") for k in range(8)]
    >>> [p[k].answer["label"] for k in evenly_labelled(np.random.default_rng(0), p)].count(True)
    2
    >>> sum(p[k].answer["label"] for k in evenly_labelled(np.random.default_rng(0), p)[:4])
    1
    """
    of: dict[Any, list[int]] = {}
    for k in rng.permutation(len(judging)).tolist():
        of.setdefault(judging[k].answer.get("label"), []).append(k)
    places = sorted(((i + 0.5) / len(rows), k) for rows in of.values() for i, k in enumerate(rows))
    return [k for _, k in places]


def mixed(solving: Sequence[Problem], judging: Sequence[Problem], *, share: float, seed: int = 0) -> list[Problem]:
    """``len(solving)`` problems, ``round(share n)`` of them to be judged instead, right and wrong ones evenly.

    >>> p = [Problem("t", f"{k}", "1#1", {"value": 1}, 1, f"{k}") for k in range(10)]
    >>> sum("?" in q.prompt for q in mixed(p, [q._replace(prompt="?") for q in p], share=0.2))
    2
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    count, order = len(solving), evenly_labelled(np.random.default_rng([seed, 6]), judging)
    judged = set(order[: round(share * count)])
    return [judging[k] if k in judged else solving[k] for k in range(count)]


def label_answers(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """``value [N]``, and ``label [N]``: what is asked for, see ``critique_verifier``."""
    kinds = [
        critique_verifier.SOLVE
        if "label" not in p.answer
        else critique_verifier.TRUE
        if p.answer["label"]
        else critique_verifier.FALSE
        for p in problems
    ]
    return tables.value_answers(problems) | {"label": np.asarray(kinds, np.int32)}


def table(found: Bench, problems: Sequence[Problem]) -> Problems:
    """The problems as arrays, judged by ``score_by_kind``."""
    return tables.encode_problems(found.model.tokenizer, problems, answers=label_answers)


def score_by_kind(found: Bench) -> Callable[[Any, Trajectories], Rewards]:
    """The judge of a mixed table: each row by what it asks for."""
    solved = curricula.device_score(found)
    judged = critique_verifier.make_label_verifier(found.model.tokenizer.encode, found.model.tokenizer.eos_ids)

    def score(answers, rows):
        own, theirs = solved(answers, rows), judged(answers, rows)
        return own._replace(value=jnp.where(answers["label"] == critique_verifier.SOLVE, own.value, theirs.value))

    return score


def judging(settings: OnlineSettings) -> Bench:
    """The bench of judging: as many right as wrong candidates of the held-out problems."""
    found, levels = recipes.bench(settings), settings.levels or None
    held = tables.make_split(chain, split="heldout", n=settings.eval_problems, seed=0, levels=levels)
    return found._replace(heldout=table(found, critique_problems(held, CHAINS, seed=1)), score=score_by_kind(found))


def judged(found: Bench, answers: Any, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``eval/accuracy`` of judging, ``eval/says_true``."""
    true = found.score(answers | {"label": jnp.full_like(answers["label"], critique_verifier.TRUE)}, rows)
    return {"eval/accuracy": reduce.scalars(rewards.value), "eval/says_true": reduce.scalars(true.value)}


def fine_tuning(settings: OnlineSettings, found: Bench, judging: Sequence[Problem]) -> Offline:
    """Imitation of right critiques: ``-log pi(c | x, y)`` of the work and the label of every judged candidate (CFT).

    A step has as many rows as one of RL.

    From "Critique Fine-Tuning: Learning to Critique is More Effective than Learning to Imitate", arXiv:2501.17703.
    """
    pairs = [(problem.prompt, problem.solution) for problem in judging]
    encode = found.model.tokenizer.encode
    width = max(len(encode(prompt)) + len(encode(text)) for prompt, text in pairs) + 2  # a first and an end token
    rows = supervised.supervised_rows(found.model, pairs, width=width)
    count = settings.prompts_per_step * settings.group_size
    tx = optax.adam(settings.learning_rate)
    return supervised.make_supervised(found.model.policy, rows, rows_per_step=count, tx=tx)


@recipes.cached_by_task
def practised(settings: OnlineSettings, kind: Kind, *, wrong: float, steps: int) -> Params:
    """The model of ``bench(settings)`` after ``steps`` of fine-tuning on attempts and critiques.

    The copy that all arms begin with: it knows both forms, fails first attempts as often as ``wrong`` says, and works
    as badly where it judges: its labels follow from its own work.
    """
    rng, pairs = np.random.default_rng(8), []
    found, problems = recipes.bench(settings), recipes.solved_problems(settings)
    for problem, asked in zip(problems, critique_problems(problems, kind, seed=2), strict=True):
        first, second = (kind.attempt(rng, problem) if rng.random() < wrong else problem.solution for _ in range(2))
        candidate = asked.prompt[len(problem.prompt) : -1]
        agrees = kind.same(second, candidate)
        pairs += [(problem.prompt, first), (asked.prompt, f"{kind.work(second)}#{'T' if agrees else 'F'}")]
    width = found.train.tokens.shape[1] + 2 * settings.max_new_tokens + 4
    return supervised.imitated_pairs(found.model, pairs, width=width, steps=steps)
