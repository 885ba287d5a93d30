"""Episodes longer than what the policy sees at once: it writes a summary, and goes on from the prompt and the summary.

The rows and their parts are those of ``rollout.turns.contexts``; tokens and log-probabilities are appended as in
``multi_turn``, whose loop this is. The key-value cache is a ring of the length of the longest sub-trajectory:
memory does not grow with the episode.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.generate import prefill
from jaxrl_llm.rollout.next_token import is_end
from jaxrl_llm.rollout.sample import check_sampling, draw
from jaxrl_llm.rollout.turns.contexts import WRITTEN, Context, check, new_tokens, widest
from jaxrl_llm.rollout.turns.multi_turn import Env, _act, _append, _loop, _record, _Row, _start
from jaxrl_llm.types import Key, Params, Policy, Trajectories


class _View(NamedTuple):
    """What the loop carries of each row beside the episode; all with leading axis B."""

    part: Array  # sub-trajectory that goes on, from 1
    place: Array  # tokens in its context, and the position of the next
    writing: Array  # the next token that is chosen belongs to a summary
    summary: Array  # [B, Z]
    count: Array  # tokens of it so far
    parts: Array  # [B, N] from here on: the record
    places: Array
    wrote: Array


def _first(rows: int, new: int, longest: int, following: Array, pad_id: int) -> _View:
    line, grid = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, new), jnp.int32)
    return _View(
        part=line + 1, place=following, writing=line > 0, summary=jnp.full((rows, longest), pad_id, jnp.int32),
        count=line, parts=grid, places=grid, wrote=grid > 0,
    )  # fmt: skip


def _joined(first: Array, count: Array, second: Array, width: int) -> Array:
    """The first ``count`` tokens of each row of ``first``, and ``second`` behind them, in ``width`` columns."""
    at = jnp.arange(width, dtype=jnp.int32)[None, :]
    left, right = jnp.minimum(at, first.shape[1] - 1), jnp.clip(at - count[:, None], 0, second.shape[1] - 1)
    ahead = jnp.take_along_axis(first, jnp.broadcast_to(left, (first.shape[0], width)), axis=1)
    return jnp.where(at < count[:, None], ahead, jnp.take_along_axis(second, right, axis=1))


def _show(row: _Row, where: Array, tokens: Array, count: Array) -> _Row:
    """Where told so, the tokens that are forced next."""
    return row._replace(
        pending=jnp.where(where[:, None], tokens, row.pending),
        left=jnp.where(where, count, row.left),
        at=jnp.where(where, 0, row.at),
    )


class _Prompt(NamedTuple):
    """The prompts of all rows, to begin again with."""

    tokens: Array  # [B, P] from the left
    count: Array
    resume: tuple[int, ...]  # behind the summary


def _restart(row: _Row, view: _View, where: Array, prompt: _Prompt, summary: Array, count: Array):
    """Where told so, a new sub-trajectory: the prompt and the summary."""
    if prompt.resume:
        more = len(prompt.resume)
        behind = jnp.broadcast_to(jnp.asarray(prompt.resume, jnp.int32)[None, :], (count.shape[0], more))
        summary, count = _joined(summary, count, behind, summary.shape[1] + more), count + more
    tokens = _joined(prompt.tokens, prompt.count, summary, row.pending.shape[1])
    row = _show(row, where, tokens, prompt.count + count)
    return row, view._replace(
        part=view.part + where.astype(jnp.int32),
        place=jnp.where(where, 0, view.place),
        writing=view.writing & ~where,
        count=jnp.where(where, 0, view.count),
    )


def _without(row: _Row, view: _View, gone: Array) -> tuple[_Row, _View]:
    """The record without some of its tokens: they become padding."""
    row = row._replace(
        mask=row.mask & ~gone, used=row.used & ~gone, logp=jnp.where(gone, 0.0, row.logp),
        turn_of=jnp.where(gone, -1, row.turn_of),
    )  # fmt: skip
    return row, view._replace(parts=jnp.where(gone, 0, view.parts), places=jnp.where(gone, 0, view.places))


def _turned(context: Context, prompt: _Prompt, t: Array, row: _Row, view: _View, closes: Array, length: Array):
    """After an action was answered: is there room, and if not, what is shown; ``length`` is that of the action.

    Also returns how many tokens were taken out of the context: 0 where nothing was dropped.
    """
    none = jnp.zeros_like(length)
    if context.tokens is None:
        return row, view, none
    full = closes & row.alive & (view.place + row.left > context.tokens)
    over = full & (view.part > context.summaries)
    row, due = row._replace(alive=row.alive & ~over, left=jnp.where(over, 0, row.left)), full & ~over
    if context.summaries == 0:
        return row, view, none
    if context.rule is not None:
        summary, count = jax.vmap(context.rule)(row.pending, row.left)
        count = jnp.clip(count.astype(jnp.int32), 0, context.summary_tokens)
        return *_restart(row, view, due, prompt, summary.astype(jnp.int32), count), none
    asked = jnp.asarray([*context.instruction, 0], jnp.int32)[None, :]
    asked, seen = jnp.broadcast_to(asked, (due.shape[0], asked.shape[1])), row.left
    dropped = jnp.where(due, length, 0) if context.drop else none
    if context.drop:
        columns = jnp.arange(row.tokens.shape[1], dtype=jnp.int32)[None, :]
        row, view = _without(row, view, (columns > (t - dropped)[:, None]) & (columns <= t))
        seen = jnp.zeros_like(seen)
    tokens = _joined(row.pending, seen, asked, row.pending.shape[1])
    row = _show(row, due, tokens, seen + len(context.instruction))
    return row, view._replace(writing=view.writing | due, place=view.place - dropped), dropped


def _written(ends: Callable[[Array], Array], prompt: _Prompt, row: _Row, view: _View, token: Array, tells: Array):
    """One more token of a summary; where that completes it, the next sub-trajectory begins."""
    longest = view.summary.shape[1]
    here = tells[:, None] & (jnp.arange(longest, dtype=jnp.int32)[None, :] == view.count[:, None])
    view = view._replace(
        summary=jnp.where(here, token[:, None], view.summary), count=view.count + tells.astype(jnp.int32)
    )
    # to the loop of episodes it was a token that is read
    row = row._replace(left=jnp.where(tells, 0, row.left), at=jnp.where(tells, 0, row.at))
    ended = tells & (ends(token) | (view.count >= longest))
    return _restart(row, view, ended, prompt, view.summary, view.count)


def _noted(view: _View, t: Array, alive: Array, tells: Array) -> _View:
    def put(array: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), t, 1)

    return view._replace(
        parts=put(view.parts, jnp.where(alive, view.part, 0)),
        places=put(view.places, jnp.where(alive, view.place, 0)),
        wrote=put(view.wrote, tells),
        place=view.place + alive.astype(jnp.int32),
    )


def _with_room(env: Env, width: int) -> Env:
    """The same world with observations of so many columns, for what else is shown."""

    def step(state: PyTree, action: Array, count: Array):
        answer = env.step(state, action, count)
        shown = jnp.minimum(answer.count, env.observation_tokens)
        return answer._replace(tokens=jnp.pad(answer.tokens, (0, width - env.observation_tokens)), count=shown)

    return env._replace(step=step, observation_tokens=width)


def make_episodes(
    policy: Policy,
    env: Env,
    tasks: PyTree,
    context: Context,
    *,
    group_size: int,
    max_turns: int,
    end_ids: Sequence[int],
    pad_id: int = 0,
    temperature: float = 1.0,
    early_exit: bool = True,
) -> Callable[..., Trajectories]:
    """The ``rollout`` slot of an online method whose episodes are longer than the context.

    As ``multi_turn.make_episodes``, to which it is equal where the context has no limit. ``segment_ids`` number the
    sub-trajectories of a row, whose ``positions`` begin again at 0; the mask holds actions and summaries, each where it
    was chosen: the prompt and the summary at the beginning of a sub-trajectory are read. ``extras`` hold the ``Turns``
    (of a dropped turn the tokens are gone, the reward stays) and ``summaries/written``, the tokens of summaries.

    From "Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management" (SUPO), arXiv:2510.06727,
    section 3 and algorithm 2. Differs from the paper in that ``drop`` is an option, and ``max_turns`` counts actions.
    """
    check_sampling(temperature, None, None, None)

    def choose(keys: Key, logits: Array, row: _Row, view: _View) -> tuple[Array, Array]:
        return draw(logits, keys, temperature=temperature)

    return _make(policy, env, tasks, context, choose, group_size, max_turns, tuple(end_ids), pad_id, early_exit)


def make_played(
    env: Env,
    tasks: PyTree,
    context: Context,
    behave: Callable[[PyTree, Key], Array],
    summarise: Callable[[PyTree, Key], Array],
    *,
    max_turns: int,
    end_ids: Sequence[int] = (),
    pad_id: int = 0,
) -> Callable[..., Trajectories]:
    """``(prompts, valid, keys, problem_ids) -> episodes`` of the same form, one a prompt, played by a script.

    Args:
      behave: ``(state, key) -> action [A]``.
      summarise: ``(state, key) -> summary [summary_tokens]``.
    """

    def choose(keys: Key, logits: Array, row: _Row, view: _View) -> tuple[Array, Array]:
        # one key an action or summary, whichever of its tokens is asked for
        mine = jax.vmap(jax.random.fold_in)(keys, 2 * row.turn + view.writing.astype(jnp.int32))
        acts, tells = jax.vmap(behave)(row.world, mine), jax.vmap(summarise)(row.world, mine)
        action = jnp.take_along_axis(acts, jnp.minimum(row.length, acts.shape[1] - 1)[:, None], axis=1)[:, 0]
        summary = jnp.take_along_axis(tells, jnp.minimum(view.count, tells.shape[1] - 1)[:, None], axis=1)[:, 0]
        token = jnp.where(view.writing, summary, action).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32)

    rollout = _make(_SILENT, env, tasks, context, choose, 1, max_turns, tuple(end_ids), pad_id, False, by_column=False)
    return lambda prompts, valid, keys, ids: rollout({}, prompts, valid, keys, ids)


# of no use but to keep the loop going where a script chooses
_SILENT = Policy(
    init=lambda key: {}, hidden=lambda params, tokens, *_: jnp.zeros((*tokens.shape, 1), jnp.float32),
    unembed=lambda params, hidden: hidden, init_cache=lambda batch, length: {},
    extend=lambda params, cache, tokens, *_: (jnp.zeros((*tokens.shape, 1), jnp.float32), cache),
    repeat_cache=lambda cache, repeats: cache, vocab_size=1,
)  # fmt: skip


def _make(
    policy, env, tasks, context, choose, group_size, max_turns, end_ids, pad_id, early_exit, by_column=True
) -> Callable[..., Trajectories]:
    for name, value in (("max_turns", max_turns), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    ends = partial(is_end, eos_ids=end_ids)

    def rollout(params: Params, tokens: Array, valid: Array, keys: Key, problem_ids: Array) -> Trajectories:
        width, rows = tokens.shape[1], tokens.shape[0] * group_size
        if keys.shape != (rows,):
            raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")
        check(context, width)
        sizes = {"prompt_tokens": width, "turns": max_turns}
        new, ring = new_tokens(context, env, **sizes), widest(context, env, **sizes)
        behind = context.summary_tokens + len(context.resume)
        room = max(env.observation_tokens + len(context.instruction), width + behind)
        wide = _with_room(env, room)
        params = policy.for_steps(params)
        cache, logits, positions, segments, following = prefill(policy, params, tokens, valid, group_size, ring)
        lined, there = (
            jnp.repeat(x, group_size, axis=0) for x in given_responses.right_padded(tokens, valid, pad_id=pad_id)
        )
        prompt = _Prompt(lined, jnp.sum(there.astype(jnp.int32), axis=1), context.resume)
        mine = jax.tree.map(lambda x: jnp.repeat(x[problem_ids], group_size, axis=0), tasks)
        world_keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(k, 0x3A7D), 0))(keys)
        start = _start(wide, jax.vmap(env.reset)(world_keys, mine), rows, new, max_turns, pad_id)

        def one(t: Array, carry):
            cache, logits, row, view = carry
            mine = jax.vmap(lambda k: jax.random.fold_in(k, t))(keys) if by_column else keys
            sampled, logp = choose(mine, logits, row, view)
            forced = row.left > 0
            shown = jnp.take_along_axis(row.pending, jnp.minimum(row.at, room - 1)[:, None], 1)[:, 0]
            token = jnp.where(row.alive, jnp.where(forced, shown, sampled), pad_id)
            chosen = row.alive & ~forced
            acts, tells, length = chosen & ~view.writing, chosen & view.writing, row.length + 1
            row, view = _append(row, t, token, logp, chosen), _noted(view, t, row.alive, tells)
            row = _act(wide, ends, jnp.int32(max_turns), pad_id, row, token, acts, width + t)
            row, view, dropped = _turned(context, prompt, t, row, view, acts & (row.length == 0), length)
            row, view = _written(ends, prompt, row, view, token, tells)

            def extended(cache, at: Array):
                now = (row.tokens[:, at, None], view.places[:, at, None], view.parts[:, at, None])
                return policy.extend(params, cache, *now, (width + at) % ring)

            hidden, cache = extended(cache, t)
            for back in range(1, env.action_tokens if context.drop else 1):
                # the columns before are written once more, those of a dropped action as padding
                again = partial(lambda at, c: extended(c, at)[1], jnp.maximum(t - back, 0))
                cache = jax.lax.cond(jnp.any(dropped > back), again, lambda c: c, cache)
            return cache, policy.unembed(params, hidden[:, 0]), row, view

        view = _first(rows, new, context.summary_tokens, following, pad_id)
        # the pass after the last token is of no use, but without it there would be twice as much to compile
        _, _, row, view = _loop(one, (cache, logits, start, view), new, early_exit)
        found = _record(row, tokens, positions, segments, following, problem_ids, group_size, pad_id)
        return _packed(found, view, width)

    return rollout


def _packed(found: Trajectories, view: _View, width: int) -> Trajectories:
    """The record of an episode with the sub-trajectories as its segments."""
    before = jnp.zeros((found.tokens.shape[0], width), bool)
    return found._replace(
        segment_ids=jnp.concatenate([found.segment_ids[:, :width], view.parts], axis=1),
        positions=jnp.concatenate([found.positions[:, :width], view.places], axis=1),
        extras=found.extras | {WRITTEN: jnp.concatenate([before, view.wrote], axis=1)},
    )
