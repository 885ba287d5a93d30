"""Episodes of several turns inside one compiled loop: the policy acts, a world answers, token ids are only appended.

Every row is one sequence: the prompt (what the world shows first), then turn by turn the tokens of an action, which the
policy chose, and those of the observation that answers it, which are forced and outside the mask. A step of the loop
appends one token to every row, whichever it is: episodes of different length and actions of different length never wait
for each other, and the key-value cache goes on across turns. Nothing is decoded or encoded on the way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_llm.advantages.returns import discounted_returns
from jaxrl_llm.models.cache import EXPERTS, experts_of
from jaxrl_llm.rollout.generate import prefill
from jaxrl_llm.rollout.next_token import is_end
from jaxrl_llm.rollout.sample import check_sampling, draw
from jaxrl_llm.types import Key, Params, Policy, Rewards, Trajectories

TURN = "turns/turn"  # of ``Turns``: there where a rollout has turns
MARK = "turns/mark"  # beside ``Turns`` in the extras of a rollout that a world in Python played
State = PyTree


class Answered(NamedTuple):
    """What a world says to an action; of one episode, without a leading axis."""

    state: State
    tokens: Int[Array, " O"]  # the observation, the first ``count`` of them
    count: Int[Array, ""]
    reward: Float[Array, ""]
    done: Bool[Array, ""]  # the episode is over; its observation is not shown
    valid: Bool[Array, ""]  # False: the world failed, which says nothing about the policy


class Env(NamedTuple):
    """A world as pure functions of one episode; the loop maps them over rows.

    * ``reset(key, task) -> state``: ``task`` is one row of the ``answers`` of a ``Problems`` table, whose prompt shows
      what can be seen in this state.
    * ``step(state, action[A], count) -> Answered``: the first ``count`` tokens of ``action`` are what the policy chose,
      its end token included. Any tokens must be taken; a useless action is answered, it is no failure.
    * ``identity(state) -> int32``: equal for states that are the same situation (a hash is enough).
    """

    reset: Callable[[Key, PyTree], State]
    step: Callable[[State, Array, Array], Answered]
    identity: Callable[[State], Array]
    action_tokens: int  # A: the longest action
    observation_tokens: int  # O: the longest observation


class Turns(NamedTuple):
    """The turns of episodes, ``K`` at most; ``turns_of`` reads them from ``Trajectories.extras``."""

    turn: Int[
        Array, "B T"
    ]  # turn that the token at this index belongs to: what is read before an action, and it; or -1
    end: Int[Array, "B K"]  # index of the last token of the action of each turn; 0 where it was not taken
    taken: Bool[Array, "B K"]  # the action was completed and answered
    reward: Float[Array, "B K"]  # 0 where it was not taken
    identity: Int[Array, "B K"]  # of the state in which the action was chosen
    done: Bool[Array, " B"]  # the world ended the episode
    valid: Bool[Array, " B"]  # the world never failed


def turns_of(trajectories: Trajectories) -> Turns:
    """The turns of a rollout of ``make_episodes``."""
    return Turns(**{name: trajectories.extras[f"turns/{name}"] for name in Turns._fields})


def marks_of(trajectories: Trajectories) -> Int[Array, "B K"]:
    """What a world in Python noted of every turn for the method (``TextStepResult.mark``), else 0."""
    return trajectories.extras[MARK]


class _Row(NamedTuple):
    """What the loop carries of each row beside the cache; all with leading axis B."""

    alive: Array
    world: State
    action: Array  # [B, A]
    length: Array  # tokens of the action so far
    pending: Array  # [B, O] observation still to be read
    left: Array  # how many of it
    at: Array  # how many were read
    turn: Array
    tokens: Array  # [B, N] from here on: the record
    logp: Array
    mask: Array
    used: Array
    turn_of: Array
    end: Array  # [B, K]
    taken: Array
    reward: Array
    identity: Array
    done: Array
    valid: Array


def _start(env: Env, worlds: State, rows: int, new: int, turns: int, pad_id: int) -> _Row:
    line, grid, table = jnp.zeros((rows,), jnp.int32), (rows, new), (rows, turns)
    return _Row(
        alive=line == 0,
        world=worlds,
        action=jnp.full((rows, env.action_tokens), pad_id, jnp.int32),
        length=line,
        pending=jnp.full((rows, env.observation_tokens), pad_id, jnp.int32),
        left=line,
        at=line,
        turn=line,
        tokens=jnp.full(grid, pad_id, jnp.int32),
        logp=jnp.zeros(grid, jnp.float32),
        mask=jnp.zeros(grid, bool),
        used=jnp.zeros(grid, bool),
        turn_of=jnp.full(grid, -1, jnp.int32),
        end=jnp.zeros(table, jnp.int32),
        taken=jnp.zeros(table, bool),
        reward=jnp.zeros(table, jnp.float32),
        identity=jnp.zeros(table, jnp.int32),
        done=line > 0,
        valid=line == 0,
    )


def _append(row: _Row, t: Array, token: Array, logp: Array, chosen: Array) -> _Row:
    """Token, log-probability, mask and turn in the same place."""

    def put(array: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), t, 1)

    return row._replace(
        tokens=put(row.tokens, token),
        logp=put(row.logp, jnp.where(chosen, logp, 0.0)),
        mask=put(row.mask, chosen),
        used=put(row.used, row.alive),
        turn_of=put(row.turn_of, jnp.where(row.alive, row.turn, -1)),
    )


def _act(env: Env, ends: Callable[[Array], Array], turns: Array, pad_id: int, row: _Row, token, chosen, column) -> _Row:
    """One more token of an action; where that completes it, the world answers."""
    here = jnp.arange(env.action_tokens, dtype=jnp.int32)[None, :] == row.length[:, None]
    action = jnp.where(chosen[:, None] & here, token[:, None], row.action)
    length = row.length + chosen.astype(jnp.int32)
    closes = chosen & (ends(token) | (length >= env.action_tokens))
    answer = jax.vmap(env.step)(row.world, action, length)
    identity = jax.vmap(env.identity)(row.world)
    done, valid = answer.done.astype(bool), answer.valid.astype(bool)
    over = closes & (done | ~valid | (row.turn + 1 >= turns))

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(closes.reshape((-1,) + (1,) * (old.ndim - 1)), new.astype(old.dtype), old)

    slot = closes[:, None] & (jnp.arange(row.taken.shape[1], dtype=jnp.int32)[None, :] == row.turn[:, None])
    count = jnp.clip(answer.count.astype(jnp.int32), 0, env.observation_tokens)
    reading = row.alive & ~chosen
    return row._replace(
        alive=row.alive & ~over,
        world=jax.tree.map(choose, answer.state, row.world),
        action=jnp.where(closes[:, None], pad_id, action),
        length=jnp.where(closes, 0, length),
        pending=choose(answer.tokens, row.pending),
        left=jnp.where(closes, jnp.where(over, 0, count), row.left - reading.astype(jnp.int32)),
        at=jnp.where(closes, 0, row.at + reading.astype(jnp.int32)),
        turn=row.turn + (closes & ~over).astype(jnp.int32),
        end=jnp.where(slot, column, row.end),
        taken=row.taken | slot,
        reward=jnp.where(slot & valid[:, None], answer.reward.astype(jnp.float32)[:, None], row.reward),
        identity=jnp.where(slot, identity.astype(jnp.int32)[:, None], row.identity),
        done=row.done | (closes & done & valid),
        valid=row.valid & ~(closes & ~valid),
    )


def make_episodes(
    policy: Policy,
    env: Env,
    tasks: PyTree,
    *,
    group_size: int,
    max_turns: int,
    max_new_tokens: int,
    end_ids: Sequence[int],
    pad_id: int = 0,
    temperature: float = 1.0,
    early_exit: bool = True,
) -> Callable[..., Trajectories]:
    """The ``rollout`` slot of an online method over a world, ``(params, prompts, valid, keys, problem_ids)``.

    A sixth argument ``turns``, an integer array, is a lower limit than ``max_turns`` that may change from call to call;
    see ``experiments.agents.parts.turn_limits``.

    A row is ``truncated`` where the world did not end the episode: ``max_turns`` actions, or ``max_new_tokens`` tokens
    (actions and observations), came first; an action that was cut is not answered, its tokens stay in the mask.

    Args:
      tasks: ``answers`` of the whole ``Problems`` table: leaves ``[N, ...]``.
      max_new_tokens: columns after the prompt.
      end_ids: every id that ends an action (not the episode: that is the world's to say); an action of
        ``env.action_tokens`` tokens ends without.
      early_exit: leave the loop when all episodes are over (same result; False under ``vmap``).

    Returns:
      A rollout whose ``extras`` hold the ``Turns``. Sampling keys are folded by the column, as in ``generate``; the
      world's key is folded apart.
    """
    check_sampling(temperature, None, None, None)
    for name, value in (("max_turns", max_turns), ("max_new_tokens", max_new_tokens), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if env.action_tokens < 1 or env.observation_tokens < 1:
        raise ValueError(f"action_tokens={env.action_tokens}, observation_tokens={env.observation_tokens}: at least 1")
    ends = partial(is_end, eos_ids=tuple(end_ids))

    def rollout(
        params: Params, tokens: Array, valid: Array, keys: Key, problem_ids: Array, turns: Array | None = None
    ) -> Trajectories:
        prompts, width = tokens.shape
        limit = jnp.int32(max_turns) if turns is None else jnp.minimum(turns.astype(jnp.int32), max_turns)
        rows = prompts * group_size
        if keys.shape != (rows,):
            raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")
        params = policy.for_steps(params)
        cache, logits, positions, segments, following = prefill(
            policy, params, tokens, valid, group_size, width + max_new_tokens - 1
        )
        mine = jax.tree.map(lambda x: jnp.repeat(x[problem_ids], group_size, axis=0), tasks)
        world_keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(k, 0x3A7D), 0))(keys)
        start = _start(env, jax.vmap(env.reset)(world_keys, mine), rows, max_new_tokens, max_turns, pad_id)

        def pick(t: Array, logits: Array, row: _Row) -> tuple[Array, _Row]:
            step_keys = jax.vmap(lambda k: jax.random.fold_in(k, t))(keys)
            sampled, logp = draw(logits, step_keys, temperature=temperature)
            forced = row.left > 0
            shown = jnp.take_along_axis(row.pending, jnp.minimum(row.at, env.observation_tokens - 1)[:, None], 1)[:, 0]
            token = jnp.where(row.alive, jnp.where(forced, shown, sampled), pad_id)
            chosen = row.alive & ~forced
            row = _append(row, t, token, logp, chosen)
            return token, _act(env, ends, limit, pad_id, row, token, chosen, width + t)

        def one(t: Array, carry):
            cache, logits, row = carry
            alive = row.alive
            token, row = pick(t, logits, row)
            hidden, cache = policy.extend(
                params, cache, token[:, None], (following + t)[:, None], alive.astype(jnp.int32)[:, None], width + t
            )
            return cache, policy.unembed(params, hidden[:, 0]), row

        cache, logits, row = _loop(one, (cache, logits, start), max_new_tokens - 1, early_exit)
        _, row = pick(jnp.int32(max_new_tokens - 1), logits, row)
        out = _record(row, tokens, positions, segments, following, problem_ids, group_size, pad_id)
        read = experts_of(cache)
        if read is None:
            return out
        gap = max(out.tokens.shape[1] - read.shape[1], 0)  # the last token was not read
        read = jnp.pad(read[:, : out.tokens.shape[1]], ((0, 0), (0, gap), (0, 0)), constant_values=-1)
        return out._replace(extras=out.extras | {EXPERTS: read})

    return rollout


def _loop(one: Callable, carry: Any, last: int, early_exit: bool) -> Any:
    if early_exit:
        _, carry = jax.lax.while_loop(
            lambda c: (c[0] < last) & jnp.any(c[1][2].alive),
            lambda c: (c[0] + 1, one(c[0], c[1])),
            (jnp.int32(0), carry),
        )
        return carry
    return jax.lax.scan(lambda c, t: (one(t, c), None), carry, jnp.arange(last, dtype=jnp.int32))[0]


def _record(row: _Row, prompt, positions, segments, following, problem_ids, group_size: int, pad_id: int):
    def beside(left: Array, right: Array) -> Array:
        return jnp.concatenate([jnp.repeat(left, group_size, axis=0), right], axis=1)

    rows, new = row.tokens.shape
    steps = following[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    there = segments > 0
    turn = beside(jnp.where(there, 0, -1), row.turn_of)
    turns = Turns(turn, row.end, row.taken, row.reward, row.identity, row.done, row.valid)
    return Trajectories(
        tokens=beside(jnp.where(there, prompt, pad_id), row.tokens),
        segment_ids=beside(segments, row.used.astype(jnp.int32)),
        positions=beside(positions, jnp.where(row.used, steps, 0)),
        mask=beside(jnp.zeros(prompt.shape, bool), row.mask),
        sampler_logp=beside(jnp.zeros(prompt.shape, jnp.float32), row.logp),
        truncated=~row.done & row.valid,
        group_ids=jnp.repeat(jnp.arange(prompt.shape[0], dtype=jnp.int32), group_size),
        problem_ids=jnp.repeat(problem_ids.astype(jnp.int32), group_size),
        extras={f"turns/{name}": value for name, value in turns._asdict().items()},
    )


def episode_rewards(answers: PyTree, trajectories: Trajectories) -> Rewards:
    """The ``score`` slot: the sum of an episode's rewards; invalid where the world failed."""
    turns = turns_of(trajectories)
    return Rewards(jnp.sum(turns.reward, axis=1), turns.valid)


def at_ends(values: Float[Array, "B K"], turns: Turns) -> Float[Array, "B T"]:
    """A value of each turn at the last token of its action, 0 elsewhere: per-turn rewards for ``gae_advantages``.

    Actions that were not taken have none.
    """
    rows = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]
    placed = jnp.where(turns.taken, values.astype(jnp.float32), 0.0)
    return jnp.zeros(turns.turn.shape, jnp.float32).at[rows, turns.end].add(placed)


def over_turns(values: Float[Array, "B K"], turns: Turns, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """A value of each turn at every masked token of its action; 0 for an action that was cut before its end."""
    index = jnp.clip(turns.turn, 0, values.shape[1] - 1)
    spread = jnp.take_along_axis(jnp.where(turns.taken, values.astype(jnp.float32), 0.0), index, axis=1)
    return jnp.where(mask & (turns.turn >= 0), spread, 0.0)


def returns_to_go(turns: Turns, *, gamma: float = 1.0) -> Float[Array, "B K"]:
    """``G_k = r_k + gamma G_{k+1}`` over the turns of each episode; 0 where no action was taken."""
    return discounted_returns(turns.reward, turns.taken, gamma=gamma)


def token_spans(trajectories: Trajectories) -> Int[Array, "B T"]:
    """Every token is a span of its own: 1, 2, ..., for losses of spans that share one ratio."""
    shape = trajectories.tokens.shape
    return jnp.broadcast_to(jnp.arange(1, shape[1] + 1, dtype=jnp.int32)[None, :], shape)


def turn_spans(trajectories: Trajectories) -> Int[Array, "B T"]:
    """Every turn is a span; 0 where none is."""
    return turns_of(trajectories).turn + 1


def episode_spans(trajectories: Trajectories) -> Int[Array, "B T"]:
    """The whole row is one span."""
    return jnp.ones_like(trajectories.tokens)


def observations(rows: Trajectories, *, prompt_tokens: int) -> Bool[Array, "B T"]:
    """The tokens behind the prompt that the world wrote: read, and outside the mask."""
    behind = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32) >= prompt_tokens
    return behind[None, :] & (rows.segment_ids > 0) & ~rows.mask


def shown(rows: Trajectories) -> Bool[Array, "B T"]:
    """``observations``, of episodes whose prompt may have any width: what is read before the second action or later."""
    return (turns_of(rows).turn > 0) & (rows.segment_ids > 0) & ~rows.mask


def chosen_only(rows: Trajectories, *, prompt_tokens: int) -> Trajectories:
    """Episodes as they come: what the world says does not train."""
    return rows


def with_observations(rows: Trajectories, *, prompt_tokens: int) -> Trajectories:
    """Episodes whose observations train as if the policy had chosen them: what masking prevents, for ablations.

    The recorded log-probability of an observation is 0, so only a loss anchored at the current policy can use it.
    """
    return rows._replace(mask=rows.mask | observations(rows, prompt_tokens=prompt_tokens))
