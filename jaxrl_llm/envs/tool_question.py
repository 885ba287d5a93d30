"""A question, tools to call, an answer that is judged: the world of agents that search, calculate or run programs.

Rows come from ``--data`` with a verifier, tools (``tools.boxes``) are called as ``tools.calls`` reads them. A response
that calls nothing is the answer. The mark of a turn (``multi_turn.marks_of``) says what it did with the tools; the
functions of rows below read it.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.data.formats import with_tools
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.rollout.turns.multi_turn import episode_rewards, marks_of, turns_of
from jaxrl_llm.tools import schema
from jaxrl_llm.tools.calls import Answer, Toolbox, Turn, take_turn
from jaxrl_llm.types import Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verifier

CALLED, FAILED, MALFORMED, FIRST_TOOL = 1, 2, 4, 8  # of a mark; the next tools are twice the one before
MOST_TOOLS = 27  # that a mark tells apart
BEGINNING = 200  # characters of a hit, for agents that read beginnings only
_HITS = re.compile(r"\n(?=\[\d+\] )")


Luck = Callable[[Toolbox, np.random.Generator], Toolbox]


class Place(NamedTuple):
    """Of an episode: what its answer is judged by, what has been called and heard, and the numbers of its luck."""

    answer: Any
    heard: tuple[str, ...] = ()
    seed: tuple[int, ...] = ()


def _mark(box: Toolbox, turn: Turn) -> int:
    names, mark = [item.name for item in box.tools], CALLED
    for call, answer in zip(turn.reply.calls, turn.answers, strict=True):
        if call.problem:
            mark |= MALFORMED
        else:
            mark |= FIRST_TOOL << min(names.index(call.name), MOST_TOOLS - 1) | (FAILED if answer.error else 0)
    return mark


def tool_env(
    box: Toolbox,
    verify: Verifier,
    *,
    calls: int | None = None,
    luck: Luck | None = None,
) -> TextEnv:
    """Calls are made and answered, a response without one is judged and ends the episode.

    A tool that could not be asked, or a verdict that says nothing, makes the episode invalid. Situations are the same
    where the same was heard on the same task.

    Args:
      calls: responses of an episode whose calls are made, at most; the one after them is the answer, whatever it holds.
      luck: what becomes of the tools in one turn, for example ``noisy``.
    """
    if calls is not None and calls < 0:
        raise ValueError(f"calls={calls} must not be negative")

    def judged(place: Place, text: str) -> TextStepResult:
        found = verify(place.answer, text)
        return TextStepResult(place, "", found.value, True, found.valid, reason="" if found.valid else found.reason)

    def step(place: Place, text: str) -> TextStepResult:
        if calls is not None and len(place.heard) >= calls:
            return judged(place, text)
        turn = take_turn(
            box if luck is None else luck(box, np.random.default_rng([*place.seed, len(place.heard)])), text
        )
        if not turn.valid:
            return TextStepResult(
                place, "", 0.0, False, False, reason=next(a.text for a in turn.answers if not a.valid)
            )
        if not turn.answers:
            return judged(place, text)
        shown = "\n".join(f"<tool_response>\n{answer.text}\n</tool_response>" for answer in turn.answers)
        return TextStepResult(place._replace(heard=(*place.heard, shown)), shown, 0.0, False, mark=_mark(box, turn))

    def reset(seed: np.ndarray, task: Any) -> Place:
        return Place(task, seed=tuple(int(x) for x in seed))

    return TextEnv(reset, step, lambda place: text_identity(repr((place.answer, place.heard))))


def noisy(
    box: Toolbox, rng: np.random.Generator, *, astray: float = 0.0, failing: float = 0.0, beginnings: bool = False
) -> Toolbox:
    """The tools on a bad day.

    Args:
      astray: chance that a search does not show its best hit.
      failing: chance that a tool answers nothing but an error.
      beginnings: of every hit only the first ``BEGINNING`` characters are shown.
    """

    def run(name: str, arguments: dict[str, Any]) -> Answer:
        lost, other = rng.random(2)
        if lost < failing:
            return Answer("error: it could not be fetched", error=True)
        answer = box.run(name, arguments)
        if name not in ("search", "web_search") or answer.error or not answer.valid:
            return answer
        hits = _HITS.split(answer.text)
        if other < astray:  # several queries have a best hit each
            hits = hits[1:] if name == "search" else [hit for hit in hits if not hit.startswith("[1] ")]
        shown = "\n".join(hit[:BEGINNING] if beginnings else hit for hit in hits)
        return answer._replace(text=shown or "nothing was found")

    return Toolbox(box.tools, run)


def _in_front(problem: Problem, said: str) -> Problem:
    if isinstance(problem.prompt, str):
        return problem._replace(prompt=f"{said}\n\n{problem.prompt}")
    first, *rest = problem.prompt
    if first["role"] == "system":  # templates take one such message, if any
        return problem._replace(prompt=[first | {"content": f"{first['content']}\n\n{said}"}, *rest])
    return problem._replace(prompt=[{"role": "system", "content": said}, *problem.prompt])


def asked(problem: Problem, box: Toolbox) -> Problem:
    """The same problem with the tools, and how they are called, in front of its prompt."""
    said = with_tools("", [schema.declared(item) for item in box.tools]) + "\nA response without a call is your answer."
    return _in_front(problem, said)


def told_nothing(problem: Problem, box: Toolbox) -> Problem:
    """The problem as it is: for agents that have no tool."""
    return problem


def with_passages(problem: Problem, box: Toolbox) -> Problem:
    """The problem with what a search for its own words finds in front of it: one retrieval, and no tool after it.

    Raises:
      UserError: where there is no search, or it cannot be asked.
    """
    if "search" not in (item.name for item in box.tools):
        raise UserError("--tools: an arm that retrieves before the answer needs search=CORPUS.jsonl")
    prompt = problem.prompt
    found = box.run("search", {"query": prompt if isinstance(prompt, str) else prompt[-1]["content"]})
    if not found.valid:
        raise UserError(f"--tools: {found.text}")
    return _in_front(problem, f"What a search for the question found:\n{found.text}")


# --- of rows that were played here


def _noted(rows: Trajectories, what: int) -> Bool[Array, " B"]:
    return jnp.any(marks_of(rows) & what > 0, axis=1)


def failed(rows: Trajectories) -> Bool[Array, " B"]:
    """Whether a call of the episode was malformed, or refused by its tool: a program that ends with an error is."""
    return _noted(rows, FAILED | MALFORMED)


def formed(rows: Trajectories) -> Bool[Array, " B"]:
    """Whether an answer was given and no call was malformed."""
    return turns_of(rows).done & ~_noted(rows, MALFORMED)


def calls_of(rows: Trajectories) -> Int[Array, " B"]:
    """Responses of an episode that called something."""
    return jnp.sum(marks_of(rows) & CALLED, axis=1)


def tools_of(rows: Trajectories) -> Int[Array, " B"]:
    """Different tools that an episode called."""
    tools = FIRST_TOOL * 2 ** jnp.arange(MOST_TOOLS, dtype=jnp.int32)
    return jnp.sum(jnp.any(marks_of(rows)[:, :, None] & tools[None, None, :] > 0, axis=1).astype(jnp.int32), axis=1)


def score_by_form(reward: Callable[[Array, Array], Array]) -> Callable[[Any, Trajectories], Rewards]:
    """The ``score`` of a ``reward(verdict, formed)``; a verdict below 0 says that the answer's form is wrong."""

    def score(answers: Any, rows: Trajectories) -> Rewards:
        found = episode_rewards(answers, rows)
        fine = formed(rows) & (found.value >= 0)
        return Rewards(reward(jnp.maximum(found.value, 0.0), fine), found.valid)

    return score


def make_multi_score(*, bonus: float) -> Callable[[Any, Trajectories], Rewards]:
    """The ``score`` of ``shaping.multi_tool_rewards``: a bonus where a right answer called several tools."""

    def score(answers: Any, rows: Trajectories) -> Rewards:
        found, fine = episode_rewards(answers, rows), formed(rows)
        right = jnp.maximum(found.value, 0.0)
        return Rewards(shaping.multi_tool_rewards(right, fine, tools_of(rows) > 1, bonus=bonus), found.valid)

    return score


def figures(rows: Trajectories, rewards: Rewards, problems: Problems) -> dict[str, Array]:
    """Of measured episodes: use of the tools, calls that failed, and what answers were worth, by level where there are.

    ``eval/f1`` is the verdict above 0, ``eval/passed`` the share of responses with calls of which none failed.
    """
    marks, valid = marks_of(rows), rewards.valid
    calls, right = calls_of(rows).astype(jnp.float32), jnp.maximum(rewards.value, 0.0)
    fine = (marks & (FAILED | MALFORMED) == 0).astype(jnp.float32)
    shown: dict[str, Float[Array, ""]] = {
        "eval/f1": reduce.scalars(right, valid),
        "eval/exact": reduce.scalars((right > 0.999).astype(jnp.float32), valid),
        "eval/formed": reduce.scalars(formed(rows).astype(jnp.float32), valid),
        "eval/malformed": reduce.scalars(1.0 - formed(rows).astype(jnp.float32), valid),
        "eval/code": reduce.scalars((calls > 0).astype(jnp.float32), valid),
        "eval/both": reduce.scalars((formed(rows) & (tools_of(rows) > 1)).astype(jnp.float32), valid),
        "eval/calls": reduce.scalars(calls, valid),
        "eval/searches": reduce.scalars(calls, valid),
        "eval/passed": reduce.scalars(fine.reshape(-1), (marks & CALLED > 0).reshape(-1)),
    }
    level, there = problems.level[rows.problem_ids], sorted(set(np.asarray(problems.level).tolist()) - {0})
    for n in there:
        mine = valid & (level == n)
        shown |= {f"eval/f1_{n}": reduce.scalars(right, mine), f"eval/searches_{n}": reduce.scalars(calls, mine)}
    if len(there) > 1:
        shown["eval/searches_rise"] = shown[f"eval/searches_{there[-1]}"] - shown[f"eval/searches_{there[0]}"]
    return shown
