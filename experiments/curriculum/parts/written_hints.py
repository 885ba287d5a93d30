"""Hints that a model writes itself before training: it explains the known answer, then gives a cue (NuRL).

A model with words is asked for both: the one that trains, a teacher, or any behind an address. One without explains an
answer by a response of its own that is right, and a rule takes the cue from it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.curriculum.parts.hints import first_operands
from experiments.parts.messages import asked_text
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.parts import Model
from jaxrl_llm.tools import endpoints

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


# What is asked of a writer: ``(requests, most tokens of a reply, draw) -> replies``, empty where there is none.
Ask = Callable[[Sequence[Problem], int, int], list[str]]


def asks_model(model: Model, *, chat: bool, temperature: float = 0.7) -> Ask:
    """A loaded model as a writer; its positions bound what it is asked and what it says."""

    def ask(requests: Sequence[Problem], most_tokens: int, draw: int) -> list[str]:
        room = max(1, min(most_tokens, model.config.max_positions // 4))
        return replies(model, requests, chat=chat, max_new_tokens=room, temperature=temperature, salt=31 + draw)

    return ask


def asks_address(settings: endpoints.Settings, address: str, name: str) -> Ask:
    """The model behind an address as a writer, which has explained one answer.

    Raises:
      UserError: without its name, or where it says nothing; RunStopped: where nothing answers.
    """
    chat = endpoints.open_judge(
        settings, "--writer", address, name, read=lambda said: said.strip() or None, wants="an explanation",
        question=EXPLAIN.format(problem="How much is 1 + 1?", answer="2"),
    )  # fmt: skip

    def ask(requests: Sequence[Problem], most_tokens: int, draw: int) -> list[str]:
        conversations = [[{"role": "user", "content": str(p.prompt)}] for p in requests]
        said = endpoints.ask_all(partial(chat, draw=draw), conversations, workers=settings.endpoint_concurrency)
        return [text or "" for text in said]

    return ask


def write(
    ask: Ask, tokenizer: Tokenizer, problems: Sequence[Problem], *, most_tokens: int = 64,
    explanation_tokens: int = 512, tries: int = 4,
) -> list[str]:  # fmt: skip
    """A hint to every problem, empty where all that are written name the answer or the requests have no reply.

    The writer is shown the answer and explains it; from problem and explanation it writes one sentence of core
    knowledge. A sentence that names the answer is asked for again. From "Nudging the Boundaries of LLM Reasoning"
    (NuRL), arXiv:2509.25666, section 3. Differs from the paper in the words of both requests.

    Args:
      tokenizer: of the model that reads the hints.
      explanation_tokens: at most, of an explanation as the second request shows it.
      tries: sentences that are written for a problem until one does not name the answer.

    Raises:
      ValueError: for no try at all.
    """
    if tries < 1:
        raise ValueError(f"tries={tries} must be at least 1")
    first = [p._replace(prompt=EXPLAIN.format(problem=asked_text(p.prompt), answer=_answer(p))) for p in problems]
    why = [shortened(tokenizer, text, explanation_tokens) for text in ask(first, explanation_tokens, 0)]
    cues = [""] * len(problems)
    open_ = [k for k, text in enumerate(why) if text]
    for draw in range(1, tries + 1):
        if not open_:
            break
        requests = [
            problems[k]._replace(prompt=ABSTRACT.format(problem=asked_text(problems[k].prompt), explanation=why[k]))
            for k in open_
        ]
        said = [shortened(tokenizer, text, most_tokens) for text in ask(requests, most_tokens, draw)]
        fine = {k: cue for k, cue in zip(open_, said, strict=True) if cue and not gives_away(cue, _answer(problems[k]))}
        cues = [fine.get(k, cue) for k, cue in enumerate(cues)]
        open_ = [k for k in open_ if k not in fine]
    return cues


def _answer(problem: Problem) -> Any:
    value = problem.answer.get("value", problem.solution)
    return value[0] if isinstance(value, list | tuple) and value else value


class Writer(NamedTuple):
    """Who writes the hints: a folder or an address with the name of a model there; nobody: the bench's own model."""

    where: str = ""
    name: str = ""
    most_tokens: int = 64  # of a hint
    tries: int = 4


def hint_of(settings: Any, writer: Writer = Writer()) -> Callable[[Problem], str]:
    """``problem -> hint`` as the writer gives it; written once, for all arms and seeds.

    Raises:
      UserError: as ``asks_address``, and for a name without an address.
    """
    remote = "://" in writer.where
    if writer.name and not remote:
        raise UserError(f"--writer-model {writer.name} is a name behind an address: give --writer https://HOST/v1")
    asked = endpoints.settings_of(settings) if remote else None
    return partial(_looked_up, _written(recipes.bench_identity(settings), writer, asked))


def _looked_up(written: dict[str, str], problem: Problem) -> str:
    return written.get(problem.identity, "")


@lru_cache(maxsize=4)
def _written(identity: tuple, writer: Writer, asked: endpoints.Settings | None) -> dict[str, str]:
    settings = OnlineSettings(**dict(identity))
    model, problems = recipes.bench(settings).model, recipes.solved_problems(settings)
    if asked is not None:
        ask = asks_address(asked, writer.where, writer.name)
    else:
        by = job.load_model(writer.where, mesh=model.mesh) if writer.where else model
        ask = asks_model(by, chat=settings.chat or not isinstance(problems[0].prompt, str))
    cues = write(ask, model.tokenizer, problems, most_tokens=writer.most_tokens, tries=writer.tries)
    by_whom = writer.name or writer.where or settings.model
    print(f"hints written by {by_whom}: {sum(map(bool, cues))} of {len(cues)} name no answer", flush=True)
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
