r"""Lines of written solutions as their steps, for problems of one's own with worked solutions.

A line is right where its last number is a result of the reference: the last number of one of its lines, or what stands
behind the equals sign of a calculation in ``<<...>>``. A line without a number is right where the reference has it, one
without text is no step.
"""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from experiments.parts.text_problems import with_answer
from experiments.reward_models.parts import steps as reader
from experiments.reward_models.parts.steps import Steps
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.types import Responses, Trajectories

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORKED = re.compile(r"<<[^<>=]*=([^<>=]*)>>")


def last_number(line: str) -> str:
    """The last number of a line without the commas of thousands, empty where it has none.

    >>> last_number("so 3 times 1,200 is 3,600."), last_number("Let us see")
    ('3600', '')
    """
    found = _NUMBER.findall(line)
    return found[-1].replace(",", "") if found else ""


def results(solution: str) -> set[str]:
    """What right lines end with: numbers, and the text of lines without any.

    >>> sorted(results("He has 2*3=<<2*3=6>>6 of them, 6 red\\nThat is all\\n#### 6"))
    ['6', 'That is all']
    """
    lines = [line.strip() for line in solution.splitlines() if line.strip()]
    worked = {last_number(said) for said in _WORKED.findall(solution)}
    return {last_number(line) or line for line in lines} | (worked - {""})


def is_right(line: str, known: set[str]) -> bool:
    """Whether a line is right by the ``results`` of the reference."""
    return (last_number(line) or line.strip()) in known


def separators(tokenizer: Tokenizer, size: int) -> tuple[int, ...]:
    """The tokens of the vocabulary whose text has a line break.

    Raises:
      UserError: for a vocabulary without any.
    """
    found = tuple(k for k in range(size) if k not in tokenizer.eos_ids and "\n" in tokenizer.decode([k]))
    if not found:
        raise UserError("no token of this model's vocabulary has a line break: its solutions have no lines")
    return found


def make_label(
    settings: OnlineSettings,
) -> tuple[Callable[[Trajectories | Responses, bool], tuple[Steps, Bool[Array, "B T"]]], tuple[int, ...]]:
    """``label(rows, heldout) -> (steps, right)`` of ``bench(settings)``, and the tokens that end a line.

    The end of a response ends its last line. Texts are compared on the host, also from inside a compiled program.

    Raises:
      UserError: for rows without a worked solution.
    """
    model = recipes.bench(settings).model
    known = [
        [results(with_answer(p.solution, p.answer)) for p in recipes.solved_problems(settings, heldout=part)]
        for part in (False, True)
    ]
    breaks = separators(model.tokenizer, model.config.vocab_size)
    closing = jnp.asarray([*breaks, *model.tokenizer.eos_ids], jnp.int32)

    def label(rows: Trajectories | Responses, heldout: bool) -> tuple[Steps, Bool[Array, "B T"]]:
        found = reader.cut(rows, lambda token: jnp.isin(token, closing), -1)
        shape = jax.ShapeDtypeStruct(rows.tokens.shape, jnp.bool_)

        def judged(*arrays):
            return told_lines(model.tokenizer.decode, known[int(heldout)], *map(np.asarray, arrays))

        given = (rows.tokens, rows.mask, found.ends, rows.problem_ids)
        told, right = jax.pure_callback(judged, (shape, shape), *given, vmap_method="sequential")
        return reader.only(found, rows.mask, told), right

    return label, breaks


def told_lines(
    decode: Callable[[Sequence[int]], str], known: Sequence[set[str]], tokens: np.ndarray, mask: np.ndarray,
    ends: np.ndarray, problem_ids: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """At the ``ends`` of lines, ``[B, T]``: whether each says anything, and whether it is right."""
    told, right = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for row in range(tokens.shape[0]):
        begin = 0
        for end in np.flatnonzero(ends[row]):
            kept = np.flatnonzero(mask[row, begin : end + 1]) + begin
            line = decode(tokens[row, kept].tolist())
            told[row, end] = bool(line.strip())
            right[row, end] = told[row, end] and is_right(line, known[int(problem_ids[row])])
            begin = end + 1
    return told, right


def repeating(problem: Problem, times: int) -> str:
    r"""The solution with its last step, the line before the answer, written ``times`` more often.

    >>> repeating(Problem("rows", "", "so 1", {"value": "1"}, 0, ""), 1)
    'so 1\nso 1\n\\boxed{1}'
    """
    lines = with_answer(problem.solution, problem.answer).splitlines()
    place = max(len(lines) - 1, 1)
    return "\n".join([*lines[:place], *[lines[place - 1]] * times, *lines[place:]])
