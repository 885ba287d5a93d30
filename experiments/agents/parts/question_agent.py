"""A data agent: questions made harder, round after round, by a model that also checks what it has made (ASearcher).

A round injects (a name gives way to facts that imply it) or blurs (a date or a name becomes less exact); the answer
stays. A new question counts when it is sound, has no other answer, and is not answered without tools.
"""

import contextlib
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.calls import Toolbox
from jaxrl_llm.tools.endpoints import Chat, Unanswered
from jaxrl_llm.verifiers.overlap import aliases
from jaxrl_llm.verifiers.verdict import Verifier

TRIES = 3  # answers without tools, none of which may be right
FACTS = 2000  # characters of what a search says
INJECT = """Question: {question}
Its answer, which must stay the same and must not be named: {answer}

What a search says about it:
{facts}

Choose one name in the question and replace it by facts from above that imply it, so that it has to be found out
first. Write the new question alone."""
BLUR = """Question: {question}
Its answer, which must stay the same and must not be named: {answer}

Make one detail of the question less exact (a date becomes a period, a name a description), so that it is harder to
look up but still has this answer alone. Write the new question alone."""
SOUND = """Question: {question}
Claimed answer: {answer}

Is the question clear, grammatical and consistent with this answer? Reply YES or NO."""
OTHERS = """Question: {question}
Claimed answer: {answer}

What a search says about it:
{facts}

Could a different answer be right as well? Reply YES or NO."""


class Made(NamedTuple):
    """A question after its rounds, and what became of each: ``injected``, ``blurred``, or why it was refused."""

    problem: Problem
    rounds: tuple[str, ...]


def says_yes(chat: Chat, text: str) -> bool:
    """Whether a reply begins with YES."""
    return chat([{"role": "user", "content": text}]).strip().upper().startswith("YES")


def refused(problem: Problem, question: str, facts: str, chat: Chat, verify: Verifier) -> str:
    """Why a new question does not count; "" where it does.

    From "Beyond Ten Turns" (ASearcher), arXiv:2508.07976, section 3: quality, difficulty, uniqueness of the answer.
    Differs from the paper in that one model makes, checks and answers.
    """
    answer = aliases(problem.answer)[0]
    if not question or question == problem.prompt:
        return "nothing new"
    if any(text.casefold() in question.casefold() for text in aliases(problem.answer)):
        return "names the answer"
    if not says_yes(chat, SOUND.format(question=question, answer=answer)):
        return "unsound"
    if says_yes(chat, OTHERS.format(question=question, answer=answer, facts=facts)):
        return "other answers"
    direct = [{"role": "user", "content": f"{question}\nReply with the answer alone."}]
    if any(verify(problem.answer, chat(direct, draw=k)).value > 0.5 for k in range(TRIES)):
        return "answered without tools"
    return ""


def harder(
    problem: Problem, chat: Chat, verify: Verifier, facts: Callable[[str], str], *, rounds: int, seed: int = 0
) -> Made:
    """A question after so many rounds; what is refused leaves it as it was.

    Args:
      facts: what a search says about a question.
    """
    rng, said = np.random.default_rng([seed, zlib.crc32(problem.identity.encode())]), []
    for _ in range(rounds):
        known = facts(problem.prompt)[:FACTS]
        inject = rng.random() < 0.5
        asked = (INJECT if inject else BLUR).format(
            question=problem.prompt, answer=aliases(problem.answer)[0], facts=known
        )
        question, reason = problem.prompt, "not answered"
        with contextlib.suppress(Unanswered):  # one question that an endpoint refuses is left as it was
            question = chat([{"role": "user", "content": asked}]).strip()
            reason = refused(problem, question, known, chat, verify)
        said.append(reason or ("injected" if inject else "blurred"))
        problem = problem if reason else problem._replace(prompt=question)
    return Made(problem, tuple(said))


def all_harder(
    problems: Sequence[Problem], box: Toolbox, verify: Verifier, *, chat: Chat, rounds: int, threads: int = 16
) -> list[Problem]:
    """Every training question after its rounds, several at a time; how many were changed is said.

    Raises:
      UserError: for prompts that are messages, or without a web to search.
    """
    if not {item.name for item in box.tools} >= {"web_search"}:
        raise UserError(f"--rounds {rounds}: facts come from a search of pages; give --tools pages=CORPUS.jsonl")
    if any(not isinstance(problem.prompt, str) for problem in problems):
        raise UserError(f"--rounds {rounds}: questions are texts here, and these rows hold messages; drop the flag")

    def facts(question: str) -> str:
        return box.run("web_search", {"queries": [question]}).text

    def one(problem: Problem) -> Made:
        return harder(problem, chat, verify, facts, rounds=rounds)

    with ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(one, problems))
    changed = sum(new.problem.prompt != old.prompt for new, old in zip(made, problems, strict=True))
    print(f"{changed} of {len(made)} questions were made harder in {rounds} rounds", flush=True)
    return [found.problem for found in made]
