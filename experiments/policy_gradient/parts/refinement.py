"""Second attempts after a critique: the prompt, the first attempt and what a scripted critic says of it.

A critic is a function ``(problem, wrong step or None) -> text``. What it says depends on an outcome of few values, the
first wrong step or none, so its texts are tables and the whole second pass is compiled.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_llm.advantages import selection
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.rollout import given_responses, rollout_cost
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Params, Rewards, Trajectories

Critic = Callable[[Problem, int | None], str]
SEPARATORS = ",#"  # each ends a step of a written solution
_SALT = 0x43000


def indicative(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, no more."""
    return "T" if wrong is None else "F"


def with_answer(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, and the right answer."""
    return "T" if wrong is None else "F#" + problem.solution.split("#")[-1]


def located(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, and the number of the first wrong step, from 0."""
    return "T" if wrong is None else f"F{wrong}"


def asked_again(prompt: str, response: str, critique: str) -> str:
    """The prompt of a second attempt.

    >>> asked_again("m7 3+5=>", "3+5=2#2", "F0")
    'm7 3+5=>3+5=2#2?F0=>'
    """
    return f"{prompt}{response}?{critique}=>"


def wrong_step(solution: str, response: str) -> int:
    """Steps that agree with the solution before the first difference.

    >>> wrong_step("3+5=8,8*4=10#10", "3+5=8,8*4=9#9"), wrong_step("3+5=8,8*4=10#10", "#10")
    (1, 0)
    """
    same = 0
    while same < min(len(solution), len(response)) and solution[same] == response[same]:
        same += 1
    return len(re.findall(f"[{SEPARATORS}]", solution[:same]))


class Critiques(NamedTuple):
    """What a critic says of each problem at each outcome, and the solutions by which the outcome is found."""

    tokens: Int[Array, "N S K"]  # outcome s < S - 1: step s is the first wrong one; S - 1: right
    valid: Bool[Array, "N S K"]
    solution: Int[Array, "N L"]
    separator: Bool[Array, "N L"]  # tokens of the solution that end a step


def encode_critiques(model: Model, problems: Sequence[Problem], critic: Critic) -> Critiques:
    """The tables of a critic for the problems of a bench, in their order."""
    steps = 1 + max(len(re.findall(f"[{SEPARATORS}]", p.solution)) for p in problems)
    texts = [asked_again("", "", critic(p, s if s < steps else None)) for p in problems for s in range(steps + 1)]
    rows = [model.tokenizer.encode(text) for text in texts]
    tokens, valid = (np.zeros((len(rows), max(map(len, rows))), kind) for kind in (np.int32, bool))
    for k, row in enumerate(rows):
        tokens[k, : len(row)], valid[k, : len(row)] = row, True
    shape = (len(problems), steps + 1, -1)
    solutions = [p.solution for p in problems]
    width = max(len(model.tokenizer.encode(text)) for text in solutions) + 1
    solution, there = encode_responses(model.tokenizer, solutions, width=width)
    marks = [model.tokenizer.encode(mark)[0] for mark in SEPARATORS]
    separator = np.isin(solution, marks) & there
    return Critiques(*(jnp.asarray(x) for x in (tokens.reshape(shape), valid.reshape(shape), solution, separator)))


def outcomes(critiques: Critiques, rows: Trajectories, rewards: Rewards) -> Int[Array, " B"]:
    """The first wrong step of each response, as ``wrong_step`` counts, or the last outcome for a right one."""
    response, there = given_responses.right_padded(rows.tokens, rows.mask)
    solution = critiques.solution[rows.problem_ids]
    width = min(response.shape[1], solution.shape[1])
    same = (response[:, :width] == solution[:, :width]) & there[:, :width]
    agreed = jnp.cumprod(same.astype(jnp.int32), axis=1) > 0
    done = jnp.sum((agreed & critiques.separator[rows.problem_ids][:, :width]).astype(jnp.int32), axis=1)
    last = critiques.tokens.shape[1] - 1
    return jnp.where(rewards.value > 0.5, last, jnp.minimum(done, last - 1))


def second_prompts(
    critiques: Critiques, rows: Trajectories, rewards: Rewards, *, eos_ids: Sequence[int], pad_id: int
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
    """Prompt, response without its end, and critique of each row, left-padded."""
    said = rows.problem_ids, outcomes(critiques, rows, rewards)
    ended = jnp.any(rows.tokens[:, :, None] == jnp.asarray(list(eos_ids), jnp.int32)[None, None, :], axis=2)
    keep = (rows.segment_ids > 0) & ~(ended & rows.mask)
    tokens = jnp.concatenate([rows.tokens, critiques.tokens[said]], axis=1)
    return given_responses.left_padded(tokens, jnp.concatenate([keep, critiques.valid[said]], axis=1), pad_id=pad_id)


def make_refining_rollout(
    rollout: Callable[..., Trajectories],
    again: Callable[..., Trajectories],
    judge: Callable[[Any, Trajectories], Rewards],
    answers: Any,
    critiques: Critiques,
    *,
    group_size: int,
    new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int,
    only_right: bool = False,
) -> dict[str, Callable]:
    """Slots ``rollout`` and ``score``: every response is refined once, the best one takes the last place of its group.

    It stands behind the plain prompt, as if it had been the first attempt; its ``sampler_logp`` is that of the second
    pass. Of equal rewards the first refinement is the best.

    From "Critique-GRPO", arXiv:2506.03106, section 4.

    Args:
      rollout: makes groups of ``group_size``; ``again``: groups of one.
      judge: on the device; answers: of all problems of the table.
      only_right: a wrong best refinement leaves its place empty instead, with an invalid reward.
    """

    def refining(params, tokens, valid, keys, ids):
        rows = rollout(params, tokens, valid, keys, ids)
        truth = jax.tree.map(lambda x: x[rows.problem_ids], answers)
        asked = second_prompts(critiques, rows, judge(truth, rows), eos_ids=eos_ids, pad_id=pad_id)
        onwards = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(keys)
        refined = again(params, *asked, onwards, rows.problem_ids)
        scores = judge(truth, refined).value
        best = selection.best_members(scores, rows.group_ids)
        places = jnp.where(best, jnp.arange(best.shape[0], dtype=jnp.int32), 0)
        picked = jnp.repeat(jnp.max(places.reshape(-1, group_size), axis=1), group_size)
        there = refined.mask[picked, -new_tokens:]
        if only_right:
            there = there & (scores[picked] > 0.5)[:, None]
        spent = rollout_cost.response_tokens(rows) + rollout_cost.response_tokens(refined)
        mixed = given_responses.with_responses(
            rows,
            jnp.arange(best.shape[0], dtype=jnp.int32) % group_size == group_size - 1,
            refined.tokens[picked, -new_tokens:],
            there,
            sampler_logp=refined.sampler_logp[picked, -new_tokens:],
            truncated=refined.truncated[picked],
        )
        return rollout_cost.with_cost(mixed, jnp.full(spent.shape, 2.0, jnp.float32), spent)

    def score(truth, rows):
        rewards = judge(truth, rows)
        return Rewards(rewards.value, rewards.valid & jnp.any(rows.mask, axis=1))

    return {"rollout": refining, "score": score}


def examples(
    problems: Sequence[Problem],
    attempt: Callable[[np.random.Generator, Problem], str],
    critics: Sequence[Critic],
    *,
    wrong: float,
    seed: int = 0,
) -> list[tuple[str, str]]:
    """Pairs that teach both passes: a first attempt, flawed with probability ``wrong``, and its refinement.

    Args:
      attempt: a flawed solution, for example ``data.tasks.chain.flawed``.
      critics: take turns.
    """
    rng, pairs = np.random.default_rng([seed, 3]), []
    for k, problem in enumerate(problems):
        response = attempt(rng, problem) if rng.random() < wrong else problem.solution
        right = response.split("#")[-1] == problem.solution.split("#")[-1]
        said = critics[k % len(critics)](problem, None if right else wrong_step(problem.solution, response))
        pairs.append((problem.prompt, response))
        pairs.append((asked_again(problem.prompt, response, said), problem.solution))
    return pairs


def practised(
    settings: OnlineSettings,
    attempt: Callable[[np.random.Generator, Problem], str],
    critics: Sequence[Critic],
    *,
    wrong: float,
    steps: int,
) -> Params:
    """The model of ``bench(settings)`` after ``steps`` of fine-tuning on ``examples`` of its training problems.

    The copy that all arms begin with: it knows the form of a second attempt, and fails first ones as often as ``wrong``
    says. Computed once.
    """
    with jax.core.eval_context():  # also while a program that uses it is traced
        return _practised(recipes.bench_identity(settings), attempt, tuple(critics), wrong, steps)


@lru_cache(maxsize=2)
def _practised(identity: tuple, attempt, critics: tuple[Critic, ...], wrong: float, steps: int) -> Params:
    settings = OnlineSettings(**dict(identity))
    found, problems = recipes.bench(settings), curricula.train_problems(settings)
    width = found.train.tokens.shape[1] + 2 * settings.max_new_tokens + 8
    rows = supervised.supervised_rows(found.model, examples(problems, attempt, critics, wrong=wrong), width=width)
    numbers = {"steps": steps, "rows_per_step": 32, "learning_rate": 1e-3}
    return supervised.imitated(found.model.policy, found.model.params, rows, **numbers)
