"""One iteration of an online method, in two halves that the fused and the host loop share.

``begin`` draws prompts and rolls out; the rewards come from a jittable scorer (fused) or from the host; ``finish``
estimates advantages, updates, and tells the curriculum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.models.mlp import load_figures
from jaxrl_llm.rollout import rollout_cost
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.packing import LAYOUT, Layout
from jaxrl_llm.train.step import chosen, make_update, numbered, trained_part
from jaxrl_llm.types import Batch, Key, Metrics, Params, Policy, Problems, Rewards, Sampler, TrainState, Trajectories


def current_params(state: TrainState) -> Params:
    """On-policy: the weights that train are the weights that sample."""
    return state.params


def model_part(params: Params) -> Params:
    """The model's own weights, of parameters that may hold heads beside it (``{"model": ..., ...}``)."""
    return params["model"] if isinstance(params, dict) and "model" in params else params


class Online(NamedTuple):
    """The slots of an online method; every one is a function or a number that the experiment chose."""

    policy: Policy
    problems: Problems
    sampler: Sampler
    prompts_per_step: int
    group_size: int
    rollout: Callable[..., Trajectories]  # (params, prompt_tokens, prompt_valid, keys, problem_ids)
    score: Callable[..., Rewards]  # (answers of the rows, trajectories)
    estimate: Callable[..., Batch]  # (params, extras, trajectories, rewards)
    loss: Callable[..., tuple[Array, Metrics]]  # (params, batch)
    tx: optax.GradientTransformation
    microbatches: int = 1
    updates_per_rollout: int = 1
    max_grad_norm: float | None = 1.0
    ema_decay: float | None = None
    # whose samples train: the policy itself, or for example a stale copy in the state's extras
    actor: Callable[[TrainState], Params] = current_params
    # (state after the updates, batch, trajectories, rewards) -> its new extras: memories, averages, stale copies
    remember: Callable[..., dict[str, Any]] | None = None
    trained: str = ""  # the part of the parameters that trains, see ``train.step.make_update``
    # (batch, metrics of its update) -> further ones of the whole batch; those of a loss are token means of its parts
    figures: Callable[[Batch, Metrics], Metrics] | None = None
    whole_batch: str = ""  # why the losses of parts of a batch, each of whole groups, do not add up; empty: they do
    minibatches: int = 1  # parts of random rows, an update each; ``updates_per_rollout`` times all of them
    # mask [B, T] -> what the loss of a mini-batch divides by, for example ``reduce.denominator``; in place of ``total``
    divisor: Callable[[Array], Array] | None = None
    # (metrics of an update) -> bool: the update is not made, nor any other on this rollout
    enough: Callable[[Metrics], Array] | None = None
    # how names of metrics begin that are those of the first of several updates on whole batches, before which the
    # policy is the one that the rollout is from; empty: all are of all updates
    of_first: str | tuple[str, ...] = ""
    policy_params: Callable[[Params], Params] = model_part  # what ``policy`` reads of the parameters that train


class Drawn(NamedTuple):
    """What ``begin`` hands to the scorer and to ``finish``."""

    ids: Int[Array, " P"]
    sampler: Any
    trajectories: Trajectories
    figures: dict[str, float] = {}  # of a rollout on the host: how it went


class Prompted(NamedTuple):
    """What a rollout needs beside the parameters, and the curriculum after the draw."""

    ids: Int[Array, " P"]
    sampler: Any
    tokens: Int[Array, "P L"]
    valid: Bool[Array, "P L"]
    keys: Key  # one per sequence


def init_state(online: Online, params: Params, key: Key, *, extras: dict[str, Any] | None = None) -> TrainState:
    """The state before the first iteration; the parameters are not copied."""
    return TrainState(
        params=params,
        opt_state=online.tx.init(trained_part(params, online.trained)),
        step=jnp.zeros((), jnp.int32),
        key=key,
        sampler=online.sampler.init(online.problems.tokens.shape[0]),
        extras=dict(extras or {}),
    )


def draw(online: Online, sampler: Any, key: Key, step: Int[Array, ""]) -> tuple[Int[Array, " P"], Any]:
    """The prompts of a step, and the curriculum after the draw."""
    # the curriculum's own key; sample_keys folds (step, prompt, sample) and so never repeats it
    draw_key = jax.random.fold_in(jax.random.fold_in(key, 0x5A3D), step)
    return online.sampler.draw(sampler, draw_key, online.prompts_per_step)


def _rows(online: Online, key: Key, step: Int[Array, ""], ids: Int[Array, " Q"]) -> tuple[Array, Array, Key]:
    """Tokens of prompts, which of them are real, and the keys of a group of responses to each."""
    keys = sample_keys(key, step, ids, online.group_size)
    return online.problems.tokens[ids], online.problems.valid[ids], keys


def prompted(online: Online, state: TrainState) -> Prompted:
    """Draws prompts from the curriculum, and the keys of a group of responses to each."""
    ids, sampler = draw(online, state.sampler, state.key, state.step)
    return Prompted(ids, sampler, *_rows(online, state.key, state.step, ids))


def roll(online: Online, params: Params, key: Key, step: Int[Array, ""], ids: Int[Array, " Q"]) -> Trajectories:
    """A group of responses to each prompt, of all prompts of a step or of some."""
    return online.rollout(params, *_rows(online, key, step, ids), ids)


def begin(online: Online, state: TrainState) -> Drawn:
    """Draws prompts from the curriculum and samples a group of responses to each."""
    ids, sampler, tokens, valid, keys = prompted(online, state)
    return Drawn(ids, sampler, online.rollout(online.actor(state), tokens, valid, keys, ids))


def answers_of(online: Online, trajectories: Trajectories) -> Any:
    """The answers that belong to each row of a rollout."""
    return jax.tree.map(lambda x: x[trajectories.problem_ids], online.problems.answers)


def finish(online: Online, state: TrainState, drawn: Drawn, rewards: Rewards) -> tuple[TrainState, Metrics]:
    """Advantages, updates and the curriculum's lesson; advances the step counter."""
    return learn(online, state, drawn, rewards, estimated(online, state, drawn.trajectories, rewards))


def estimated(online: Online, state: TrainState, trajectories: Trajectories, rewards: Rewards) -> Batch:
    """The batch of an update."""
    # where functions of others meet: a column [B, 1] of rewards would broadcast against the rows and train on noise
    chex.assert_shape((rewards.value, rewards.valid), (online.prompts_per_step * online.group_size,))
    chex.assert_equal_shape((trajectories.tokens, trajectories.mask))
    return online.estimate(state.params, state.extras, trajectories, rewards)


def learn(
    online: Online, state: TrainState, drawn: Drawn, rewards: Rewards, batch: Batch, layout: Layout | None = None
) -> tuple[TrainState, Metrics]:
    """Updates on a batch and the curriculum's lesson; advances the step counter.

    Args:
      layout: in which the rows of the batch are computed; its parts are those of the update. None: as they stand.
    """
    trajectories = drawn.trajectories
    rows = batch if layout is None else batch._replace(extras=batch.extras | {LAYOUT: layout})
    update = make_update(
        online.loss,
        online.tx,
        microbatches=online.microbatches,
        max_grad_norm=online.max_grad_norm,
        ema_decay=online.ema_decay,
        trained=online.trained,
    )
    if online.minibatches > 1 or online.enough is not None:
        state, metrics = several(online, update, state, rows)
    elif online.updates_per_rollout == 1:
        state, metrics = update(state, rows)
    else:
        state, stacked = jax.lax.scan(lambda s, _: update(s, rows), state, None, online.updates_per_rollout)
        metrics = {k: jnp.max(x, axis=0) if k.endswith("_max") else jnp.mean(x, axis=0) for k, x in stacked.items()}
        if online.of_first:
            metrics |= {k: x[0] for k, x in stacked.items() if k.startswith(online.of_first)}
    values, valid = _prompt_means(online, rewards)
    sampler = online.sampler.update(drawn.sampler, drawn.ids, values, valid)
    more = {} if online.figures is None else online.figures(batch, metrics)
    metrics = metrics | more | rollout_metrics(trajectories, rewards)
    if EXPERTS in trajectories.extras:
        valid = trajectories.segment_ids > 0
        metrics |= load_figures(trajectories.extras[EXPERTS], valid, online.policy.experts)
    state = state._replace(step=state.step + 1, sampler=sampler)
    if online.remember is not None:
        state = state._replace(extras=online.remember(state, batch, trajectories, rewards))
    return state, metrics


def several(online: Online, update: Callable[..., Any], state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Updates on mini-batches of random rows, drawn anew for every pass over the batch, until one finds ``enough``.

    That one is not made, nor those behind it. Metrics are means over the updates that were looked at;
    ``update/made`` is the share of all that were made.

    Raises:
      ValueError: for mini-batches that do not divide the rows, or without a ``divisor``.
    """
    rows, parts = batch.mask.shape[0], online.minibatches
    if rows % parts:
        raise ValueError(f"minibatches={parts} does not divide the batch of {rows} rows; choose a divisor")
    if parts > 1 and online.divisor is None:
        raise ValueError(f"minibatches={parts} needs divisor=, what the loss of a mini-batch divides by")
    key = jax.random.fold_in(jax.random.fold_in(state.key, 0x4B19), state.step)

    def part_of(k: Array) -> Batch:
        if parts == 1:
            return batch
        order = jax.random.permutation(jax.random.fold_in(key, k // parts), rows).reshape(parts, rows // parts)
        part = jax.tree.map(lambda x: x if x.ndim == 0 else x[order[k % parts]], batch)
        return part._replace(group_ids=numbered(part.group_ids), total=online.divisor(part.mask))

    def one(state: TrainState, k: Array) -> tuple[TrainState, Metrics, Array]:
        new, metrics = update(state, part_of(k))
        over = jnp.zeros((), bool) if online.enough is None else online.enough(metrics)
        kept = {
            name: chosen(~over, getattr(new, name), getattr(state, name)) for name in ("params", "opt_state", "extras")
        }
        return state._replace(**kept), metrics, over

    def step(carry: tuple[TrainState, Array], k: Array) -> Any:
        state, over = carry
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, state, k)[1])
        state, metrics, ends = jax.lax.cond(over, lambda: (state, nothing, over), lambda: one(state, k))
        return (state, over | ends), (metrics, ~over, ~(over | ends))

    count = online.updates_per_rollout * parts
    carry = (state, jnp.zeros((), bool))
    (state, _), (stacked, seen, made) = jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    share = seen.astype(jnp.float32) / jnp.maximum(jnp.sum(seen.astype(jnp.float32)), 1.0)
    metrics = {k: jnp.max(x) if k.endswith("_max") else jnp.sum(share * x) for k, x in stacked.items()}
    return state, metrics | {"update/made": jnp.mean(made.astype(jnp.float32))}


def _prompt_means(online: Online, rewards: Rewards) -> tuple[Array, Array]:
    value = rewards.value.reshape(online.prompts_per_step, online.group_size)
    # one score that is no number must not stay in a curriculum for good
    valid = (rewards.valid & jnp.isfinite(rewards.value)).reshape(value.shape)
    count = jnp.sum(valid.astype(jnp.float32), axis=1)
    return jnp.sum(jnp.where(valid, value, 0.0), axis=1) / jnp.maximum(count, 1.0), count > 0


def rollout_metrics(trajectories: Trajectories, rewards: Rewards) -> Metrics:
    """Length, reward and group figures with the names that every online run uses.

    ``rollouts/generated`` is there where the rows do not show what they cost, see ``rollout.rollout_cost``; a figure
    ``reward/NAME`` of each of several rewards.
    """
    spent = trajectories.extras
    lengths = reduce.sequences(jnp.ones(trajectories.mask.shape, jnp.float32), trajectories.mask)
    right = rewards.valid & (rewards.value > 0.5)
    wrong = rewards.valid & (rewards.value <= 0.5)
    spread = group.group_spread(rewards.value, trajectories.group_ids, valid=rewards.valid)
    drawn = {"rollouts/generated": jnp.sum(spent[rollout_cost.RESPONSES])} if rollout_cost.RESPONSES in spent else {}
    parts = {f"reward/{name}": reduce.scalars(x, rewards.valid & jnp.isfinite(x))
             for name, x in (rewards.parts or {}).items()}  # fmt: skip
    return (
        drawn
        | parts
        | {
            "reward/mean": reduce.scalars(rewards.value, rewards.valid),
            "reward/valid_fraction": reduce.scalars(rewards.valid.astype(jnp.float32)),
            "length/mean_tokens": reduce.scalars(lengths),
            "length/right_tokens": reduce.scalars(lengths, right),
            "length/wrong_tokens": reduce.scalars(lengths, wrong),
            "length/truncated_fraction": reduce.scalars(trajectories.truncated.astype(jnp.float32)),
            "group/degenerate_fraction": reduce.scalars((spread <= 0).astype(jnp.float32)),
            "tokens/generated": jnp.sum(spent.get(rollout_cost.TOKENS, lengths)),
        }
    )


def iterate(online: Online, state: TrainState) -> tuple[TrainState, Metrics]:
    """A whole iteration with a jittable scorer."""
    drawn = begin(online, state)
    rewards = online.score(answers_of(online, drawn.trajectories), drawn.trajectories)
    return finish(online, state, drawn, rewards)
