"""Compositions of ``text_functions``, or problems of one's own by difficulty, in the place of those of ``functions``.

``--data strings`` generates the problems. Rows of one's own stand in six equal classes, by their level and the length
of their solution, in the place of the levels 1, 2, 3, 4, 6 and 8; trained are then training rows and heldout those that
are held out. The base imitates solutions of level 1 (of generated ones half with definitions in the prompt), and single
sums of the task to transfer to, which is generated for both.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.analysis.parts import skills, text_functions
from experiments.parts import strings, text_problems, text_rows
from jaxrl_llm import reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.verifiers import answers

GENERATED = "strings"
DRAWS = 48  # problems of a level that are measured


@dataclasses.dataclass(frozen=True)
class Settings(text_problems.Settings):
    """Flags of rows of one's own, or of generated ones."""

    data: str = ""  # strings: generated functions; FILE.jsonl, FILE.json, FILE.csv, FOLDER[:SPLIT]; empty: embedded
    problems: int = 4096  # that are generated


class Told(NamedTuple):
    """A row as ``text_rows`` wants it."""

    prompt: Any
    chosen: str
    rejected: str
    answer: Any
    level: int
    unseen: bool
    sums: bool


def classes(levels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A level of ``skills.SHOWN`` for every row: equal shares, by its own level and then by its length.

    >>> classes(np.array([2, 1, 1, 3, 3, 3]), np.array([5, 9, 4, 1, 2, 3])).tolist()
    [3, 2, 1, 4, 6, 8]
    """
    place = np.empty(len(levels), np.int64)
    place[np.lexsort((lengths, levels))] = np.arange(len(levels))
    return np.asarray(skills.SHOWN)[place * len(skills.SHOWN) // len(levels)]


def _told(problem: text_functions.Problem) -> Told:
    return Told(problem.prompt, problem.solution, problem.solution, {"value": problem.answer}, *problem[3:])


def read(settings: Any) -> list[Told]:
    """The rows of the settings, and the sums.

    Raises:
      UserError: for rows that do not serve.
    """
    kinds = 2 * len(skills.SHOWN) + 4  # single functions, both sets at every level, sums of three lengths
    each = settings.problems // kinds
    if each < 10:
        raise UserError(f"--problems {settings.problems} must be at least {10 * kinds}: one in ten is held out")
    sums = [_told(problem) for problem in text_functions.sums(each)]
    if settings.data == GENERATED:
        return [_told(problem) for problem in text_functions.make_problems(skills.SHOWN, each)] + sums
    solved = text_problems.solved(settings)
    of_class = classes(np.asarray([row.level for row in solved]), np.asarray([len(row.chosen) for row in solved]))
    rows = [Told(*row._replace(level=int(level)), False, False) for row, level in zip(solved, of_class, strict=True)]
    return rows + sums


def open_task(settings: Any) -> Opened:
    """The ``Skills`` of the settings."""
    rows = text_rows.opened(settings, Settings, read)
    generated, count = settings.data == GENERATED, rows.train.prompts.shape[0]
    world = text_rows.world_maker(rows, settings)(0, rows.train.prompts.shape[1], rows.train.chosen.shape[1])
    exact = text_problems.make_right(rows, answers.verify_exact)
    right = exact if generated else text_problems.make_right(rows, text_problems.verifier_of(settings))
    prompts, solutions = (
        jnp.concatenate([getattr(rows.train, name), getattr(rows.heldout, name)]) for name in ("prompts", "chosen")
    )
    level, unseen, sums = (np.asarray([getattr(row, name) for row in rows.sources]) for name in Told._fields[4:])
    heldout = np.arange(len(level)) >= count

    def members(which: np.ndarray, what: str) -> np.ndarray:
        found = np.flatnonzero(which)
        if not len(found):
            raise UserError(f"--data {settings.data}: no problem that fits is {what}; raise --max-new-tokens and "
                            "--max-prompt-tokens, or give more of them")  # fmt: skip
        return found

    def drawn(key, n: int, those: np.ndarray):
        return jnp.asarray(those, jnp.int32)[jax.random.randint(key, (n,), 0, len(those), jnp.int32)]

    single = members(~heldout & ~unseen & (level == 1), "a training problem of level 1")

    def base(key, n: int):
        chosen = drawn(key, n, single)
        return prompts[chosen], solutions[chosen]

    def asked(key, n: int, levels: tuple[int, ...]):
        those = members(~heldout & ~unseen & ~sums & np.isin(level, levels), f"a training problem of levels {levels}")
        return prompts[drawn(key, n, those)]

    shown = {}
    for k in skills.SHOWN:
        new, old = (heldout & unseen, heldout & ~unseen) if generated else (heldout, ~heldout)
        for name, part in (("heldout", new), ("trained", old)):
            shown[f"level{k}/{name}"] = members(part & ~sums & (level == k), f"{name} and of level {k}"), right
    for k in (1, 2, 3):
        shown[f"sums{k}/accuracy"] = members(heldout & sums & (level == k), f"a held-out sum of {k}"), exact

    def measure(params, key):
        found = {}
        for place, (name, (those, judge)) in enumerate(shown.items()):
            pick, say = jax.random.split(jax.random.fold_in(key, place))
            questions = prompts[drawn(pick, DRAWS, those)]
            said = strings.sample(world, params, questions, say)
            found[name] = reduce.scalars(judge(questions, said).astype(jnp.float32))
        return found

    return Opened(skills.Skills(world, world, base, asked, right, measure), text_rows.finish(rows))
