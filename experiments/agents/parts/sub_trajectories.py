"""The ``estimate`` slot for rollouts that summaries cut into several training rows."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.advantages import group
from jaxrl_llm.rollout.turns import contexts
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Batch, Params, Policy, Rewards, Trajectories


def every_rollout(rows: Trajectories, rewards: Rewards) -> Array:
    """All rollouts train."""
    return jnp.ones(rows.truncated.shape, bool)


def finished_rollouts(rows: Trajectories, rewards: Rewards) -> Array:
    """The overlong mask: those that ran out of turns, tokens or summaries before their end do not train.

    Their reward still counts in the mean of the group; where it shall not, make it invalid.
    """
    return ~rows.truncated


def make_split_estimate(
    policy: Policy,
    advantages: Callable[[Array, Array, Array], Array],
    *,
    most: int,
    width: int,
    keep: Callable[[Trajectories, Rewards], Array] = every_rollout,
    **settings: Any,
) -> Callable[[Params, dict[str, Any], Trajectories, Rewards], Batch]:
    """``builders.make_estimate`` with the sub-trajectories of ``rollout.turns.contexts`` as the rows of the batch.

    A rollout in one piece is the same as without: the other rows are padding, and in no sum.

    Differs from "Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management", arXiv:2510.06727,
    in that rollouts that ``keep`` leaves out are in no denominator; there their tokens count in it.

    Args:
      advantages: ``(rewards [B], group_ids [B], present [B, most]) -> [B, most]``, for example
        ``turns.shared_advantages``.
      most: sub-trajectories of a rollout, at most.
      width: columns of the longest, ``contexts.widest``.
      keep: ``(rollouts, rewards) -> bool [B]``: those that enter loss and denominator.
      settings: further ones of ``make_estimate``; what they see are sub-trajectories.
    """

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        parts = contexts.sub_trajectories(rows, most=most, width=width)
        there = contexts.present(parts, most=most) & rewards.valid[:, None]
        values = advantages(rewards.value, rows.group_ids, there).reshape(-1)
        kept = jnp.repeat(keep(rows, rewards), most)
        whole = builders.make_estimate(
            policy,
            lambda parts, judged: group.per_token(values, parts.mask),
            keep=lambda parts, judged: kept,
            **settings,
        )
        judged = Rewards(jnp.repeat(rewards.value, most), jnp.repeat(rewards.valid, most))
        return whole(params, extras, parts, judged)

    return estimate
