"""Every reasoning-gym family (extra ``tasks``) as plain data and one verifier.

The package's scorers read model text, and some call ``eval`` or SymPy's parser, which calls it, on the answer. They are
asked in the sandbox (``foreign``): both read the syntax there instead (``formulas``), and the process executes no text
at all (``sandbox.calls.guard``). Problems are drawn in the sandbox, too, with a fixed hash seed.

Some families pay for answers that are not right, a few in full (``UNSOUND``): ``audit`` measures it, ``problems``
refuses them unless asked, ``verify_solved`` pays for full marks alone. ``docs/reasoning-gym.md`` has the table.
"""

import base64
import collections
import functools
import json
import os
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError, extra_module, need_extra
from jaxrl_llm.sandbox.records import Limits
from jaxrl_llm.verifiers import foreign, formulas
from jaxrl_llm.verifiers.verdict import Verdict

_USE = "reasoning-gym families need"
TIMEOUT_S = foreign.TIMEOUT_S
_DRAWING = Limits(cpu_s=3600.0, wall_s=3600.0, memory_mb=4096, output_bytes=1 << 28)

# What ``audit`` finds above ``TOLERATED``, at the default settings of reasoning-gym 0.1.25 (``docs/reasoning-gym.md``).
UNSOUND: dict[str, str] = {
    "acre": "'off or on' earns 0.19 on average without being right",
    "aiw": "'25' earns 0.15 on average without being right",
    "binary_alternation": "'3.14' earns 0.12 on average without being right",
    "calendar_arithmetic": "'10' earns 0.09 on average without being right",
    "coin_flip": "'0' earns 0.93 on average without being right",
    "count_bits": "'16 or 15' earns 0.08 on average without being right",
    "course_schedule": "'False or True' earns 0.35 on average without being right",
    "game_of_life": "'[[0,0,0,0,0,0,0,0,0,0],[0,0 ... earns 0.90 on average without being right",
    "game_of_life_halting": "the prompt earns 1.00 on average without being right",
    "gcd": "'1/2' earns 0.22 on average without being right",
    "isomorphic_strings": "'True or False' earns 0.34 on average without being right",
    "largest_island": "'10' earns 0.12 on average without being right",
    "letter_counting": "'10' earns 0.23 on average without being right",
    "mahjong_puzzle": "'Peng or Chi' earns 0.23 on average without being right",
    "maze": "'25' earns 0.11 on average without being right",
    "mini_sudoku": "'3 1 2 4\\n2 4 3 1\\n4 3 1 2\\n ... earns 0.23 on average without being right",
    "number_sequence": "'10' earns 0.06 on average without being right",
    "polynomial_equations": "'0.0, 0.5909' earns 0.28 on average without being right",
    "prime_factorization": "the first number of the prompt earns 0.41 on average without being right",
    "propositional_logic": "the last number of the prompt earns 0.09 on average without being right",
    "puzzle24": "the answer of another problem earns 1.00 on average without being right",
    "ransom_note": "'False or True' earns 0.35 on average without being right",
    "rectangle_count": "'5' earns 0.34 on average without being right",
    "rotate_matrix": "the prompt earns 0.12 on average without being right",
    "rotten_oranges": "'-1 or 6' earns 0.12 on average without being right",
    "sudoku": "the answer of another problem earns 0.13 on average without being right",
    "syllogism": "'Yes or No' earns 0.30 on average without being right",
    "time_intervals": "the answer of another problem earns 0.38 on average without being right",
}
PAID_IN_FULL = ("coin_flip", "game_of_life_halting", "puzzle24")  # where ``verify_solved`` is no remedy


class GymProblems(NamedTuple):
    """Problems of one family: ``answers[i]`` is what ``verify`` needs for ``prompts[i]``."""

    family: str
    prompts: list[str]
    solutions: list[str | None]  # None where the family only checks
    answers: list[dict[str, Any]]


def prepare() -> None:
    """Starts a worker of the sandbox; the pool calls it before the clock runs.

    Raises:
      UserError: when the extra is not installed.
    """
    families()


def families() -> tuple[str, ...]:
    """Names of all families, sorted; ``composite``, a mixture of the others, is none."""
    need_extra("reasoning_gym", _USE, "tasks")
    return _families()


@functools.cache
def _families() -> tuple[str, ...]:
    return tuple(foreign.ask_trusted(f"{__name__}:known", limits=_DRAWING))


def problems(family: str, n: int, seed: int, *, unsound: bool = False, **settings: Any) -> GymProblems:
    """Draws ``n`` problems of a family, the same for the same seed in every process on every host.

    They are drawn in a fresh process with a fixed hash seed: some families iterate over sets of texts.

    Args:
      unsound: draw from a family although its scorer pays for answers that are not right (``UNSOUND``).
      settings: of the family's config, for example ``max_value=9``; plain JSON values.

    Raises:
      UserError: for an unknown family or setting, or one of ``UNSOUND`` without ``unsound``.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    if family not in families():
        raise UserError(f"no reasoning-gym family {family!r}; families() lists the {len(families())} there are")
    if family in UNSOUND and not unsound:
        raise UserError(
            f"reasoning-gym family {family!r} pays for answers that are not right: {UNSOUND[family]}; "
            "choose another, or give unsound=True"
            + ("" if family in PAID_IN_FULL else " and judge by gym.verify_solved, which pays for full marks alone")
        )
    kept = json.dumps(settings, sort_keys=True)
    try:
        drawn = foreign.ask_trusted(f"{__name__}:draw", family, n, seed, kept, limits=_DRAWING)
    except UserError as error:
        raise UserError(f"reasoning-gym family {family!r} refuses the settings {settings}: {error}") from error
    return GymProblems(
        family=family,
        prompts=[question for question, _, _ in drawn],
        solutions=[solution for _, solution, _ in drawn],
        answers=[{"family": family, "settings": kept, "entry": entry} for _, _, entry in drawn],
    )


def _answer_text(response: str) -> str:
    start = response.rfind("<answer>")
    if start < 0:
        return response.strip()
    return response[start + len("<answer>") :].split("</answer>", 1)[0].strip()


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """The family's own score, in [0, 1], of the text in the last ``<answer>`` tag (or of the whole response).

    A response on which the scorer fails gets 0; where the scorer fails on the reference answer too, the verdict is
    invalid. Scores are the family's: some give part of the value to a wrong answer.
    """
    problem = (answer["family"], answer["settings"], answer["entry"])
    called = foreign.ask(f"{__name__}:score", *problem, _answer_text(response))
    return foreign.verdict(
        called,
        lambda: foreign.ask(f"{__name__}:score_reference", *problem),
        lambda value: "right" if value >= 1.0 else f"scored {value:g} by {answer['family']}",
    )


def verify_solved(answer: dict[str, Any], response: str) -> Verdict:
    """1 where the family gives full marks (``verify``), else 0: no partial credit."""
    verdict = verify(answer, response)
    return verdict._replace(value=float(verdict.value >= 1.0))


class Audit(NamedTuple):
    """What texts earn that are not made for a problem, on average over problems of one family.

    ``paid``, ``full`` and ``right`` have one entry a text: the mean score, the share of problems with full marks, and
    the share of problems whose stored answer it is (which it may earn).
    """

    family: str
    solved: float | None  # mean score of the stored answers; None without
    paid: dict[str, float]
    full: dict[str, float]
    right: dict[str, float]
    partial: tuple[float, ...]  # scores strictly between 0 and 1, sorted

    def worst(self, earned: dict[str, float]) -> tuple[str, float]:
        """The text that earns most without being right, and how much (of ``paid`` or ``full``)."""
        return max(((text, value - self.right[text]) for text, value in earned.items()), key=lambda x: (x[1], x[0]))

    def unsound(self) -> str:
        """What it pays for, in words; empty where that is no more than ``TOLERATED``."""
        text, much = self.worst(self.paid)
        if much <= TOLERATED:
            return ""
        shown = text if len(text) <= 32 else f"{text[:28]} ..."
        return f"{shown} earns {much:.2f} on average without being right"

    def pays_in_full(self) -> bool:
        """Whether full marks alone go to texts that are not right, too."""
        return self.worst(self.full)[1] > TOLERATED


CONSTANTS = (
    "0", "1", "-1", "2", "5", "10", "25", "100", "3.14", "1/2", "Yes", "No", "True", "False", "None", "A", "[]", "{}",
)  # fmt: skip
NO_ANSWERS = ("", "I do not know.", "qwerty uiop", "!")
TOLERATED = 0.06  # what a text may earn on average without being right: many families give 0.05 for the form alone


def audit(family: str, n: int = 40, seed: int = 0, **settings: Any) -> Audit:
    """What a family pays for constants, texts that answer nothing, copies of the prompt and shuffled stored answers.

    The constants are ``CONSTANTS`` and the family's own: its most common stored answer, that of its first problem, and,
    where they answer a quarter of the problems, its two most common ones together, as who does not want to choose says
    them. Copied are the prompt and its first and last number.
    """
    drawn = problems(family, n, seed, unsound=True, **settings)
    stored = drawn.solutions
    constants = list(CONSTANTS)
    known_answers = [x for x in stored if x is not None]
    if known_answers:
        common = collections.Counter(known_answers).most_common(2)
        constants += [common[0][0], known_answers[0]]
        if common[-1][1] > 1 and 4 * sum(count for _, count in common) >= n:  # a family of few answers
            constants.append(" or ".join(text for text, _ in common))
    texts: dict[str, list[str]] = {repr(text): [text] * n for text in (*constants, *NO_ANSWERS)}
    texts["the prompt"] = drawn.prompts
    numbers = [re.findall(r"-?\d+", prompt) or ["0"] for prompt in drawn.prompts]
    texts["the first number of the prompt"] = [found[0] for found in numbers]
    texts["the last number of the prompt"] = [found[-1] for found in numbers]
    if len(known_answers) == n:
        texts["the answer of another problem"] = [*known_answers[1:], known_answers[0]]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        scores = {
            name: [verdict.value for verdict in threads.map(verify, drawn.answers, given)]
            for name, given in texts.items()
        }
        solved = [verdict.value for verdict in threads.map(verify, drawn.answers, known_answers)]
    return Audit(
        family,
        sum(solved) / n if len(known_answers) == n else None,
        {name: sum(values) / n for name, values in scores.items()},
        {name: sum(value >= 1.0 for value in values) / n for name, values in scores.items()},
        {name: sum(map(_same, given, stored)) / n for name, given in texts.items()},
        tuple(sorted({value for values in scores.values() for value in values if 0.0 < value < 1.0})),
    )


def _same(text: str, stored: str | None) -> bool:
    """Whether a text is the stored answer, or the same number."""
    try:
        return text == stored or float(text) == float(str(stored))
    except ValueError:
        return False


def warm_up() -> None:
    """In the sandbox, before anything is given up: imports reasoning-gym, and what SymPy executes is built."""
    extra_module("reasoning_gym", _USE, "tasks")
    formulas.build_in_sympy()


def known() -> list[str]:
    """In the sandbox: ``families``."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def draw(family: str, n: int, seed: int, settings: str) -> list[list[Any]]:
    """In the sandbox: ``[question, answer or None, entry]`` of ``n`` problems; an entry is text for ``score``.

    Reads no model text and may execute the family's own; a fresh process gives the same for the same arguments.
    """
    random.seed(seed)  # a few families draw from the global generators
    np.random.seed(seed % 2**32)
    dataset = _dataset(family, n, seed, settings)
    drawn = []
    for k in range(n):
        entry = dataset[k]
        kept = base64.b64encode(pickle.dumps(dict(entry))).decode()
        drawn.append([entry["question"], None if entry["answer"] is None else str(entry["answer"]), kept])
    return drawn


def score(family: str, settings: str, entry: str, text: str) -> float:
    """In the sandbox: the family's score of an answer to the problem of an entry."""
    _read_only()
    # an entry is of ``draw``, never of a model
    return float(_judge(family, settings).score_answer(text or None, pickle.loads(base64.b64decode(entry))))


def score_reference(family: str, settings: str, entry: str) -> float:
    """In the sandbox: the family's score of the stored answer."""
    _read_only()
    problem = pickle.loads(base64.b64decode(entry))
    return float(_judge(family, settings).score_answer(problem["answer"], problem))


def _dataset(family: str, size: int, seed: int, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, size=size, seed=seed, **json.loads(settings))


@functools.lru_cache(maxsize=256)
def _judge(family: str, settings: str) -> Any:
    return _dataset(family, 1, 0, settings)


@functools.cache
def _read_only() -> None:
    """From here on, in this process, formulas and literals are read, not executed."""
    formulas.replace_in_sympy()
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            vars(module)["eval"] = formulas.literal
