"""Solutions to judge where the host says what is right: small programs by their tests, and rows of one's own.

A row of one's own has no written attempts: its candidates are the starting model's samples, labelled by the verifier.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.parts.judged_apart import judged_apart
from experiments.policy_gradient.parts import critique_task, critique_verifier
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.bench import is_generated, problem_sets
from jaxrl_llm.types import Problems, Responses, Rewards, Trajectories

QUESTION = """

Here is a proposed solution:

{}

Is it right? Say why, then end with \\conclusion{{T}} if it is right and \\conclusion{{F}} if it is not.
"""
Tried = list[tuple[str, bool]]  # candidates of a problem, and which are right


def asked(prompt: Any, candidate: str) -> Any:
    """The prompt, a candidate, and what is wanted; of messages it stands in the last one.

    >>> asked([{"role": "user", "content": "Add."}], "x+1")[0]["content"].splitlines()[4]
    'x+1'
    """
    text = QUESTION.format(candidate)
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    return [*before, last | {"content": last["content"] + text}]


def balanced(problems: Sequence[Problem], tried: Sequence[Tried], *, right_share: float, seed: int) -> list[Problem]:
    """One question about each problem that has right and wrong candidates, a right one of ``right_share`` of them.

    Problems that the model always or never solves are left out. From "Critique-Coder", arXiv:2509.22824, section 3.

    Raises:
      UserError: where no problem has both.
    """
    rng = np.random.default_rng([seed, 5])
    both = [(problem, candidates) for problem, candidates in zip(problems, tried, strict=True)
            if len({right for _, right in candidates}) == 2]  # fmt: skip
    if not both:
        raise UserError(
            f"of {len(problems)} problems none has right and wrong answers among the samples of this model, so there "
            "is nothing to judge; raise --group-size or --train-problems, or give easier rows"
        )
    of_right, found = {int(k) for k in rng.permutation(len(both))[: round(right_share * len(both))]}, []
    for k, (problem, candidates) in enumerate(both):
        texts = [text for text, right in candidates if right == (k in of_right)]
        chosen = texts[int(rng.integers(len(texts)))]
        found.append(critique_task.labelled(problem, asked(problem.prompt, chosen), k in of_right))
    return found


def _sampled(found: Bench, settings: OnlineSettings, problems: Problems, score: Callable) -> list[Tried]:
    rollout, group, tried = jax.jit(recipes.rollout_of(settings, found)), settings.group_size, []
    for rows, real in recipes.sample_in_parts(rollout, found.model.params, problems, jax.random.key(11), group):
        texts, right = job.responses(found.model.tokenizer, rows), np.asarray(score(rows).value) > 0.5
        pairs = list(zip(texts, right.tolist(), strict=True))
        tried += [pairs[k : k + group] for k in range(0, real, group)]
    return tried


@lru_cache(maxsize=8)
def _questions(identity: tuple, group_size: int, right_share: float, heldout: bool) -> list[Problem]:
    settings = dataclasses.replace(OnlineSettings(**dict(identity)), group_size=group_size)
    seed = int(heldout)
    problems = list(problem_sets(settings)[seed])
    if is_generated(settings.data):
        kind = critique_task.kind_of(settings)
        return critique_task.critique_problems(problems, kind, right_share=right_share, seed=seed)
    found = recipes.bench(settings)
    table, score = (found.heldout, found.heldout_score) if heldout else (found.train, found.host_score)
    return balanced(problems, _sampled(found, settings, table, score), right_share=right_share, seed=seed)


def questions(settings: OnlineSettings, *, right_share: float = 0.5, heldout: bool = False) -> list[Problem]:
    """Solutions to judge, of the training or of the held-out problems; made once, with one seed for all runs."""
    return _questions(recipes.bench_identity(settings), settings.group_size, right_share, heldout)


class Mixture(NamedTuple):
    """A table of both kinds of questions, and where its rows come from."""

    problems: list[Problem]
    origin: np.ndarray  # [N] rows of the bench's own problems; -1: to be judged


def mixture(solving: Sequence[Problem], judging: Sequence[Problem], *, share: float, seed: int = 0) -> Mixture:
    """As many rows as there are problems to solve, ``round(share n)`` of them to be judged instead, at drawn places.

    Right and wrong candidates come evenly. Where fewer can be judged, they stand several times.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    rng, count = np.random.default_rng([seed, 6]), round(share * len(solving))
    places, order = rng.permutation(len(solving))[:count].tolist(), critique_task.evenly_labelled(rng, judging)
    rows, origin = list(solving), np.arange(len(solving))
    for k, at in enumerate(places):
        rows[at], origin[at] = judging[order[k % len(judging)]], -1
    return Mixture(rows, origin)


def make_host_score(found: Bench, mixed: Mixture) -> Callable[[Trajectories], Rewards]:
    """The judge of a mixture: what is to be solved by the bench's verifier, conclusions by their labels."""
    conclusions = job.make_scorer(found.model.tokenizer, mixed.problems, critique_verifier.verify_label)
    every = np.arange(len(mixed.problems))
    return judged_apart([(mixed.origin, found.host_score), (np.where(mixed.origin < 0, every, -1), conclusions)])


@lru_cache(maxsize=4)
def _measure(identity: tuple, temperature: float, group_size: int, samples: int) -> Callable[..., dict[str, Any]]:
    settings = dataclasses.replace(
        OnlineSettings(**dict(identity)), group_size=group_size, eval_samples=samples, temperature=temperature
    )
    found, held = recipes.bench(settings), questions(settings, heldout=True)
    tokenizer = found.model.tokenizer
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)

    def says_true(rows: Responses, rewards: Rewards):
        texts = [tokenizer.decode(row[on].tolist()) for row, on in zip(rows.tokens, np.asarray(rows.mask), strict=True)]
        said = [critique_verifier.conclusion(text) == "T" for text in texts]
        return {"eval/says_true": reduce.scalars(jnp.asarray(said, jnp.float32))}

    return partial(
        recipes.measure_on_host, jax.jit(rollout), tables.encode_problems(tokenizer, held, chat=settings.chat),
        job.make_scorer(tokenizer, held, critique_verifier.verify_label), samples, more=says_true,
    )  # fmt: skip


def judging_measure(settings: OnlineSettings) -> Callable[..., dict[str, Any]]:
    """``eval/accuracy`` and ``eval/says_true`` of judging held-out candidates, half of them right."""
    identity = recipes.bench_identity(settings)
    return _measure(identity, settings.temperature, settings.group_size, settings.eval_samples)
