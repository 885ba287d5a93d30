"""Rounds of thinking: a problem is asked again with something of the last round's response, in a fresh context.

A rollout of rounds gives, for every round, rows with parents: row k of a round was asked with what row ``parents[k]``
of the round before had answered. ``shown(responses, samples) -> [what is shown]`` says what that is, without the truth;
``ask(prompt, shown) -> prompt`` in which words.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Int

from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts as job
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Key, Params, Trajectories
from jaxrl_llm.verifiers.answers import final_part

Prompt = str | list[dict[str, Any]]
STEP = 32  # tokens by which the width of a round grows, so that few programs are compiled


class Round(NamedTuple):
    """The responses to one asking of every sample; ``parents``: row of the round before, -1 in the first."""

    rows: Trajectories
    parents: Int[np.ndarray, " B"]
    texts: list[str]
    right: Bool[np.ndarray, " B"]


# ------------------------------------------------------------------ what is asked


def as_published(prompt: str, shown: str) -> str:
    """The paper's words.

    >>> as_published("What is 2+2?", "5")
    "What is 2+2?\\nThe assistant's previous answer is: <answer> 5 </answer>, and please re-answer."
    """
    return f"{prompt}\nThe assistant's previous answer is: <answer> {shown} </answer>, and please re-answer."


def in_signs(prompt: str, shown: str) -> str:
    """The same in the alphabet of the bundled models, which read no English; it ends as the problem alone does.

    >>> in_signs("cd 3 5 7 26=>", "7*3=21,21+5=26")
    '7*3=21,21+5=26?cd 3 5 7 26=>'
    """
    return f"{shown}?{prompt}"


def asked(problem: Problem, shown: str | None, ask: Callable[[str, str], str]) -> Problem:
    """The problem with the previous answer in its prompt; of messages in the last one. None: the problem as it is."""
    if shown is None:
        return problem
    if isinstance(problem.prompt, str):
        return problem._replace(prompt=ask(problem.prompt, shown))
    *before, last = problem.prompt
    return problem._replace(prompt=[*before, last | {"content": ask(last["content"], shown)}])


def fitted(problem: Problem, shown: str | None, ask: Callable[[str, str], str], length: Callable[[Prompt], int],
           width: int) -> Problem:  # fmt: skip
    """``asked``, where the prompt would be too long with the end of what is shown: an answer stands at the end.

    >>> fitted(Problem("sum", "1+1=", "2", {}, 1, ""), "because it is 2", in_signs, len, 8).prompt
    's 2?1+1='
    """
    now = asked(problem, shown, ask)
    while shown and length(now.prompt) > width:
        shown = shown[max(1, len(shown) // 8) :]
        now = asked(problem, shown, ask)
    return now


# ------------------------------------------------------------------ what is shown of the round before


def final_answer(texts: Sequence[str], samples: int) -> list[str | None]:
    """The final answer; the reasoning is dropped."""
    return [final_part(text) for text in texts]


def whole_response(texts: Sequence[str], samples: int) -> list[str | None]:
    """Reasoning and answer."""
    return list(texts)


def nothing(texts: Sequence[str], samples: int) -> list[str | None]:
    """The problem is asked once more, as if for the first time."""
    return [None] * len(texts)


def anothers(texts: Sequence[str], samples: int) -> list[str | None]:
    """The final answer to the problem before it: an answer that has nothing to do with this one."""
    answers = [final_part(text) for text in texts]
    return [answers[k - samples] for k in range(len(answers))]


# ------------------------------------------------------------------ what counts in the end


def last_round(rounds: Sequence[Round], samples: int) -> Bool[np.ndarray, " B"]:
    """The last answer of every sample."""
    return rounds[-1].right


def first_right(rounds: Sequence[Round], samples: int) -> Bool[np.ndarray, " B"]:
    """An oracle that stops at the first right answer: the ceiling of any rule that decides when to keep one."""
    return np.any([one.right for one in rounds], axis=0)


def majority(rounds: Sequence[Round], samples: int) -> Bool[np.ndarray, " B"]:
    """The most frequent final answer over the rounds of a sample; of equally many the one that came first.

    >>> one = [Round(None, None, [text], np.array([text == "#2"])) for text in ("#1", "#2", "#2")]
    >>> majority(one, 1).tolist()
    [True]
    """
    found = []
    for k in range(len(rounds[0].texts)):
        answers = [final_part(one.texts[k]) for one in rounds]
        chosen = answers.index(Counter(answers).most_common(1)[0][0])
        found.append(bool(rounds[chosen].right[k]))
    return np.asarray(found)


# ------------------------------------------------------------------ the rollout


def transitions(before: Bool[np.ndarray, " B"], after: Bool[np.ndarray, " B"]) -> dict[str, float]:
    """Shares of samples by what a round made of them: ``right``, ``fixed``, ``spoilt`` and ``wrong`` add up to 1.

    The accuracy after it is the one before, plus ``fixed``, less ``spoilt``, exactly.

    From "Think Twice: Enhancing LLM Reasoning by Scaling Multi-round Test-time Thinking", arXiv:2503.19855, section 4.

    >>> transitions(np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool))
    {'right': 0.25, 'fixed': 0.25, 'spoilt': 0.25, 'wrong': 0.25}
    """
    pairs = {"right": before & after, "fixed": ~before & after, "spoilt": before & ~after, "wrong": ~before & ~after}
    return {name: float(np.mean(x)) for name, x in pairs.items()}


def make_rounds(
    settings: Any,
    problems: Sequence[Problem],
    judge: Callable[[Trajectories], Any],
    *,
    number: int,
    samples: int,
    shown: Callable[..., list[str | None]] = final_answer,
    ask: Callable[[str, str], str] = as_published,
) -> Callable[[Params, Key], list[Round]]:
    """``play(params, key)``: ``samples`` responses to every problem, then ``number - 1`` rounds of asking again.

    Every round is a rollout like any other: prompts that are text, by the bench's sampling, as many at once as a step
    of training has responses. A round is as wide as its longest prompt.

    Args:
      judge: of the problems' own answers, on the host.

    Raises:
      UserError: for fewer rounds than one, or prompts that exceed the context.
    """
    if number < 1:
        raise UserError(f"--rounds {number} must be at least 1")
    found = recipes.bench(settings)
    model, tokenizer = found.model, found.model.tokenizer
    rollout = jax.jit(recipes.rollout_of(settings, found, group_size=1, measured=True))
    first = [problem for problem in problems for _ in range(samples)]
    ids = np.repeat(np.arange(len(problems), dtype=np.int32), samples)

    def length(prompt: Prompt) -> int:
        return len(encode_prompt(tokenizer, prompt, chat=settings.chat))

    plain = max(length(problem.prompt) for problem in problems)
    words = max(length(asked(problem, "", ask).prompt) for problem in problems)
    limit = model.config.max_positions - settings.max_new_tokens
    most = min(max(plain, words) + settings.max_new_tokens, limit)
    at_once = min(len(first), settings.prompts_per_step * settings.group_size)

    def width_of(now: Sequence[Problem]) -> int:
        if all(a is b for a, b in zip(now, first, strict=True)):
            return plain
        return min(-(-max(length(problem.prompt) for problem in now) // STEP) * STEP, most)

    def one(params: Params, key: Key, index: int, now: Sequence[Problem]) -> Trajectories:
        table = tables.encode_problems(tokenizer, now, prompt_tokens=width_of(now), chat=settings.chat)
        # sample k of a problem has its own key in every round, whatever the prompts are cut into
        keys = sample_keys(jax.random.fold_in(key, index), 0, jnp.arange(len(problems), dtype=jnp.int32), samples)
        drawn = []
        for begin in range(0, len(now), at_once):
            at = np.minimum(np.arange(begin, begin + at_once), len(now) - 1)
            rows = rollout(params, table.tokens[at], table.valid[at], keys[at], jnp.asarray(ids[at]))
            drawn.append(jax.tree.map(lambda x, n=len(now) - begin: np.asarray(x)[:n], hosts.gathered(rows)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *drawn)

    def play(params: Params, key: Key) -> list[Round]:
        played: list[Round] = []
        for index in range(number):
            if played:
                last = played[-1]
                told = shown(last.texts, samples)
                now = [fitted(*pair, ask, length, most) for pair in zip(first, told, strict=True)]
            else:
                now = first
            rows = one(params, key, index, now)
            rewards = judge(rows)
            right = np.asarray(rewards.valid) & (np.asarray(rewards.value) > 0.5)
            parents = np.arange(len(first)) if played else np.full(len(first), -1)
            played.append(Round(rows, parents, job.responses(tokenizer, rows), right))
        return played

    return play


def figures(rounds: Sequence[Round], counted: Bool[np.ndarray, " B"], samples: int) -> dict[str, Any]:
    """Accuracy of what counts, and by round: accuracy, tokens, transitions of the first two, answers said again.

    ``second/kept`` is the share of right first answers behind which the second is right: what a model does that reads
    what it is shown. It is 0 without any.
    """
    by_problem = counted.reshape(-1, samples).sum(axis=1)
    tokens = [float(one.rows.mask.sum(axis=1).mean()) for one in rounds]
    found = {
        "eval/accuracy": float(counted.mean()), "eval/tokens": float(np.sum(tokens)),
        "eval/gain": float(counted.mean() - rounds[0].right.mean()), "problems/right": by_problem.astype(np.float32),
    }  # fmt: skip
    for k, one in enumerate(rounds):
        found |= {f"round/accuracy_{k + 1}": float(one.right.mean()), f"round/tokens_{k + 1}": tokens[k]}
    if len(rounds) > 1:
        moved = transitions(rounds[0].right, rounds[1].right)
        same = [final_part(a) == final_part(b) for a, b in zip(rounds[0].texts, rounds[1].texts, strict=True)]
        found |= {f"second/{name}": x for name, x in moved.items()} | {"second/same": float(np.mean(same))}
        found["second/kept"] = moved["right"] / max(moved["right"] + moved["spoilt"], 1 / len(same))
    return found


# ------------------------------------------------------------------ a base that knows the question


def examples(
    settings: recipes.OnlineSettings, ask: Callable[[str, str], str], *, key: Key, samples: int = 4,
    params: Params | None = None, teach: bool = True,
):  # fmt: skip
    """Pairs that teach the words of a second round: the problem with an answer of the base's own.

    Such an answer is right as often as the base is. A right one is repeated, for a wrong one the worked solution is
    written: all prompts end in right answers alike.

    Args:
      params: who answers first; None: the bench's model.
      teach: whether each sample also gives the plain problem and the problem with the worked solution as previous
        answer, which is repeated: so that a model whose own answers are mostly wrong has something to copy.
    """
    found, problems = recipes.bench(settings), recipes.solved_problems(settings)
    rollout = jax.jit(recipes.rollout_of(settings, found, group_size=samples))
    ids = jnp.arange(len(problems), dtype=jnp.int32)
    by = found.model.params if params is None else params
    rows = hosts.gathered(rollout(by, found.train.tokens, found.train.valid, sample_keys(key, 0, ids, samples), ids))
    right = np.asarray(found.host_score(rows).value) > 0.5
    pairs = []
    for k, text in enumerate(job.responses(found.model.tokenizer, rows)):
        problem = problems[k // samples]
        again = asked(problem, final_part(text), ask)
        if teach:
            copied = asked(problem, final_part(problem.solution), ask)
            pairs += [(problem.prompt, problem.solution), (copied.prompt, problem.solution)]
        pairs.append((again.prompt, text if right[k] else problem.solution))
    return pairs


def _rows(found: Any, pairs: Sequence[tuple[str, str]]) -> supervised.SupervisedRows:
    encode = found.model.tokenizer.encode
    width = 2 + max(len(encode(prompt)) + len(encode(response)) for prompt, response in pairs)
    return supervised.supervised_rows(found.model, pairs, width=-(-width // STEP) * STEP)


@lru_cache(maxsize=4)
def _taught(identity: tuple, ask: Callable[[str, str], str], steps: int, rate: float) -> Callable[[Key], Params]:
    settings = recipes.OnlineSettings(**dict(identity))

    @jax.jit
    def trained(rows: supervised.SupervisedRows, key: Key) -> Params:
        found = recipes.bench(settings)
        method = supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(rate))
        state = offline.init_state(method, found.model.params, key)
        return offline.scan_steps(method, state, steps)[0].params

    @lru_cache(maxsize=64)  # every arm begins with the same model of a seed
    def of_seed(numbers: tuple[int, ...]) -> Params:
        key = jax.random.wrap_key_data(jnp.asarray(numbers, jnp.uint32))
        found = recipes.bench(settings)
        return trained(_rows(found, examples(settings, ask, key=jax.random.fold_in(key, 1))), key)

    def init(key: Key) -> Params:
        if isinstance(key, jax.core.Tracer):  # only shapes are asked for
            return recipes.bench(settings).model.params
        return of_seed(tuple(np.asarray(jax.random.key_data(key)).tolist()))

    return init


def make_taught(settings: Any) -> Callable[[Key], Params]:
    """``init(key)``: the model after ``taught_steps`` of fine-tuning on ``examples``, each seed on its own.

    The same function for equal settings, and the same model of a seed for all arms. No steps: the model as it is.
    """
    found = recipes.bench(settings)
    if not settings.taught_steps:
        return lambda key: found.model.params
    return _taught(recipes.bench_identity(settings), settings.ask, settings.taught_steps, settings.learning_rate)


@lru_cache(maxsize=4)
def _tuned(
    identity: tuple, ask: Callable[[str, str], str], start: Callable[[Key], Params], steps: int, rate: float
) -> Callable[[Key], Params]:
    settings = recipes.OnlineSettings(**dict(identity))

    @lru_cache(maxsize=64)
    def of_seed(numbers: tuple[int, ...]) -> Params:
        key = jax.random.wrap_key_data(jnp.asarray(numbers, jnp.uint32))
        found, before = recipes.bench(settings), start(key)
        pairs = examples(settings, ask, params=before, key=jax.random.fold_in(key, 2), teach=False)
        rows, policy = _rows(found, pairs), found.model.policy
        return supervised.imitated(policy, before, rows, steps=steps, rows_per_step=32, learning_rate=rate)

    def init(key: Key) -> Params:
        if isinstance(key, jax.core.Tracer):  # only shapes are asked for
            return start(key)
        return of_seed(tuple(np.asarray(jax.random.key_data(key)).tolist()))

    return init


def make_tuned(settings: Any) -> Callable[[Key], Params]:
    """``make_taught``, then ``tuned_steps`` on second rounds alone: their prompts, with right responses to them.

    The first answers are drawn from the taught model, the responses are its own where these are right, and the worked
    solutions else. From "Think Twice", arXiv:2503.19855 (there with the responses of a stronger model).
    """
    start = make_taught(settings)
    if not settings.tuned_steps:
        return start
    identity = recipes.bench_identity(settings)
    return _tuned(identity, settings.ask, start, settings.tuned_steps, settings.learning_rate)
