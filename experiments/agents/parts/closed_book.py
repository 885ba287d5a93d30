"""Questions that would teach nothing of searching are left out: known by heart, or without one answer to find."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax

from experiments.agents.parts.question_agent import says_yes
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import encode_problems
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.run import catalog, options, parts
from jaxrl_llm.run.bench import Settings as ModelSettings
from jaxrl_llm.run.bench import open_model
from jaxrl_llm.run.parts import Model
from jaxrl_llm.tools import endpoints
from jaxrl_llm.tools.endpoints import Chat
from jaxrl_llm.verifiers.answers import final_part
from jaxrl_llm.verifiers.overlap import aliases, words

WORKERS = 16  # questions under way at a judge
UNSUITABLE = """Question: {question}

Does its right answer depend on the day on which it is asked, is it a matter of opinion, or is it harmful? Reply YES or
NO."""
Answers = Callable[[Sequence[Problem]], list[list[str]]]


def says(response: str, answer: dict[str, Any]) -> bool:
    """Whether a right answer stands in the response, word by word; a mere yes or no has to be all of its final part.

    >>> says("It is the Eiffel tower, I think.", {"value": ["Eiffel Tower", "la tour Eiffel"]})
    True
    >>> says("There is no way to know.", {"value": "no"}), says("<answer>No.</answer>", {"value": "no"})
    (False, True)
    """
    wanted = [words(alias, articles=False) for alias in aliases(answer)]
    said = f" {' '.join(words(response, articles=False))} "
    last = words(final_part(response), articles=False)
    return any(last == one if one in (["yes"], ["no"]) else bool(one) and f" {' '.join(one)} " in said
               for one in wanted)  # fmt: skip


def unknown(problems: Sequence[Problem], answers: Answers) -> list[Problem]:
    """The problems that none of the answers without tools gets right.

    From "DeepResearcher: Scaling Deep Research via Reinforcement Learning in Real-world Environments",
    arXiv:2504.03160, section 3.1 (contamination). Differs from the paper in that a mere yes or no counts where it is
    the answer, not wherever the word stands, and that nobody judges whether a question depends on the day it is asked.

    Raises:
      UserError: where the model knows all of them.
    """
    tried = zip(problems, answers(problems), strict=True)
    kept = [problem for problem, texts in tried if not any(says(text, problem.answer) for text in texts)]
    print(f"{len(problems) - len(kept)} of {len(problems)} questions are known without tools and left out", flush=True)
    if not kept:
        raise UserError(f"all {len(problems)} questions are known without tools; give harder rows, or --closed-book 0")
    return kept


def suitable(problems: Sequence[Problem], chat: Chat) -> list[Problem]:
    """The problems that a model does not find to depend on the day, to be a matter of opinion, or harmful.

    One about which it is not willing to say anything is none of them.

    From "DeepResearcher", arXiv:2504.03160, section 3.1 (low-quality questions).

    Raises:
      UserError: where none is left.
    """

    def fits(problem: Problem) -> bool:
        text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
        try:
            return not says_yes(chat, UNSUITABLE.format(question=text))
        except endpoints.Unanswered:
            return False

    with ThreadPoolExecutor(WORKERS) as threads:
        kept = [problem for problem, good in zip(problems, threads.map(fits, problems), strict=True) if good]
    print(f"{len(problems) - len(kept)} of {len(problems)} questions are found unsuitable and left out", flush=True)
    if not kept:
        raise UserError(f"--reader finds all {len(problems)} questions unsuitable; give others, or --closed-book 0")
    return kept


def make_answers(model: Model, *, tries: int, max_new_tokens: int) -> Answers:
    """The model's own answers to questions without tools, ``tries`` of each, at temperature 1."""
    tokenizer = model.tokenizer
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0}
    rollout = jax.jit(recipes.rollout_of_model(model, group_size=tries, **sampling))

    def answers(problems: Sequence[Problem]) -> list[list[str]]:
        table = encode_problems(tokenizer, problems, chat=tokenizer.chat_template is not None)
        found = []
        for rows, real in recipes.sample_in_parts(rollout, model.params, table, jax.random.key(13), tries):
            texts = parts.responses(tokenizer, rows)
            found += [texts[k : k + tries] for k in range(0, real, tries)]
        return found

    return answers


_MODEL = tuple(field.name for field in dataclasses.fields(options.ModelSettings))
_READ = (
    *_MODEL, *(field.name for field in dataclasses.fields(endpoints.Settings)), "reader", "reader_model",
    "data", "format", "verifier", "eval_problems", "action_tokens", "closed_book",
)  # fmt: skip


@lru_cache(maxsize=2)
def _kept(identity: tuple[tuple[str, Any], ...]) -> list[Problem]:
    settings = SimpleNamespace(**dict(identity))
    train, *_ = catalog.rows_of(settings)
    chat = catalog.reading_chat(settings)
    train = train if chat is None else suitable(train, chat)
    model = open_model(ModelSettings(**{name: getattr(settings, name) for name in _MODEL}))
    return unknown(train, make_answers(model, tries=settings.closed_book, max_new_tokens=settings.action_tokens))


def left_out(settings: Any) -> Callable[..., list[Problem]] | None:
    """``change`` of ``catalog.questions``: ``suitable`` to the reader, and ``unknown`` to the model that trains.

    They are found once for all arms; None where ``settings.closed_book``, the number of answers without tools, is 0.
    """
    if not settings.closed_book:
        return None
    identity = tuple((name, getattr(settings, name)) for name in _READ)
    return lambda problems, box, judged: _kept(identity)
