"""Methods over whole episodes of turns: GRPO, PPO with a critic, advantages of turns, and how episodes fared.

What is trained on is a ``Setup`` of a policy and the tasks of an env in Python, or an embedded env that brings its
compiled rollout (``experiments.agents.parts.arena.Arena``): anything with ``policy``, ``train`` and ``slots``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.advantages.turns import gigpo_advantages, moved
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import keep_reference, no_extras, referred
from jaxrl_llm.types import Key, Params, Policy, Problems, Rewards, TokenTerms, Trajectories


@runtime_checkable
class EpisodeTasks(Protocol):
    """What the methods need of what they train on."""

    policy: Policy
    train: Problems

    def slots(self, group_size: int) -> dict[str, Any]:
        """Slots of ``Online`` that come with the env, its rollout among them where it is compiled."""
        ...


class HostTasks(NamedTuple):
    """A policy and the tasks of an env in Python, whose rollout is given as a slot."""

    policy: Policy
    train: Problems

    def slots(self, group_size: int) -> dict[str, Any]:
        """Shuffled epochs of the tasks; ``rollout.host.driver.only_on_host`` stands for the rollout."""
        return {"sampler": make_epochs(None)}


def learned_from_episodes(
    tasks: EpisodeTasks,
    *,
    estimate: Callable,
    loss: Callable,
    tx,
    prompts_per_step: int,
    group_size: int,
    **slots: Any,
) -> Online:
    """The ``Online`` of episodes: draws of training tasks (uniform, unless they say otherwise), the env's rewards.

    ``HostTasks`` bring its ``rollout`` among the slots: ``rollout.host.driver.only_on_host``.
    """
    parts = {
        "policy": tasks.policy, "problems": tasks.train, "sampler": make_uniform(),
        "prompts_per_step": prompts_per_step, "group_size": group_size, "score": multi_turn.episode_rewards,
    }  # fmt: skip
    return Online(**parts | tasks.slots(group_size) | {"estimate": estimate, "loss": loss, "tx": tx} | slots)


def make_grpo(
    tasks: EpisodeTasks,
    settings: Any,
    *,
    advantages: Callable[..., Array] = builders.per_response(group_normalized_advantages),
    kl_weight: float = 0.0,
    trained: Callable[[Trajectories], Trajectories] = lambda rows: rows,
    row_extras: Callable[..., dict[str, Array]] | None = None,
    diagnostics: Callable[..., dict[str, Array]] | None = None,
    **slots: Any,
) -> Online:
    """GRPO on whole episodes: advantages normalised in the group, clipped ratios, Adam; ``slots`` replace any part.

    Args:
      settings: ``learning_rate``, ``prompts_per_step`` and ``group_size``.
      advantages: ``(rows, rewards) -> [B, T]``, as ``row_extras`` and ``diagnostics`` those of ``builders``.
      kl_weight: of k3 to the policy in the stage's ``extras``, see ``reference_for``; 0: no reference.
      trained: the rows as the loss shall see them, for example with another mask.
    """
    policy = tasks.policy
    whole = builders.make_estimate(policy, advantages, row_extras=row_extras, **against(kl_weight))
    parts = {
        "estimate": lambda params, extras, rows, rewards: whole(params, extras, trained(rows), rewards),
        "loss": builders.make_policy_loss(
            policy, clipped_policy_loss, extra_terms=divergence(kl_weight), diagnostics=diagnostics
        ),
        "tx": optax.adam(settings.learning_rate),
        "prompts_per_step": settings.prompts_per_step,
        "group_size": settings.group_size,
    }
    return learned_from_episodes(tasks, **parts | slots)


def reference_for(kl_weight: float) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of a stage of ``make_grpo``: the policy that it begins with, where that is its reference."""
    return keep_reference if kl_weight else no_extras


def against(kl_weight: float) -> dict[str, Any]:
    """What ``builders.make_estimate`` needs for a KL to the policy in a stage's ``extras``; 0: nothing."""
    return {"reference": referred} if kl_weight else {}


def divergence(kl_weight: float) -> Callable[..., Array] | None:
    """The ``extra_terms`` of ``builders.make_policy_loss`` for it: k3 with a gradient; 0: none."""

    def terms(logp, entropy, batch):
        return kl_weight * kl.k3_gradient_terms(logp, batch.ref_logp, batch.mask)

    return terms if kl_weight else None


def by_situation(rows: Trajectories, rewards: Rewards, *, gamma: float, anchor: Any = None, **weights: Any) -> Array:
    """GiGPO's advantages of tokens: each turn among those of its group that began in the same situation.

    Args:
      gamma: of the returns of turns.
      anchor: ``(rows) -> [B, K]``: what makes two situations the same; by default the identity that the world gives.
      weights: of ``advantages.turns.gigpo_advantages``.
    """
    found = multi_turn.turns_of(rows)
    counted = found.taken & rewards.valid[:, None]
    returns = multi_turn.returns_to_go(found, gamma=gamma)
    same = found.identity if anchor is None else anchor(rows)
    values = gigpo_advantages(rewards.value, returns, same, rows.group_ids, counted, **weights)
    return multi_turn.over_turns(values, found, rows.mask)


def make_ppo(
    tasks: EpisodeTasks,
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
      token_rewards, token_loss, reduction: as in ``actor_critic``; no rewards: the outcome at the last token.
    """
    parts = {
        "estimate": actor_critic.make_value_estimate(tasks.policy, token_rewards=token_rewards, reduction=reduction),
        "loss": actor_critic.make_actor_critic_loss(tasks.policy, token_loss=token_loss, reduction=reduction),
        "tx": optax.adam(settings.learning_rate),
        "prompts_per_step": settings.prompts_per_step,
        "group_size": group_size,
        "actor": actor_critic.model_of,
    }
    return learned_from_episodes(tasks, **parts | slots)


def restrained(kl_weight: float) -> dict[str, Any]:
    """What ``actor_critic.make_value_estimate`` needs for a KL in the reward, see ``model_for``; 0: nothing."""
    return {"reference": lambda params, extras: referred(extras), "kl_weight": kl_weight} if kl_weight else {}


def model_for(kl_weight: float) -> Callable[[Params, Key], dict[str, Any]]:
    """``reference_for`` where the policy is the ``model`` among parameters with heads."""
    return actor_critic.keep_model if kl_weight else no_extras


def with_value(params: Params, key: Key) -> Params:
    """``{"model": params, "value": head that says 0}``: what trains with a critic."""
    width = jax.tree.leaves(params["final_norm"])[0].shape[0]
    return {"model": params, "value": heads.init_head(width, jax.random.fold_in(key, 8), scale=0.0)}


def figures(rows: Trajectories, *, enough: float = 0.5) -> dict[str, Array]:
    """What a measurement says of episodes; those that are over with a reward above ``enough`` succeed."""
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
