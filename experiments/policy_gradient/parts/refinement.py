"""Second attempts after a critique: the prompt, the first attempt and what a critic says of it.

A scripted critic is a function ``(problem, wrong step or None) -> text``. What it says depends on an outcome of few
values, the first wrong step or none, so its texts are tables and the whole second pass is compiled. A critic that is a
model reads the prompt and the attempt and writes its critique as a response of its own.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_llm.advantages import selection
from jaxrl_llm.data.chat import make_reply_encoder
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.rollout import given_responses, rollout_cost
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

Critic = Callable[[Problem, int | None], str]
SEPARATORS = ",#"  # each ends a step of a written solution
_SALT = 0x43000


RIGHT, WRONG = "The solution is right.", "The solution is wrong."
CRITICISE = (
    "Examine the solution above step by step. Say where its first error is and why, or that there is none, and end "
    "with whether it is right."
)
AGAIN = "Solve the problem once more with the help of this critique."


def indicative(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, no more."""
    if problem.task != "chain":
        return RIGHT if wrong is None else WRONG
    return "T" if wrong is None else "F"


def with_answer(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, and the right answer."""
    answer = problem.solution.split("#")[-1]
    if problem.task != "chain":
        return RIGHT if wrong is None else f"{WRONG} The right answer is {answer.strip()}."
    return "T" if wrong is None else f"F#{answer}"


def located(problem: Problem, wrong: int | None) -> str:
    """Right or wrong, and the number of the first wrong step, from 0.

    Only of chains, whose steps are the same in every right answer. Elsewhere the first difference from the solution is
    no error, and what is said is the right answer.
    """
    if problem.task != "chain":
        return with_answer(problem, wrong)
    return "T" if wrong is None else f"F{wrong}"


class Words(NamedTuple):
    """Tokens that ask for a critique behind an attempt, and for a second attempt behind the critique."""

    criticise: list[int]
    again: list[int]


def words_of(model: Model, problems: Sequence[Problem], *, chat: bool) -> Words:
    """``?`` and ``=>`` for arithmetic chains, else sentences; with ``chat`` each is a message of the user.

    Raises:
      UserError: as ``data.chat.make_reply_encoder``.
    """
    tokenizer = model.tokenizer
    if problems[0].task == "chain":
        return Words(tokenizer.encode("?"), tokenizer.encode("=>"))
    if chat or not isinstance(problems[0].prompt, str):
        reply, end = make_reply_encoder(tokenizer), [tokenizer.eos_ids[0]]
        return Words(end + reply(CRITICISE), end + reply(AGAIN))
    return Words(tokenizer.encode(f"\n\n{CRITICISE}\n"), tokenizer.encode(f"\n\n{AGAIN}\n"))


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


def encode_critiques(model: Model, problems: Sequence[Problem], critic: Critic, *, chat: bool = False) -> Critiques:
    """The tables of a critic for the problems of a bench, in their order."""
    steps = 1 + max(len(re.findall(f"[{SEPARATORS}]", p.solution)) for p in problems)
    texts = [critic(p, s if s < steps else None) for p in problems for s in range(steps + 1)]
    words = words_of(model, problems, chat=chat)
    rows = [[*words.criticise, *model.tokenizer.encode(text), *words.again] for text in texts]
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


def behind(
    rows: Trajectories, tokens: Int[Array, "B K"], valid: Bool[Array, "B K"], *, eos_ids: Sequence[int], pad_id: int
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
    """Prompts of what the rows hold, response without its end, and then the given tokens, left-padded."""
    ended = jnp.any(rows.tokens[:, :, None] == jnp.asarray(list(eos_ids), jnp.int32)[None, None, :], axis=2)
    keep = (rows.segment_ids > 0) & ~(ended & rows.mask)
    whole = jnp.concatenate([rows.tokens, tokens], axis=1)
    return given_responses.left_padded(whole, jnp.concatenate([keep, valid], axis=1), pad_id=pad_id)


def second_prompts(
    critiques: Critiques, rows: Trajectories, rewards: Rewards, *, eos_ids: Sequence[int], pad_id: int
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
    """Prompt, response without its end, and critique of each row, left-padded."""
    said = rows.problem_ids, outcomes(critiques, rows, rewards)
    return behind(rows, critiques.tokens[said], critiques.valid[said], eos_ids=eos_ids, pad_id=pad_id)


# (parameters of a critic, rows, their rewards, a key for each) -> (prompts of second attempts, which of their tokens
# are real, how many the critic wrote)
Criticise = Callable[[Params, Trajectories, Rewards, Key], tuple[Array, Array, Array]]


def make_scripted(critiques: Critiques, *, eos_ids: Sequence[int], pad_id: int) -> Criticise:
    """A critic that knows what is right and costs nothing."""

    def criticise(params: Params, rows: Trajectories, rewards: Rewards, keys: Key) -> tuple[Array, Array, Array]:
        asked = second_prompts(critiques, rows, rewards, eos_ids=eos_ids, pad_id=pad_id)
        return *asked, jnp.zeros(rows.truncated.shape, jnp.float32)

    return criticise


def make_written(speak: Callable[..., Trajectories], words: Words, *, eos_ids: Sequence[int], pad_id: int) -> Criticise:
    """A critic that is a model: it reads prompt and attempt and writes what it thinks of it; it is shown no reward.

    From "Critique-GRPO", arXiv:2506.03106, section 4 (critiques by a model, and by the policy itself).

    Args:
      speak: a rollout of the critic, in groups of one.
    """
    ends = {"eos_ids": eos_ids, "pad_id": pad_id}

    def then(rows: Trajectories, said: Sequence[int]) -> tuple[Array, Array]:
        shape = rows.tokens.shape[0], len(said)
        tokens = jnp.broadcast_to(jnp.asarray(said, jnp.int32)[None, :], shape)
        return behind(rows, tokens, jnp.ones(shape, bool), **ends)

    def criticise(params: Params, rows: Trajectories, rewards: Rewards, keys: Key) -> tuple[Array, Array, Array]:
        onwards = jax.vmap(lambda key: jax.random.fold_in(key, _SALT + 1))(keys)
        said = speak(params, *then(rows, words.criticise), onwards, rows.problem_ids)
        return *then(said, words.again), rollout_cost.response_tokens(said)

    return criticise


def make_refining_rollout(
    rollout: Callable[..., Trajectories],
    again: Callable[..., Trajectories],
    judge: Callable[[Any, Trajectories], Rewards],
    answers: Any,
    criticise: Criticise,
    *,
    group_size: int,
    new_tokens: int,
    only_right: bool = False,
) -> dict[str, Callable]:
    """Slots ``rollout`` and ``score``: every response is refined once, the best one takes the last place of its group.

    In the place of parameters the rollout takes ``(parameters, parameters of the critic)``. The refinement stands
    behind the plain prompt, as if it had been the first attempt; its ``sampler_logp`` is that of the second pass. Of
    equal rewards the first refinement is the best.

    From "Critique-GRPO", arXiv:2506.03106, section 4.

    Args:
      rollout: makes groups of ``group_size``; ``again``: groups of one.
      judge: on the device; answers: of all problems of the table.
      criticise: of ``make_scripted`` or ``make_written``.
      only_right: a wrong best refinement leaves its place empty instead, with an invalid reward.
    """

    def refining(acting, tokens, valid, keys, ids):
        params, critic = acting
        rows = rollout(params, tokens, valid, keys, ids)
        truth = jax.tree.map(lambda x: x[rows.problem_ids], answers)
        *asked, written = criticise(critic, rows, judge(truth, rows), keys)
        onwards = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(keys)
        refined = again(params, *asked, onwards, rows.problem_ids)
        scores = judge(truth, refined).value
        best = selection.best_members(scores, rows.group_ids)
        places = jnp.where(best, jnp.arange(best.shape[0], dtype=jnp.int32), 0)
        picked = jnp.repeat(jnp.max(places.reshape(-1, group_size), axis=1), group_size)
        there = refined.mask[picked, -new_tokens:]
        if only_right:
            there = there & (scores[picked] > 0.5)[:, None]
        spent = rollout_cost.response_tokens(rows) + rollout_cost.response_tokens(refined) + written
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
    """Triples that teach all passes: a first attempt, flawed with probability ``wrong``, its critique, its refinement.

    The critique that is taught is that of ``located``.

    Args:
      attempt: a flawed solution, for example ``data.tasks.chain.flawed``.
      critics: take turns.
    """
    rng, pairs = np.random.default_rng([seed, 3]), []
    for k, problem in enumerate(problems):
        response = attempt(rng, problem) if rng.random() < wrong else problem.solution
        right = response.split("#")[-1] == problem.solution.split("#")[-1]
        wrong_at = None if right else wrong_step(problem.solution, response)
        said = critics[k % len(critics)](problem, wrong_at)
        pairs.append((problem.prompt, response))
        pairs.append((f"{problem.prompt}{response}?", located(problem, wrong_at)))
        pairs.append((asked_again(problem.prompt, response, said), problem.solution))
    return pairs


@recipes.cached_by_task
def practised(
    settings: OnlineSettings,
    attempt: Callable[[np.random.Generator, Problem], str],
    critics: tuple[Critic, ...],
    *,
    wrong: float,
    steps: int,
) -> Params:
    """The model of ``bench(settings)`` after ``steps`` of fine-tuning on ``examples`` of its training problems.

    The copy that all arms begin with: it knows the form of a second attempt, and fails first ones as often as ``wrong``
    says.
    """
    problems = curricula.train_problems(settings)
    return _imitated(settings, examples(problems, attempt, critics, wrong=wrong), steps)


@recipes.cached_by_task
def trained_critic(
    settings: OnlineSettings, attempt: Callable[[np.random.Generator, Problem], str], *, wrong: float, steps: int
) -> Params:
    """A stronger critic: the model of ``bench(settings)`` after ``steps`` of fine-tuning on critiques alone."""
    problems = curricula.train_problems(settings)
    pairs = [pair for seed in range(4) for pair in examples(problems, attempt, [located], wrong=wrong, seed=seed)[1::3]]
    return _imitated(settings, pairs, steps)


def _imitated(settings: OnlineSettings, pairs: Sequence[tuple[str, str]], steps: int) -> Params:
    found = recipes.bench(settings)
    width = found.train.tokens.shape[1] + 2 * settings.max_new_tokens + 8
    return supervised.imitated_pairs(found.model, pairs, width=width, steps=steps)
