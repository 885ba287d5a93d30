"""Hints that a model writes itself before training: it explains the known answer, then gives a cue (NuRL).

A model with words is asked for both. One without explains an answer by a response of its own that is right, and a rule
takes the cue from it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from experiments.curriculum.parts.hints import first_operands
from experiments.parts.messages import asked_text
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.parts import Model

EXPLAIN = "Problem: {problem}\nThe right answer is {answer}. Explain step by step why.\nExplanation:"
ABSTRACT = (
    "Problem: {problem}\nExplanation: {explanation}\nState in one sentence the core knowledge that solves the problem, "
    "as a hint for somebody who does not know it. Name neither the answer nor any result.\nHint:"
)


def gives_away(hint: str, answer: Any) -> bool:
    """Whether a hint names the answer, as it is or in other case; the first of several right answers counts.

    >>> [gives_away(hint, ["42", "forty-two"]) for hint in ("Add the tens first.", "It is 42.", "142 apples")]
    [False, True, False]
    """
    wanted = str(answer[0] if isinstance(answer, list | tuple) and answer else answer).strip().lower()
    if not wanted:
        return False
    said, at = hint.lower(), hint.lower().find(wanted)
    while at >= 0:  # as a whole: 42 does not stand in 142
        around = said[max(0, at - 1) : at] + said[at + len(wanted) : at + len(wanted) + 1]
        if not any(c.isalnum() for c in around):
            return True
        at = said.find(wanted, at + 1)
    return False


def shortened(tokenizer: Tokenizer, text: str, most_tokens: int) -> str:
    """The text on one line, at most so many tokens of it."""
    line = " ".join(text.split())
    ids = tokenizer.encode(line)
    return line if len(ids) <= most_tokens else tokenizer.decode(ids[:most_tokens]).strip()


def replies(
    model: Model, asked: Sequence[Problem], *, chat: bool, max_new_tokens: int, temperature: float, salt: int,
    at_once: int = 64,
) -> list[str]:  # fmt: skip
    """One response of a model to each prompt, ``at_once`` in a batch; none where a prompt leaves no room for it."""
    room = model.config.max_positions - max_new_tokens
    fits = [k for k, p in enumerate(asked) if len(encode_prompt(model.tokenizer, p.prompt, chat=chat)) <= room]
    said = [""] * len(asked)
    if not fits:
        return said
    table = tables.encode_problems(model.tokenizer, [asked[k] for k in fits], chat=chat)
    rollout = jax.jit(
        recipes.rollout_of_model(model, group_size=1, max_new_tokens=max_new_tokens, temperature=temperature)
    )
    found = []
    for rows, real in recipes.sample_in_parts(rollout, model.params, table, jax.random.key(salt), 1, chunk=at_once):
        found += job.responses(model.tokenizer, rows)[:real]
    for k, text in zip(fits, found, strict=True):
        said[k] = text
    return said


def write(
    model: Model, problems: Sequence[Problem], *, chat: bool, most_tokens: int = 64, explanation_tokens: int = 512,
    temperature: float = 0.7,
) -> list[str]:  # fmt: skip
    """A hint to every problem, empty where the model's own names the answer or its requests exceed the context.

    The model is shown the answer and explains it; from problem and explanation it writes one sentence of core
    knowledge. From "Nudging the Boundaries of LLM Reasoning" (NuRL), arXiv:2509.25666, section 3. Differs from the
    paper in leaving out hints that name the answer, and in the words of both requests.

    Args:
      explanation_tokens: at most; fewer where the model's positions are few.
    """
    numbers = {"chat": chat or not isinstance(problems[0].prompt, str), "temperature": temperature}
    room = max(1, min(explanation_tokens, model.config.max_positions // 4))

    def asked(text: str, problem: Problem) -> Problem:
        return problem._replace(prompt=text)

    first = [asked(EXPLAIN.format(problem=asked_text(p.prompt), answer=_answer(p)), p) for p in problems]
    why = [shortened(model.tokenizer, text, room) for text in
           replies(model, first, max_new_tokens=room, salt=31, **numbers)]  # fmt: skip
    second = [
        asked(ABSTRACT.format(problem=asked_text(p.prompt), explanation=text), p)
        for p, text in zip(problems, why, strict=True)
    ]
    said = replies(model, second, max_new_tokens=min(most_tokens, room), salt=32, **numbers)
    cues = [shortened(model.tokenizer, text, most_tokens) for text in said]
    return ["" if not text or gives_away(cue, _answer(p)) else cue
            for text, cue, p in zip(why, cues, problems, strict=True)]  # fmt: skip


def _answer(problem: Problem) -> Any:
    value = problem.answer.get("value", problem.solution)
    return value[0] if isinstance(value, list | tuple) and value else value


def hint_of(settings: OnlineSettings, writer: str = "", *, most_tokens: int = 64) -> Callable[[Problem], str]:
    """``problem -> hint``: what the bench's own model, or the one in the folder ``writer``, wrote; written once."""
    written = _written(recipes.bench_identity(settings), writer, most_tokens)
    return partial(_looked_up, written)


def _looked_up(written: dict[str, str], problem: Problem) -> str:
    return written.get(problem.identity, "")


@lru_cache(maxsize=4)
def _written(identity: tuple, writer: str, most_tokens: int) -> dict[str, str]:
    settings = OnlineSettings(**dict(identity))
    model = recipes.bench(settings).model
    by = job.load_model(writer, mesh=model.mesh) if writer else model
    problems = recipes.solved_problems(settings)
    cues = write(by, problems, chat=settings.chat, most_tokens=most_tokens)
    print(f"hints written by {writer or settings.model}: {sum(map(bool, cues))} of {len(cues)} name no answer")
    return {problem.identity: cue for problem, cue in zip(problems, cues, strict=True)}


def right_responses(
    found: recipes.Bench, *, samples: int, max_new_tokens: int, temperature: float = 1.0, at_once: int = 2048
) -> list[str]:
    """A right response of the model itself to each training problem, none where so many samples have none.

    The first right one of independent samples is a draw from the model's own responses given that they are right: its
    explanation of an answer that is known, for a model that cannot be asked for one.

    Args:
      at_once: samples that are drawn together, at least one group.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    rollout = jax.jit(
        recipes.rollout_of_model(
            found.model, group_size=samples, max_new_tokens=max_new_tokens, temperature=temperature
        )
    )
    said, groups = [], max(1, at_once // samples)
    for rows, real in recipes.sample_in_parts(
        rollout, found.model.params, found.train, jax.random.key(33), samples, chunk=groups
    ):
        rewards = found.host_score(rows)
        right = (np.asarray(rewards.valid) & (np.asarray(rewards.value) > 0.5))[:real].reshape(-1, samples)
        first = np.arange(right.shape[0]) * samples + right.argmax(axis=1)
        texts = job.responses(found.model.tokenizer, jax.tree.map(lambda x, first=first: x[first], rows))
        said += [text if some else "" for text, some in zip(texts, right.any(axis=1), strict=True)]
    return said


def cue_of(settings: OnlineSettings, samples: int) -> Callable[[Problem], str]:
    """``problem -> hint``: the first pair of operands of a right response of the bench's own model, without a result.

    Drawn once, before training, from ``samples`` responses; a problem that none of them solves has no hint, nor has one
    whose response is no arithmetic.
    From "Nudging the Boundaries of LLM Reasoning" (NuRL), arXiv:2509.25666, section 3. Differs from the paper in the
    rule that abstracts, and in problems without a hint: there the model explains any answer that it is told.
    """
    return partial(_looked_up, _cues(recipes.bench_identity(settings), samples))


@lru_cache(maxsize=4)
def _cues(identity: tuple, samples: int) -> dict[str, str]:
    settings = OnlineSettings(**dict(identity))
    found, problems = recipes.bench(settings), recipes.solved_problems(settings)
    with jax.core.eval_context():
        own = right_responses(found, samples=samples, max_new_tokens=settings.max_new_tokens)
    print(f"cues from right responses of the model: {sum(map(bool, own))} of {len(own)}")
    return {p.identity: first_operands(p._replace(solution=text)) if "=" in text else ""
            for p, text in zip(problems, own, strict=True)}  # fmt: skip
