"""Rollouts of a fixed token budget an iteration: what has not ended waits in the state and goes on the next time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_llm import reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.rollout import given_responses, rollout_cost
from jaxrl_llm.rollout.generate import go_on
from jaxrl_llm.run.options import sampling_of
from jaxrl_llm.types import Batch, Key, Params, Rewards, TrainState, Trajectories, declared


class Unfinished(NamedTuple):
    """Extras of a state: the rows of the last iteration, and which of them are still to be gone on with."""

    rows: Trajectories
    going: Bool[Array, " B"]


class Written(NamedTuple):
    """Extras of a rollout: the key of each response, and its tokens that this iteration wrote."""

    key: Int[Array, "B W"]
    fresh: Bool[Array, "B T"]


def repeats(tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], *, period: int, times: int) -> Bool[Array, " B"]:
    """Whether a right-padded response ends in ``times`` copies of one block of at most ``period`` tokens.

    From "Kimi k1.5", arXiv:2501.12599, section 2.6.2: repeated sequences are detected and end a response early. Differs
    from the paper in that it does not say how they are detected.

    >>> rows = jnp.array([[7, 1, 2, 1, 2, 1, 2], [7, 1, 2, 1, 2, 1, 0]])
    >>> repeats(rows, jnp.ones(rows.shape, bool), period=2, times=3).tolist()
    [True, False]
    """
    if period < 1 or times < 2:
        raise ValueError(f"period={period} must be at least 1 token, times={times} at least 2 copies")
    length = jnp.sum(valid.astype(jnp.int32), axis=1)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    found = jnp.zeros(length.shape, bool)
    for block in range(1, min(period, tokens.shape[1] // times) + 1):
        before = jnp.pad(tokens, ((0, 0), (block, 0)))[:, : tokens.shape[1]]
        looked = (column >= (length - block * (times - 1))[:, None]) & (column < length[:, None])
        same = jnp.all(~looked | (tokens == before), axis=1)
        found = found | (same & (length >= block * times))
    return found


def left_off(rows: Trajectories, *, new_tokens: int, period: int, times: int) -> Bool[Array, " B"]:
    """Responses that have neither ended nor come to their last token nor begun to repeat themselves."""
    there = (rows.segment_ids > 0)[:, -new_tokens:]
    said = rows.tokens[:, -new_tokens:]
    full = jnp.sum(there.astype(jnp.int32), axis=1) >= new_tokens
    return rows.truncated & ~full & ~repeats(said, there, period=period, times=times)


def of_groups(rows: Bool[Array, " B"], group_size: int) -> Bool[Array, " B"]:
    """Whether any member of a row's group is one of ``rows``."""
    return jnp.repeat(jnp.any(rows.reshape(-1, group_size), axis=1), group_size)


def asked(tokens: Array, valid: Array, ids: Array, *, group_size: int, new_tokens: int, pad_id: int) -> Trajectories:
    """Rows with their prompts and not a token of a response yet."""

    def wide(x: Array, fill: Any) -> Array:
        return jnp.pad(jnp.repeat(x, group_size, axis=0), ((0, 0), (0, new_tokens)), constant_values=fill)

    there = wide(valid, False)
    zeros = jnp.zeros(there.shape, jnp.float32)
    positions = jnp.where(there, jnp.cumsum(there.astype(jnp.int32), axis=1) - 1, 0)
    return Trajectories(
        tokens=wide(jnp.where(valid, tokens, pad_id), pad_id),
        segment_ids=there.astype(jnp.int32),
        positions=positions,
        mask=zeros > 0,
        sampler_logp=zeros,
        truncated=jnp.ones(there.shape[:1], bool),
        group_ids=jnp.repeat(jnp.arange(ids.shape[0], dtype=jnp.int32), group_size),
        problem_ids=jnp.repeat(ids.astype(jnp.int32), group_size),
    )


def make_further(
    policy: Any, *, budget: int, new_tokens: int, pad_id: int, **sampling: Any
) -> Callable[[Params, Trajectories, Key, Array], Trajectories]:
    """``(params, rows, keys, going) -> rows`` with up to ``budget`` tokens more in those that go on.

    Under the same parameters the parts draw what one rollout of ``new_tokens`` draws.

    Args:
      sampling: ``eos_ids``, ``temperature`` and the like, as of ``rollout.generate.go_on``.
    """

    def further(params: Params, rows: Trajectories, keys: Key, going: Array) -> Trajectories:
        real = rows.segment_ids > 0
        tokens, valid = given_responses.left_padded(rows.tokens, real, pad_id=pad_id)
        moved = rows._replace(tokens=tokens, segment_ids=valid.astype(jnp.int32), truncated=going, extras={})
        done = jnp.sum(rows.mask.astype(jnp.int32), axis=1)
        more = go_on(policy, params, moved, keys, done=done, max_new_tokens=budget, pad_id=pad_id, **sampling)
        new = {name: getattr(more, name)[:, -budget:] for name in ("tokens", "mask", "sampler_logp")}
        both, _ = given_responses.joined(rows, rows.mask, more._replace(**new), new_tokens=new_tokens)
        return both._replace(truncated=jnp.where(going, both.truncated, rows.truncated))

    return further


def make_partial_rollout(
    settings: OnlineSettings, found: Bench, *, budget: int, period: int = 8, times: int = 4
) -> tuple[dict[str, Callable], Callable[[Params, Key], dict[str, Any]]]:
    """Slots of ``Online``, and the ``extras`` of its stage, for rollouts in parts of ``budget`` tokens.

    A group with a response that has not ended keeps its place in the batch, in the place of the prompt that was drawn
    there, and does not train; its responses go on under the parameters of the next iteration. It trains when the last
    of them has ended, every token with the log-probability that was recorded when it was drawn.

    From "Kimi k1.5", arXiv:2501.12599, section 2.6.2.

    Args:
      period, times: a response that ends in so many copies of so short a block has ended, see ``repeats``.

    Raises:
      UserError: for a budget beyond a whole response, or sampling that parts cannot have.
    """
    how, size, new = sampling_of(settings), settings.group_size, settings.max_new_tokens
    if not 1 <= budget <= new:
        raise UserError(f"--budget {budget} must be from 1 token to --max-new-tokens {new}, a whole response")
    if how.stop or how.slots or how.few_bits or how.cache_stages > 1 or how.row_stages > 1:
        raise UserError("a rollout in parts has no --stop, --slots, --rollout-weights or stages; drop the flag")
    model, judge = found.model, found.score or found.callback
    pad, eos = model.tokenizer.pad_id, model.tokenizer.eos_ids
    sampled = {name: getattr(how, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    further = make_further(model.policy, budget=budget, new_tokens=new, pad_id=pad, eos_ids=eos, **sampled)
    unended = partial(left_off, new_tokens=new, period=period, times=times)

    def rollout(acting: tuple[Params, Unfinished], tokens: Array, valid: Array, keys: Key, ids: Array) -> Trajectories:
        params, before = acting
        new_ones = asked(tokens, valid, ids, group_size=size, new_tokens=new, pad_id=pad)
        new_ones = new_ones._replace(
            extras=Written(jax.random.key_data(keys).astype(jnp.uint32), new_ones.mask)._asdict()
        )
        held = of_groups(before.going, size)
        rows = jax.tree.map(
            lambda old, new: jnp.where(held.reshape((-1,) + (1,) * (new.ndim - 1)), old, new), before.rows, new_ones
        )
        rows = rows._replace(group_ids=new_ones.group_ids)
        going = jnp.where(held, before.going, True)
        key = declared(Written, rows.extras).key
        now = further(params, rows, jax.random.wrap_key_data(key), going)
        fresh = now.mask & (jnp.cumsum(now.mask.astype(jnp.int32), axis=1) > jnp.sum(rows.mask, axis=1, keepdims=True))
        now = now._replace(extras=Written(key, fresh)._asdict())
        spent = jnp.sum(fresh.astype(jnp.float32), axis=1)
        return rollout_cost.with_cost(now, (~held).astype(jnp.float32), spent)

    def score(answers: Any, rows: Trajectories) -> Rewards:
        rewards = judge(answers, rows)
        return rewards._replace(valid=rewards.valid & ~of_groups(unended(rows), size))

    def remember(state: TrainState, batch: Batch, rows: Trajectories, rewards: Rewards) -> dict[str, Any]:
        kept = rows._replace(extras=declared(Written, rows.extras)._asdict())
        return state.extras | Unfinished(kept, unended(rows))._asdict()

    def extras(params: Params, key: Key) -> dict[str, Any]:
        prompts, width = settings.prompts_per_step, found.train.tokens.shape[1]
        table = jnp.full((prompts, width), pad, jnp.int32), jnp.zeros((prompts, width), bool)
        rows = asked(*table, jnp.zeros((prompts,), jnp.int32), group_size=size, new_tokens=new, pad_id=pad)
        data = jax.random.key_data(jax.random.split(key, prompts * size)).astype(jnp.uint32)
        nobody = jnp.zeros((prompts * size,), bool)
        return Unfinished(rows._replace(extras=Written(data, rows.mask)._asdict()), nobody)._asdict()

    def figures(batch: Batch, metrics: Any) -> dict[str, Array]:
        return {"partial/waiting": reduce.scalars((~jnp.any(batch.mask, axis=1)).astype(jnp.float32))}

    def actor(state: TrainState) -> tuple[Params, Unfinished]:
        return state.params, declared(Unfinished, state.extras)

    slots = {"rollout": rollout, "score": score, "remember": remember, "actor": actor, "figures": figures}
    return slots, extras


def only_fresh(estimate: Callable[..., Batch], *, reduction: str) -> Callable[..., Batch]:
    """An estimate whose batch trains the tokens that this iteration wrote; those of earlier parts are left out."""

    def fresh(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        batch = estimate(params, extras, rows, rewards)
        mask = batch.mask & declared(Written, rows.extras).fresh
        advantages = jnp.where(mask, batch.advantages, 0.0)
        return batch._replace(mask=mask, advantages=advantages, total=reduce.denominator(mask, mode=reduction))

    return fresh
