"""Problems as arrays: disjoint train and held-out splits, left-padded prompt rows, answers for jittable verifiers."""

import hashlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Problems

T = TypeVar("T")

HELDOUT_SHARE = 0.1
MAX_NUMBERS = 4


def is_heldout(identity: str) -> bool:
    """Whether a problem belongs to the held-out split: a hash of its identity, the same on every machine."""
    digest = hashlib.sha256(identity.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def hash_split(
    rows: Sequence[T], identity: Callable[[T], str], data: str, *, rows_are: str = "rows", give: str
) -> tuple[list[T], list[T]]:
    """Rows to train on and rows held out, ``HELDOUT_SHARE`` of them by a hash of their identity, in their order.

    Raises:
      UserError: where one of the two would be empty; ``rows_are`` and ``give`` name the rows and the remedy.
    """
    parts: tuple[list[T], list[T]] = ([], [])
    for row in rows:
        parts[is_heldout(identity(row))].append(row)
    if not parts[0] or not parts[1]:
        raise UserError(
            f"--data {data}: {len(rows)} {rows_are} leave {len(parts[0])} to train on and {len(parts[1])} held out "
            f"(10 % by hash); give more {give}"
        )
    return parts[0], once(parts[1])


def once(rows: Sequence[T]) -> list[T]:
    """Rows to be measured on: one that a mixture repeats for its share is one object, and is measured once.

    Intervals would be too narrow otherwise.

    >>> one, other = ["a"], ["b"]
    >>> once([one, other, other])
    [['a'], ['b']]
    """
    return list({id(row): row for row in rows}.values())


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """So many rows from all over them: those of a file may be sorted by their level, and those of a mixture by source.

    >>> evenly("abcdefgh", 4), evenly("ab", 4)
    (['a', 'c', 'e', 'g'], ['a', 'b'])
    """
    return [rows[k * len(rows) // most] for k in range(most)] if most < len(rows) else list(rows)


def make_split(
    task: ModuleType, *, split: str, n: int, seed: int, levels: Sequence[int] | None = None, weights=None
) -> list[Problem]:
    """Draws ``n`` distinct problems of a split; train and held-out never share a problem, whatever the seeds.

    Args:
      task: a module of ``data.tasks``.
      split: ``train`` or ``heldout``.
      levels: difficulties to draw from (default: all of the task), with optional ``weights``.

    Raises:
      UserError: when the task has fewer than ``n`` distinct problems in the split.
    """
    problems = draw_split(task, split=split, n=n, seed=seed, levels=levels, weights=weights)
    if len(problems) < n:
        levels = tuple(task.LEVELS if levels is None else levels)
        raise UserError(f"{task.__name__} levels {levels} has fewer than n={n} distinct {split} problems")
    return problems


def draw_split(
    task: ModuleType, *, split: str, n: int, seed: int, levels: Sequence[int] | None = None, weights=None
) -> list[Problem]:
    """As ``make_split``, but what there is where a task has fewer: the same problems in the same order."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split={split!r} is not one of train, heldout")
    levels = tuple(task.LEVELS if levels is None else levels)
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    problems, seen, misses = [], set(), 0
    while len(problems) < n:
        problem = task.make(rng, int(rng.choice(levels, p=weights)))
        if problem.identity in seen or is_heldout(problem.identity) != (split == "heldout"):
            misses += 1
            if misses > 200 * (n + 100):
                break
            continue
        seen.add(problem.identity)
        problems.append(problem)
    return problems


def countdown_answers(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """``numbers [N, 4]`` (0 fills), ``target [N]``."""
    numbers = np.zeros((len(problems), MAX_NUMBERS), np.int32)
    for row, problem in zip(numbers, problems, strict=True):
        row[: len(problem.answer["numbers"])] = problem.answer["numbers"]
    return {"numbers": numbers, "target": np.array([p.answer["target"] for p in problems], np.int32)}


def value_answers(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """``value [N]`` of problems whose answer is one whole number."""
    return {"value": np.array([p.answer["value"] for p in problems], np.int32)}


def no_answers(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """Nothing: the host judges."""
    return {}


def encode_problems(
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    *,
    prompt_tokens: int | None = None,
    answers: Callable[[Sequence[Problem]], dict[str, np.ndarray]] = no_answers,
    chat: bool = False,
) -> Problems:
    """Left-pads the prompts (one BOS first where the tokenizer has one) into a table.

    Args:
      chat: a prompt that is text becomes the message of a user; see ``chat.encode_prompt``.
      prompt_tokens: columns of the table (default: the longest prompt).

    Raises:
      UserError: for an empty list, or a prompt longer than ``prompt_tokens``.
    """
    if not problems:
        raise UserError("the data set is empty; give at least one problem")
    rows = [encode_prompt(tokenizer, p.prompt, chat=chat) for p in problems]
    longest = max(map(len, rows))
    width = longest if prompt_tokens is None else prompt_tokens
    if longest > width:
        k = max(range(len(rows)), key=lambda i: len(rows[i]))
        raise UserError(f"prompt {k} has {longest} tokens, the limit is {width}; raise the limit or drop the prompt")
    tokens = np.full((len(rows), width), tokenizer.pad_id, np.int32)
    valid = np.zeros((len(rows), width), bool)
    for k, row in enumerate(rows):
        tokens[k, width - len(row) :] = row
        valid[k, width - len(row) :] = True
    return Problems(
        tokens=jnp.asarray(tokens),
        valid=jnp.asarray(valid),
        answers={k: jnp.asarray(v) for k, v in answers(problems).items()},
        level=jnp.asarray([p.level for p in problems], jnp.int32),
    )
