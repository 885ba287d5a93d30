"""Rollouts that help where a whole group fails: the prompt is drawn again with a hint behind it.

A hint is text at the end of the prompt; the response goes on from it. Where prompts are chat messages it stands at the
end of the user's message behind a sentence that names it, and the response is a whole one. Each way of asking is a
*stage*: stage 0 is the plain prompt. Column 0 of the rows is always padding, which no model reads; it carries the stage
a row was asked at.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import make_reply_encoder
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout import given_responses as given
from jaxrl_llm.rollout import rollout_cost
from jaxrl_llm.run.parts import Model
from jaxrl_llm.types import Batch, Rewards, Trajectories, declared


class Hints(NamedTuple):
    """``S`` ways to ask each of ``N`` problems: left-padded prompts with column 0 free, and how long each hint is."""

    tokens: Int[Array, "S N L"]
    valid: Bool[Array, "S N L"]
    length: Int[Array, "S N"]  # tokens at the end of the prompt that the response goes on from; 0 within a message


def no_hint(problem: Problem) -> str:
    """The plain prompt."""
    return ""


def make_prefix_hint(share: float) -> Callable[[Problem], str]:
    """The first ``round(share * length)`` characters of the reference solution (halves go to the even number).

    From "GHPO: Adaptive Guidance for Stable and Efficient LLM Reinforcement Learning", arXiv:2507.10628.

    >>> problem = Problem("t", "p", "0123456789", {}, 1, "p")
    >>> [len(make_prefix_hint(w)(problem)) for w in (0.25, 0.5, 0.75)]
    [2, 5, 8]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    return lambda problem: problem.solution[: round(share * len(problem.solution))]


def first_operands(problem: Problem) -> str:
    """A cue without a result: what to combine first, ``7*3=``."""
    return problem.solution.split("=")[0] + "="


def first_operation(problem: Problem) -> str:
    """The first sub-problem of a chain, ``3+5=``, as it stands in the prompt: nothing of the solution is known.

    Raises:
      UserError: for a problem of another task, whose prompt does not say what to begin with.

    >>> first_operation(Problem("chain", "m11 3+5*4=>", "", {}, 2, "x"))
    '3+5='
    """
    if problem.task != "chain":
        raise UserError(f"the first operation stands in the prompt of a chain, not of {problem.task}: --data chain")
    return re.match(r"m\d+ (\d+[+*-]\d+)", problem.prompt)[1] + "="


def first_step(problem: Problem) -> str:
    """The first step with its result, ``7*3=21,``; nothing where the solution has one step only."""
    head, comma, _ = problem.solution.partition(",")
    return head + comma if comma else ""


def shown_attempt(problem: Problem) -> str:
    """No text: the name of a stage whose prompt shows a response of the stage before, see ``make_attempt_prompts``."""
    return ""


DECOMPOSE = (
    "Split the problem into smaller problems, solve each of them in turn, and put their results together to the answer."
)
REFINE = "This solution is wrong. Find its error, then solve the whole problem anew."


def in_parts(problem: Problem) -> str:
    """The request to decompose a problem in words: no part of the response, see ``asked_in_words``."""
    return f"\n{DECOMPOSE}\n"


def asked_in_words(table: Hints) -> Hints:
    """Stages whose texts are requests: the response does not go on from them, and a verifier does not read them."""
    return table._replace(length=jnp.zeros_like(table.length))


def refine_words(model: Model, problems: Sequence[Problem], *, chat: bool) -> list[int]:
    """The tokens behind a wrong attempt that ask for another one: a user's next message, or a paragraph of text."""
    tokenizer = model.tokenizer
    if chat or not isinstance(problems[0].prompt, str):
        return [tokenizer.eos_ids[0], *make_reply_encoder(tokenizer)(REFINE)]
    return tokenizer.encode(f"\n\n{REFINE}\n")


def whole_solution(problem: Problem) -> str:
    """The answer given away."""
    return problem.solution


def leaks(hint: str, problem: Problem) -> bool:
    """Whether a hint contains the last step of the solution with its result: such a hint gives the answer away."""
    return problem.solution.split(",")[-1].split("#")[0] in hint


def with_text(prompt: str | Sequence[Mapping[str, Any]], text: str, *, chat: bool, phrase: str) -> Any:
    """The prompt with a hint: behind plain text as it is, inside the last user message behind ``phrase``.

    >>> with_text("1+1=", "2", chat=False, phrase=" Hint: "), with_text("1+1?", "2", chat=True, phrase=" Hint: ")
    ('1+1=2', '1+1? Hint: 2')
    >>> with_text([{"role": "user", "content": "1+1?"}], "2", chat=False, phrase=" Hint: ")
    [{'role': 'user', 'content': '1+1? Hint: 2'}]
    """
    if not text:
        return prompt
    if isinstance(prompt, str):
        return prompt + (phrase if chat else "") + text
    asked = [k for k, message in enumerate(prompt) if message["role"] == "user"]
    if not asked:
        raise UserError("a prompt of messages has no message of a user, where a hint could stand; add one")
    said = [dict(message) for message in prompt]
    said[asked[-1]]["content"] = f"{said[asked[-1]]['content']}{phrase}{text}"
    return said


def encode_hints(
    model: Model,
    problems: Sequence[Problem],
    stages: Sequence[Callable[[Problem], str]],
    *,
    spare_tokens: int = 0,
    chat: bool = False,
    phrase: str = "\nHint: ",
) -> Hints:
    """The prompt tables of all stages, of one width; the first stage is ``no_hint``.

    Args:
      spare_tokens: further columns of padding, for prompts that show an attempt.
      chat: prompts that are text become a user's message, as those of the bench; a hint stands inside it.
      phrase: what introduces a hint inside a message.

    Raises:
      UserError: for prompts that leave the model no position to answer.
    """
    if not stages or any(stages[0](problem) for problem in problems):
        raise ValueError("the first of stages gives a hint; begin with no_hint, the plain prompt")
    asked = [
        [p._replace(prompt=with_text(p.prompt, hint(p), chat=chat, phrase=phrase)) for p in problems] for hint in stages
    ]
    # encoded once without padding: the widest prompt of any stage sets the width of all
    width = max(tables.encode_problems(model.tokenizer, rows, chat=chat).tokens.shape[1] for rows in asked)
    width += 1 + spare_tokens
    if width >= model.config.max_positions:
        raise UserError(
            f"prompts with their hints take {width} of the model's {model.config.max_positions} positions; shorten the "
            "solutions or drop long rows"
        )
    encoded = [tables.encode_problems(model.tokenizer, rows, prompt_tokens=width, chat=chat) for rows in asked]
    count = [jnp.sum(x.valid.astype(jnp.int32), axis=1) for x in encoded]
    goes_on = jnp.asarray([isinstance(p.prompt, str) and not chat for p in problems])
    stacked = [jnp.stack([getattr(x, name) for x in encoded]) for name in ("tokens", "valid")]
    return Hints(*stacked, jnp.stack([jnp.where(goes_on, c - count[0], 0) for c in count]))


def stage_of(rows: Trajectories | Batch) -> Int[Array, " B"]:
    """The stage at which each row was asked."""
    return rows.tokens[:, 0]


def draws_of(rows: Trajectories | Batch) -> Int[Array, " B"]:
    """How often the prompt of each row was drawn: 1 and the latest stage of its group."""
    latest = jax.ops.segment_max(stage_of(rows), rows.group_ids, num_segments=rows.tokens.shape[0])
    return 1 + latest[rows.group_ids]


def with_hint(rows: Trajectories, hints: Hints) -> Trajectories:
    """The rows with their hint inside the mask: what a verifier has to read."""
    length = hints.length[stage_of(rows), rows.problem_ids]
    width = hints.tokens.shape[2]
    columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None, :]
    return rows._replace(mask=rows.mask | ((columns < width) & (columns >= width - length[:, None])))


def all_wrong(right: Bool[Array, "P G"]) -> Bool[Array, " P"]:
    """Groups without a right response: those that teach nothing."""
    return ~jnp.any(right, axis=1)


def everyone(right: Bool[Array, "P G"]) -> Bool[Array, " P"]:
    """Every group, solved or not."""
    return jnp.ones(right.shape[:1], bool)


def nobody(right: Bool[Array, "P G"]) -> Bool[Array, " P"]:
    """No group: plain rollouts."""
    return jnp.zeros(right.shape[:1], bool)


def replaced(old: Trajectories, new: Trajectories, where: Bool[Array, " B"]) -> Trajectories:
    """Rows of ``new`` where the condition holds."""
    return jax.tree.map(lambda a, b: jnp.where(where.reshape((-1,) + (1,) * (a.ndim - 1)), b, a), old, new)


def make_staged_rollout(
    rollout: Callable[..., Trajectories],
    judge: Callable[[Any, Trajectories], Rewards],
    answers: Any,
    hints: Hints,
    *,
    group_size: int,
    unhinted: int = 0,
    needs: Callable[[Array], Array] = all_wrong,
    prompts: Callable[[int, Array, Trajectories], tuple[Array, Array]] | None = None,
) -> dict[str, Callable]:
    """Slots ``rollout`` and ``score`` of ``Online``: stage after stage for the groups that still need it.

    A group that is drawn again replaces the one before. The log-probabilities are those under the hinted prompt, so
    every row stays on-policy; a hint itself never trains. A group that fails at every stage keeps the last one.
    What the replaced responses cost is counted, see ``rollout.rollout_cost``.

    Args:
      judge: of the training problems, ``curricula.train_score(bench)``.
      answers: of all problems of the table, as in ``Problems``.
      unhinted: the first members of a group that keep their plain (failed) response.
      needs: ``right [P, G] -> bool [P]``: which groups are drawn again.
      prompts: ``(stage, problem ids, rows so far) -> (tokens, valid)`` of the stages from 1 on, of the table's width;
        None: the table's own.
    """
    if not 0 <= unhinted < group_size:
        raise ValueError(f"unhinted={unhinted} must be from 0 to group_size - 1 = {group_size - 1}")

    def judged(rows):
        return judge(jax.tree.map(lambda x: x[rows.problem_ids], answers), with_hint(rows, hints))

    def ask(params, stage, keys, ids, before=None):
        shown = hints.tokens[stage][ids], hints.valid[stage][ids]
        if stage:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 0x48000 + stage))(keys)
            shown = shown if prompts is None else prompts(stage, ids, before)
        rows = rollout(params, *shown, keys, ids)
        return rows._replace(tokens=rows.tokens.at[:, 0].set(stage))

    def staged(params, prompt_tokens, prompt_valid, keys, problem_ids):
        rows = ask(params, 0, keys, problem_ids)
        tokens = rollout_cost.response_tokens(rows)
        drawn = jnp.ones(tokens.shape, jnp.float32)
        for stage in range(1, hints.tokens.shape[0]):
            right = (judged(rows).value > 0.5).reshape(-1, group_size)
            again = jnp.repeat(needs(right), group_size)
            member = jnp.arange(again.shape[0], dtype=jnp.int32) % group_size
            fresh = ask(params, stage, keys, problem_ids, rows)
            new = again & (member >= unhinted)
            drawn = drawn + new.astype(jnp.float32)
            tokens = tokens + jnp.where(new, rollout_cost.response_tokens(fresh), 0.0)
            rows = replaced(rows, fresh, new)
        return rollout_cost.with_cost(rows, drawn, tokens)

    return {"rollout": staged, "score": lambda given, rows: judge(given, with_hint(rows, hints))}


def make_switched_rollout(
    rollout: Callable[..., Trajectories],
    judge: Callable[[Any, Trajectories], Rewards],
    answers: Any,
    hints: Hints,
    *,
    group_size: int,
    unhinted: int = 0,
    needs: Callable[[Array], Array] = all_wrong,
) -> dict[str, Callable]:
    """``make_staged_rollout`` of one further stage, plain until a switch that the state of the run turns.

    In the place of parameters the rollout takes ``(parameters, hinted)``, which an ``actor`` slot makes of the state.

    Args:
      hints: three stages: ``no_hint``, ``no_hint`` and the hint; a row that was drawn again is of the second or the
        third.

    Raises:
      ValueError: for another number of stages.
    """
    if hints.tokens.shape[0] != 3:
        raise ValueError(f"hints has {hints.tokens.shape[0]} stages; give no_hint, no_hint and the hint")

    def switched(acting, prompt_tokens, prompt_valid, keys, problem_ids):
        params, hinted = acting
        second = jnp.where(hinted, 2, 1)
        shown = jax.tree.map(lambda x: jnp.stack([x[0], x[second]]), hints)
        options = {"group_size": group_size, "unhinted": unhinted, "needs": needs}
        staged = make_staged_rollout(rollout, judge, answers, shown, **options)["rollout"]
        rows = staged(params, prompt_tokens, prompt_valid, keys, problem_ids)
        return rows._replace(tokens=rows.tokens.at[:, 0].set(jnp.where(stage_of(rows) > 0, second, 0)))

    return {"rollout": switched, "score": lambda given, rows: judge(given, with_hint(rows, hints))}


class Drawn(NamedTuple):
    """Extras of a batch: how often the prompt of each row was drawn."""

    draws: Float[Array, " B"]


def draw_extras(extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``row_extras`` of ``builders.make_estimate``: how often each prompt was drawn."""
    return Drawn(draws_of(rows).astype(jnp.float32))._asdict()


def switched_extras(extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``draw_extras`` of ``make_switched_rollout``, whose second and third stage are both the second draw."""
    return Drawn(jnp.minimum(draws_of(rows), 2).astype(jnp.float32))._asdict()


def draw_figures(logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
    """``diagnostics`` of ``builders.make_policy_loss``: ``hints/draws``, the mean number of draws of a prompt."""
    return {"hints/draws": jnp.broadcast_to(declared(Drawn, batch.extras).draws[:, None], logp.shape)}


# ------------------------------------------------------------------ attempts inside the prompt


def make_attempt_prompts(
    hints: Hints,
    asked: Sequence[Callable[[Problem], str]],
    tokenizer: Tokenizer,
    *,
    group_size: int,
    separator: Sequence[int] = (),
) -> Callable[[int, Array, Trajectories], tuple[Array, Array]]:
    """The ``prompts`` of a staged rollout: those ``asked`` by ``shown_attempt`` show a response of the stage before.

    Shown is the first response of the group without its end token, behind the prompt that it answered, then
    ``separator``: where a stage is reached all are wrong, and of equals the first is as random as any.

    Args:
      asked: the stages of ``encode_hints``, whose table has as many spare columns as a response and ``separator`` have.
      separator: tokens; by default those of ``;``.

    From "Cog-Rethinker: Hierarchical Metacognitive Reinforcement Learning for LLM Reasoning", arXiv:2510.15979.
    Differs from the paper in the words of the templates, which were not at hand.
    """
    width, ends = hints.tokens.shape[2], list(tokenizer.eos_ids)
    marks = jnp.asarray([*separator] or tokenizer.encode(";"), jnp.int32)

    def prompts(stage, ids, rows):
        if asked[stage] is not shown_attempt:
            return hints.tokens[stage][ids], hints.valid[stage][ids]
        first = jax.tree.map(lambda x: x[::group_size], rows)
        ended = jnp.any(first.tokens[:, :, None] == jnp.asarray(ends, jnp.int32)[None, None, :], axis=2)
        keep = (first.segment_ids > 0) & ~(first.mask & ended)
        count = first.tokens.shape[0]
        behind = jnp.broadcast_to(marks[None, :], (count, marks.shape[0]))
        tokens = jnp.concatenate([first.tokens, behind], axis=1)
        keep = jnp.concatenate([keep, jnp.ones(behind.shape, bool)], axis=1)
        return tuple(x[:, -width:] for x in given.left_padded(tokens, keep))

    return prompts


class PlainAnswers(NamedTuple):
    """Responses as answers to the plain prompt, for a supervised term; ``mask`` is true on what is imitated."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


def plain_answers(rows: Trajectories, hints: Hints, chosen: Bool[Array, " B"]) -> PlainAnswers:
    """The chosen rows under the plain prompt: a hint counts as the beginning of the response, an attempt is left out.

    From "Cog-Rethinker", arXiv:2510.15979: what the templates of a rollout achieve is learned without them.
    """
    ids, mask = rows.problem_ids, with_hint(rows, hints).mask
    whole = jnp.concatenate([hints.tokens[0][ids], rows.tokens], axis=1)
    keep = jnp.concatenate([hints.valid[0][ids], mask], axis=1)
    answered = jnp.concatenate([jnp.zeros(hints.valid[0][ids].shape, jnp.int32), mask.astype(jnp.int32)], axis=1)
    width = rows.tokens.shape[1]  # enough: prompts of all stages are at least as long as the plain one
    tokens, valid = (x[:, :width] for x in given.right_padded(whole, keep))
    taught = given.right_padded(answered, keep)[0][:, :width] > 0
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = jnp.where(valid, columns, 0)
    return PlainAnswers(tokens, positions, valid.astype(jnp.int32), taught & chosen[:, None])
