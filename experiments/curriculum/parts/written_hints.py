"""Hints that a model writes itself before training: it explains the known answer, then gives a cue (NuRL)."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax

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
