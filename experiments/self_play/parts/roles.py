"""What a proposer, a solver and a judge are asked, and how what they write is read: text in, text out.

``tagged`` asks in words and reads tags, as the paper does; ``terse`` speaks of arithmetic chains to the bundled models,
which know a few dozen characters. What a model wrote is matched against patterns, never evaluated.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.verifiers import answers

Form = Callable[[str], float]  # of a response: 1 as it was asked for, 0.5 with too many parts, 0 with too few


class Roles(NamedTuple):
    """Three roles of one model. A question is text; None stands for none."""

    posed: Callable[[str], str]  # a prompt of the data -> the question in it
    propose: Callable[[str | None], str]  # a question to begin from -> prompt
    question: Callable[[str], str | None]  # of a proposer's response
    solve: Callable[[str], str]  # question -> prompt
    judge_question: Callable[[str], str]  # question -> prompt
    judge_answer: Callable[[str, str], str]  # question, response -> prompt
    score: Callable[[str], float]  # of a judge's response: 1 to 10, NaN without one
    forms: tuple[Form, Form, Form]  # of proposer, solver and judge
    right: Callable[[str, str], float]  # (question, response) -> 1, 0, or NaN where nobody knows
    sound: Callable[[str], float]  # question -> whether it has an answer; NaN where nobody knows


def unknown(*texts: str) -> float:
    """What is not known of questions in words: whether they are sound, and which answers are right."""
    return math.nan


def tag_form(*tags: str) -> Form:
    """1 where each tag occurs as one pair, 0.5 where there are more pairs, 0 where one is missing or left open.

    From "MAE", arXiv:2510.23595, with its code.

    >>> form = tag_form("score")
    >>> form("<score>7</score>"), form("<score>7</score><score>8</score>"), form("<score>7"), form("7")
    (1.0, 0.5, 0.0, 0.0)
    """

    def form(text: str) -> float:
        counts = [(text.count(f"<{tag}>"), text.count(f"</{tag}>")) for tag in tags]
        if any(begin != end or begin == 0 for begin, end in counts):
            return 0.0
        return 1.0 if all(begin == 1 for begin, _ in counts) else 0.5

    return form


def _inside(text: str, tag: str) -> str | None:
    """What stands in the last pair of a tag, stripped; None without a pair, or with nothing in it."""
    before, end, _ = text.rpartition(f"</{tag}>")
    _, begin, found = before.rpartition(f"<{tag}>")
    return found.strip() or None if begin and end else None


def _scale(text: str | None) -> float:
    """A number from 1 to 10; NaN for anything else.

    >>> _scale("8"), _scale("11"), _scale(None)
    (8.0, nan, nan)
    """
    return float(text) if text is not None and re.fullmatch(r"10|[1-9]", text) else math.nan


_PROPOSE = (
    "Write one new question that is clear, can be answered from what it says, and is hard to answer. Put it between "
    "<question> and </question>."
)
_FROM = "Here is a question; write another one on something like it that differs in substance.\n\n{}\n\n"
_QUESTION = (
    "Judge this question: is it clear, complete and answerable? Give 1 (it makes no sense) to 10 (a very good "
    "question) between <score> and </score>.\n\nQuestion: {}"
)
_ANSWER = (
    "Judge the answer to this question: is it right? Give 1 (wrong) to 10 (right and well explained) between <score> "
    "and </score>.\n\nQuestion: {}\n\nAnswer: {}"
)


def tagged() -> Roles:
    """Roles in words for any instructed model: ``<question>``, ``<answer>`` and ``<score>``."""
    return Roles(
        posed=str.strip,
        propose=lambda of: (_FROM.format(of) if of else "") + _PROPOSE,
        question=lambda text: _inside(text, "question"),
        solve=lambda question: f"{question}\n\nThink first, then put your answer between <answer> and </answer>.",
        judge_question=_QUESTION.format,
        judge_answer=_ANSWER.format,
        score=lambda text: _scale(_inside(text, "score")),
        forms=(tag_form("question"), tag_form("answer"), tag_form("score")),
        right=unknown,
        sound=unknown,
    )


ARROW, ASK = "=>", "?=>"
_SHAPE = re.compile(r"m\d{1,2} [0-9+*-]+")  # what a chain looks like, whether it is one or not
_CHAIN = re.compile(r"m(7|10|11) (0|[1-9]\d?)((?:[+*-](?:0|[1-9]\d?)){1,12})")


def chain_of(question: str) -> Problem | None:
    """The chain that a question poses; None where it poses none: a number missing, too large, or another modulus.

    >>> chain_of("m11 3+5*4").solution
    '3+5=8,8*4=10#10'
    >>> chain_of("m7 3+*4"), chain_of("m7 9+1"), chain_of("m8 3+1")
    (None, None, None)
    """
    found = _CHAIN.fullmatch(question)
    if found is None:
        return None
    modulus, numbers = int(found[1]), [int(n) for n in re.findall(r"\d+", question)[1:]]
    if max(numbers) >= modulus:
        return None
    return chain.from_parts(numbers, "".join(re.findall(r"[+*-]", found[3])), modulus)


def _right_chain(question: str, response: str) -> float:
    problem = chain_of(question)
    return 0.0 if problem is None else answers.verify_chain(problem.answer, response).value


def _marks(text: str) -> float:
    return {0: 0.0, 1: 1.0}.get(text.count("#"), 0.5)


def terse() -> Roles:
    """Roles in a few characters for arithmetic chains: ``??=>`` asks for a question, ``...?=>`` for a score ``#7``.

    >>> roles = terse()
    >>> roles.propose("m7 3+5"), roles.judge_answer("m7 3+5", "3+5=1#1"), roles.score("#7")
    ('?m7 3+5?=>', 'm7 3+5=>3+5=1#1?=>', 7.0)
    """
    return Roles(
        posed=lambda prompt: prompt.removesuffix(ARROW),
        propose=lambda of: f"?{of or ''}{ASK}",
        question=lambda text: text if _SHAPE.fullmatch(text) else None,
        solve=lambda question: question + ARROW,
        judge_question=lambda question: question + ASK,
        judge_answer=lambda question, response: f"{question}{ARROW}{response}{ASK}",
        score=lambda text: _scale(text.rpartition("#")[2]) if "#" in text else math.nan,
        forms=(lambda text: float(_SHAPE.fullmatch(text) is not None), _marks, _marks),
        right=_right_chain,
        sound=lambda question: float(chain_of(question) is not None),
    )
