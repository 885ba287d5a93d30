"""Arenas: a world of turns, a decoder made on the spot, a base that imitates a scripted behaviour, a measurement.

Everything is compiled, so that all arms and seeds of an experiment over episodes take minutes. A behaviour is a
function ``behave(state, key) -> action [A]`` of one state of the world.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.advantages.turns import gigpo_advantages, moved
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn, swapped_weights
from jaxrl_llm.train import offline, seed_axis
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.types import Key, Params, Policy, Problems, Rewards, TokenTerms, Trajectories


# compared by identity: an arena is made once, and caches of what is built on it find it by itself
@dataclasses.dataclass(frozen=True, eq=False)
class Arena:
    """A world of episodes with tasks that are trained on and tasks that are not."""

    policy: Policy
    env: multi_turn.Env
    train: Problems
    heldout: Problems
    turns: int  # at most, in one episode
    behave: Callable[[Any, Key], Array]
    end_ids: tuple[int, ...] = ()  # tokens that end an action before it has full length

    @property
    def new_tokens(self) -> int:
        """Columns after the prompt that always suffice."""
        return self.turns * (self.env.action_tokens + self.env.observation_tokens)


def skilled(
    expert: Callable[[Any], Array], anything: Callable[[Key], Array], skill: float
) -> Callable[[Any, Key], Array]:
    """A behaviour that acts as the expert with the chance ``skill``, and else does anything."""

    def behave(state: Any, key: Key) -> Array:
        wise, other = jax.random.split(key)
        return jnp.where(jax.random.uniform(wise) < skill, expert(state), anything(other)).astype(jnp.int32)

    return behave


class Place(NamedTuple):
    """What is left of an arena where the world is in Python: a policy and the tasks that it trains on."""

    policy: Policy
    train: Problems


def shortened(arena: Arena, turns: int) -> Arena:
    """The same world and decoder with episodes of ``turns`` turns at most.

    Raises:
      UserError: for more turns than the decoder has room for.
    """
    if not 1 <= turns <= arena.turns:
        raise UserError(f"--turns {turns} must lie in [1, {arena.turns}], the turns that this world has room for")
    # the same arena where nothing changes, so that what was made for it is found again
    return arena if turns == arena.turns else dataclasses.replace(arena, turns=turns)


def make_rollout(arena: Arena, problems: Problems, *, group_size: int, temperature: float = 1.0):
    """Episodes of tasks of one table, in the form that is fast for many seeds (see ``train.seed_axis``)."""
    return multi_turn.make_episodes(
        arena.policy, arena.env, problems.answers, group_size=group_size, max_turns=arena.turns,
        max_new_tokens=arena.new_tokens, end_ids=arena.end_ids, temperature=temperature, early_exit=seed_axis.in_turn(),
    )  # fmt: skip


def swapping_actor(arena: Arena, *, lag: int, group_size: int) -> dict[str, Callable]:
    """Slots of ``Online``: weights are swapped while episodes run, from those of ``lag`` updates ago to the newest.

    They change after equal numbers of columns, so that a long episode comes from several versions. The rows say of each
    token how old its weights are, see ``rollout.turns.swapped_weights``; the stage's ``extras`` are ``recipes.lagged_extras(lag)``.
    """
    slots, policy = recipes.lagged_actor(lag), arena.policy
    version_of = partial(
        swapped_weights.in_even_parts, first=arena.train.tokens.shape[1], columns=arena.new_tokens, versions=lag + 1
    )
    if lag:
        slots["actor"] = lambda state: state.extras["behaviour"]  # all versions, oldest first
        policy = swapped_weights.swapping_policy(policy, version_of)
    play = make_rollout(dataclasses.replace(arena, policy=policy), arena.train, group_size=group_size)
    return slots | {"rollout": lambda *given: swapped_weights.with_staleness(play(*given), version_of, lag)}


def make_online(
    arena: Arena | Place,
    *,
    estimate: Callable,
    loss: Callable,
    tx,
    prompts_per_step: int,
    group_size: int,
    **slots: Any,
) -> Online:
    """The ``Online`` of an arena: uniform draws of training tasks, episodes, the world's rewards.

    A ``Place`` brings its ``rollout`` among the slots: ``rollout.host.driver.only_on_host``.
    """
    parts = {
        "policy": arena.policy, "problems": arena.train, "sampler": make_uniform(),
        "prompts_per_step": prompts_per_step, "group_size": group_size, "score": multi_turn.episode_rewards,
    }  # fmt: skip
    if "rollout" not in slots:  # a world in Python is no program
        parts["rollout"] = make_rollout(arena, arena.train, group_size=group_size)
    if isinstance(arena, Arena):
        parts["whole_batch"] = "its world is embedded and small"
    return Online(**parts | {"estimate": estimate, "loss": loss, "tx": tx} | slots)


def make_grpo(
    arena: Arena | Place,
    settings: Any,
    *,
    advantages: Callable[..., Array] = builders.per_response(group_normalized_advantages),
    kl_weight: float | None = None,
    trained: Callable[[Trajectories], Trajectories] = lambda rows: rows,
    row_extras: Callable[..., dict[str, Array]] | None = None,
    diagnostics: Callable[..., dict[str, Array]] | None = None,
    **slots: Any,
) -> Online:
    """GRPO on whole episodes: advantages normalised in the group, clipped ratios, Adam; ``slots`` replace any part.

    Args:
      settings: ``learning_rate``, ``prompts_per_step`` and ``group_size``.
      advantages: ``(rows, rewards) -> [B, T]``, as ``row_extras`` and ``diagnostics`` those of ``train.methods.builders``.
      kl_weight: of k3 to the policy in the stage's ``extras``, see ``toys.keep_reference``; None: no reference.
      trained: the rows as the loss shall see them, for example with another mask.
    """
    policy, against = arena.policy, {} if kl_weight is None else {"reference": lambda extras: extras["reference"]}
    whole = builders.make_estimate(policy, advantages, row_extras=row_extras, **against)

    def divergence(logp, entropy, batch):
        return kl_weight * kl.k3_gradient_terms(logp, batch.ref_logp, batch.mask)

    extra_terms = None if kl_weight is None else divergence
    parts = {
        "estimate": lambda params, extras, rows, rewards: whole(params, extras, trained(rows), rewards),
        "loss": builders.make_policy_loss(
            policy, clipped_policy_loss, extra_terms=extra_terms, diagnostics=diagnostics
        ),
        "tx": optax.adam(settings.learning_rate),
        "prompts_per_step": settings.prompts_per_step,
        "group_size": settings.group_size,
    }
    return make_online(arena, **parts | slots)


def by_situation(rows: Trajectories, rewards: Rewards, *, gamma: float, anchor: Any = None, **weights: Any) -> Array:
    """GiGPO's advantages of tokens: each turn among those of its group that began in the same situation.

    Args:
      gamma: of the returns of turns.
      anchor: ``(turns) -> [B, K]``: what makes two situations the same; by default the identity that the world gives.
      weights: of ``advantages.turns.gigpo_advantages``.
    """
    found = multi_turn.turns_of(rows)
    counted = found.taken & rewards.valid[:, None]
    returns = multi_turn.returns_to_go(found, gamma=gamma)
    same = found.identity if anchor is None else anchor(found)
    values = gigpo_advantages(rewards.value, returns, same, rows.group_ids, counted, **weights)
    return multi_turn.over_turns(values, found, rows.mask)


def make_ppo(
    arena: Arena | Place,
    settings: Any,
    *,
    group_size: int = 1,
    token_rewards: Callable[..., Array] | None = None,
    token_loss: Callable[..., TokenTerms] = clipped_policy_loss,
    reduction: str = "token_mean",
    **slots: Any,
) -> Online:
    """PPO on whole episodes: GAE over a value head, clipped ratios and values, Adam; ``slots`` replace any part.

    The parameters are those of ``make_valued_base``.

    Args:
      settings: ``learning_rate`` and ``prompts_per_step``.
      group_size: episodes of a task; a critic needs no more than one.
      token_rewards, token_loss, reduction: as in ``train.methods.actor_critic``; no rewards: the outcome at the last token.
    """
    parts = {
        "estimate": actor_critic.make_value_estimate(arena.policy, token_rewards=token_rewards, reduction=reduction),
        "loss": actor_critic.make_actor_critic_loss(arena.policy, token_loss=token_loss, reduction=reduction),
        "tx": optax.adam(settings.learning_rate),
        "prompts_per_step": settings.prompts_per_step,
        "group_size": group_size,
        "actor": recipes.model_of,
    }
    return make_online(arena, **parts | slots)


def make_heldout(arena: Arena, *, samples: int, part: str = "") -> Callable[[Params, Key], Trajectories]:
    """``(params, key) -> episodes``: ``samples`` of every held-out task, side by side.

    Args:
      part: where the policy lies in the parameters, if they hold more.
    """
    held = arena.heldout
    rollout = make_rollout(arena, held, group_size=samples)

    def episodes_of(params, key):
        ids = jnp.arange(held.tokens.shape[0], dtype=jnp.int32)
        model = params[part] if part else params
        return rollout(model, held.tokens, held.valid, sample_keys(key, 0, ids, samples), ids)

    return episodes_of


def play(arena: Arena, key: Key, rows: int) -> Trajectories:
    """``rows`` episodes of training tasks played by the behaviour."""
    env, problems = arena.env, arena.train
    ends = jnp.asarray(arena.end_ids, jnp.int32)
    ids = jax.random.randint(key, (rows,), 0, problems.tokens.shape[0], jnp.int32)

    def one(key: Key, task: Any):
        def turn(carry, k):
            state, alive = carry
            action = arena.behave(state, jax.random.fold_in(key, k + 1)).astype(jnp.int32)
            ended = jnp.any(action[:, None] == ends[None, :], axis=1).astype(jnp.int32)
            acted = jnp.cumsum(ended) - ended == 0  # up to the first end token
            answer = env.step(state, action, jnp.sum(acted.astype(jnp.int32)))
            shown = jnp.arange(env.observation_tokens, dtype=jnp.int32) < answer.count
            tokens = jnp.concatenate([action, answer.tokens.astype(jnp.int32)])
            used = jnp.concatenate([acted & alive, shown & alive & ~answer.done])
            return (answer.state, alive & ~answer.done), (tokens, used)

        start = env.reset(jax.random.fold_in(key, 0), task), jnp.ones((), bool)
        (_, unfinished), (tokens, used) = jax.lax.scan(turn, start, jnp.arange(arena.turns, dtype=jnp.int32))
        acting = jnp.arange(tokens.shape[1], dtype=jnp.int32) < env.action_tokens
        acting = jnp.broadcast_to(acting[None, :], tokens.shape).reshape(-1)
        # what was not said leaves no gap
        order = jnp.argsort(~used.reshape(-1), stable=True)
        return tokens.reshape(-1)[order], used.reshape(-1)[order], acting[order], unfinished

    keys = jax.random.split(jax.random.fold_in(key, 1), rows)
    tokens, used, acting, unfinished = jax.vmap(one)(keys, jax.tree.map(lambda x: x[ids], problems.answers))
    prompts, there = problems.tokens[ids], problems.valid[ids]
    used = jnp.concatenate([there, used], axis=1)
    mask = jnp.concatenate([jnp.zeros_like(there), acting], axis=1)
    count = jnp.cumsum(used.astype(jnp.int32), axis=1)
    return Trajectories(
        tokens=jnp.where(used, jnp.concatenate([prompts, tokens], axis=1), 0),
        segment_ids=used.astype(jnp.int32),
        positions=jnp.where(used, count - 1, 0),
        mask=mask & used,
        sampler_logp=jnp.zeros(mask.shape, jnp.float32),
        truncated=unfinished,
        group_ids=jnp.arange(rows, dtype=jnp.int32),
        problem_ids=ids,
    )


@lru_cache(maxsize=16)
def make_base(
    arena: Arena,
    *,
    steps: int,
    table: int = 1024,
    rows_per_step: int = 64,
    learning_rate: float = 3e-3,
    played: Callable[[Arena, Key, int], Trajectories] = play,
) -> Callable[[Key], Params]:
    """The ``init`` of a plan: a decoder that imitates the behaviour's actions. Every arm starts from it.

    Args:
      played: the episodes to imitate, ``table`` of them.
    """

    def loss(params, extras, rows):
        logp, _ = score_tokens(arena.policy, params, rows)
        value = -reduce.tokens(jnp.where(rows.mask, logp, 0.0), rows.mask)
        return value, {"tokens/trained": jnp.sum(rows.mask.astype(jnp.float32))}

    method = Offline(lambda extras: extras["rows"], make_uniform(), rows_per_step, loss, optax.adam(learning_rate))

    def init(key):
        first, data, run = jax.random.split(key, 3)
        state = offline.init_state(method, arena.policy.init(first), run, extras={"rows": played(arena, data, table)})
        return offline.scan_steps(method, state, steps)[0].params

    return init


def with_value(params: Params, key: Key) -> Params:
    """``{"model": params, "value": head that says 0}``: what trains with a critic."""
    width = jax.tree.leaves(params["final_norm"])[0].shape[0]
    return {"model": params, "value": heads.init_head(width, jax.random.fold_in(key, 8), scale=0.0)}


@lru_cache(maxsize=16)
def make_valued_base(arena: Arena, *, steps: int) -> Callable[[Key], Params]:
    """``with_value`` of a base: the ``init`` of a plan that trains with a critic."""
    base = make_base(arena, steps=steps)
    return lambda key: with_value(base(key), key)


@lru_cache(maxsize=16)
def make_measure(
    arena: Arena,
    *,
    samples: int,
    part: str = "",
    more: Callable[[Trajectories, Rewards], dict[str, Array]] | None = None,
) -> Callable[[Params, Key], dict[str, Array]]:
    """``samples`` episodes of every held-out task: the share that succeeds, their turns, reward, distinct situations.

    ``eval/turns`` counts those of successes; ``eval/revisits`` is the share of turns in a situation seen before,
    ``eval/moved`` that of turns which changed it.

    Args:
      part: where the policy lies in the parameters, if they hold more.
      more: further figures of the same episodes; a module-level function, so that arms share the program.
    """
    heldout = make_heldout(arena, samples=samples, part=part)

    def measure(params, key):
        rows = heldout(params, key)
        found = figures(rows)
        return found if more is None else found | more(rows, multi_turn.episode_rewards({}, rows))

    return measure


def figures(rows: Trajectories, *, enough: float = 0.5) -> dict[str, Array]:
    """What ``make_measure`` says of episodes; those that are over with a reward above ``enough`` succeed."""
    turns, rewards = multi_turn.turns_of(rows), multi_turn.episode_rewards({}, rows)
    taken = turns.taken
    count = jnp.sum(taken.astype(jnp.float32), axis=1)
    success = rewards.valid & turns.done & (rewards.value > enough)
    same = turns.identity[:, :, None] == turns.identity[:, None, :]
    index = jnp.arange(taken.shape[1], dtype=jnp.int32)
    seen = jnp.any(same & (index[:, None] > index[None, :])[None], axis=2)
    return {
        "eval/success": reduce.scalars(success.astype(jnp.float32), rewards.valid),
        "eval/turns": reduce.scalars(count, success),
        "eval/reward": reduce.scalars(rewards.value, rewards.valid),
        "eval/revisits": reduce.scalars(seen.astype(jnp.float32).reshape(-1), taken.reshape(-1)),
        "eval/moved": reduce.scalars(moved(turns.identity, taken).astype(jnp.float32).reshape(-1), taken.reshape(-1)),
    }


def answer_chances(arena: Arena, params: Params, rows: Trajectories, answers: Int[Array, " B"]) -> Float[Array, "B K"]:
    """The probability of one token, the right answer, before each action of one token; 0 where none was taken."""
    hidden = arena.policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    turns = multi_turn.turns_of(rows)
    before = jnp.maximum(turns.end - 1, 0)[:, :, None]
    logp = jax.nn.log_softmax(arena.policy.unembed(params, jnp.take_along_axis(hidden, before, axis=1)), axis=2)
    index = jnp.broadcast_to(answers[:, None, None], before.shape)
    chance = jnp.exp(jnp.take_along_axis(logp, index, axis=2)[:, :, 0])
    return jax.lax.stop_gradient(jnp.where(turns.taken, chance, 0.0))
