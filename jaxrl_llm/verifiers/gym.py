"""Every reasoning-gym family (extra ``tasks``) as plain data and one verifier.

Some families judge by parsing the response as a formula, so run the verifier in a ``pool.VerifierPool``.
"""

import functools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError, extra_module
from jaxrl_llm.verifiers.verdict import Verdict


class GymProblems(NamedTuple):
    """Problems of one family: ``answers[i]`` is what ``verify`` needs for ``prompts[i]``."""

    family: str
    prompts: list[str]
    solutions: list[str | None]  # None where the family only checks
    answers: list[dict[str, Any]]


def prepare() -> Any:
    """Imports reasoning-gym; the pool calls it before the clock runs.

    Raises:
      UserError: when the extra is not installed.
    """
    return extra_module("reasoning_gym", "reasoning-gym families need", "tasks")


def families() -> tuple[str, ...]:
    """Names of all families, sorted; ``composite``, a mixture of the others, is none."""
    prepare()
    from reasoning_gym.factory import DATASETS

    return tuple(sorted(set(DATASETS) - {"composite"}))


def _dataset(family: str, size: int, seed: int, settings: dict[str, Any]) -> Any:
    if family not in families():
        raise UserError(f"no reasoning-gym family {family!r}; families() lists the {len(families())} there are")
    return prepare().create_dataset(family, size=size, seed=seed, **settings)


@functools.lru_cache(maxsize=32)
def _judge(family: str, settings: str) -> Any:
    return _dataset(family, 1, 0, json.loads(settings))


def problems(family: str, n: int, seed: int, **settings: Any) -> GymProblems:
    """Draws ``n`` problems of a family, the same for the same seed whatever the state of Python's generator.

    Args:
      settings: of the family's config, for example ``max_value=9``; plain JSON values.

    Raises:
      UserError: for an unknown family or setting.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    state = random.getstate()
    random.seed(seed)  # a few families draw from the global generator
    try:
        entries = list(_take(_dataset(family, n, seed, settings), n))
    except (TypeError, AssertionError) as error:
        raise UserError(f"reasoning-gym family {family!r} refuses the settings {settings}: {error}") from error
    finally:
        random.setstate(state)
    kept = json.dumps(settings, sort_keys=True)
    return GymProblems(
        family=family,
        prompts=[entry["question"] for entry in entries],
        solutions=[None if entry["answer"] is None else str(entry["answer"]) for entry in entries],
        answers=[{"family": family, "settings": kept, "entry": dict(entry)} for entry in entries],
    )


def _take(dataset: Any, n: int) -> Iterator[dict[str, Any]]:
    return (dataset[i] for i in range(n))


def _answer_text(response: str) -> str:
    start = response.rfind("<answer>")
    if start < 0:
        return response.strip()
    return response[start + len("<answer>") :].split("</answer>", 1)[0].strip()


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """The family's own score, in [0, 1], of the text in the last ``<answer>`` tag (or of the whole response).

    A response on which the scorer fails gets 0; where the scorer fails on the reference answer too, the verdict is
    invalid. Scores are the family's: some give part of the value to a wrong answer, and a few give it to any text
    (``game_of_life_halting`` accepts any text).
    """
    dataset, entry = _judge(answer["family"], answer["settings"]), answer["entry"]
    text = _answer_text(response)
    try:
        value = float(dataset.score_answer(text or None, entry))
    except Exception as error:  # each family has a parser of its own
        return _failed(dataset, entry, error)
    return Verdict(value, True, "right" if value >= 1.0 else f"scored {value:g} by {answer['family']}")


def _failed(dataset: Any, entry: dict[str, Any], error: Exception) -> Verdict:
    try:
        dataset.score_answer(entry["answer"], entry)
    except Exception as worse:
        return Verdict(0.0, False, f"the scorer fails on its own answer: {type(worse).__name__}: {worse}")
    return Verdict(0.0, True, f"not readable: {type(error).__name__}")
