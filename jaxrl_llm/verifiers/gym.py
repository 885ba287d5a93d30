"""Every reasoning-gym family (extra ``tasks``) as plain data and one verifier.

The package's scorers read model text, and some call ``eval`` or SymPy's parser, which calls it, on the answer. They are
asked in the sandbox (``foreign``): both read the syntax there instead (``formulas``), and the process executes no text
at all (``sandbox.calls.guard``). Problems are drawn in the sandbox, too, with a fixed hash seed.
"""

import base64
import functools
import json
import pickle
import random
import sys
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError, extra_module, need_extra
from jaxrl_llm.sandbox.records import Limits
from jaxrl_llm.verifiers import foreign, formulas
from jaxrl_llm.verifiers.verdict import Verdict

_USE = "reasoning-gym families need"
TIMEOUT_S = foreign.TIMEOUT_S
_DRAWING = Limits(cpu_s=3600.0, wall_s=3600.0, memory_mb=4096, output_bytes=1 << 28)


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


def problems(family: str, n: int, seed: int, **settings: Any) -> GymProblems:
    """Draws ``n`` problems of a family, the same for the same seed in every process on every host.

    They are drawn in a fresh process with a fixed hash seed: some families iterate over sets of texts.

    Args:
      settings: of the family's config, for example ``max_value=9``; plain JSON values.

    Raises:
      UserError: for an unknown family or setting.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    if family not in families():
        raise UserError(f"no reasoning-gym family {family!r}; families() lists the {len(families())} there are")
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


def warm_up() -> None:
    """In the sandbox, before anything is given up: imports reasoning-gym."""
    extra_module("reasoning_gym", _USE, "tasks")


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
