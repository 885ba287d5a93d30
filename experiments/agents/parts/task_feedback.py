"""Reinforcement from task feedback (RLTF): of several candidates one is carried out, and it alone trains.

The candidate is the most probable one, or with a falling chance any of them. A stage's ``extras`` hold that chance, a
key for it, and the moments of the rewards so far: see ``make_extras``.

From "OpenAGI: When LLM Meets Domain Experts", arXiv:2304.04370, section 4.3, with its code. Differs from the code in
drawing the candidates (it takes beams), in several tasks a step, and in that a drawn choice is uniform over the
candidates (its draw, made with log-probabilities as weights, prefers the least probable).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages import group, selection
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Batch, Key, Params, Policy, Rewards, TrainState, Trajectories, declared


def above_mean(rewards: Float[Array, " B"], before: Array, after: Array) -> Float[Array, " B"]:
    """``R - b``, ``b`` the mean of the rewards before this step."""
    return rewards - before


def own_reward(rewards: Float[Array, " B"], before: Array, after: Array) -> Float[Array, " B"]:
    """``R``, without a baseline."""
    return rewards


def mean_so_far(rewards: Float[Array, " B"], before: Array, after: Array) -> Float[Array, " B"]:
    """The mean of all rewards, those of this step included, whatever the plan itself earned: the released code."""
    return jnp.broadcast_to(after, rewards.shape)


def make_extras(epsilon: float) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of the stage.

    Args:
      epsilon: the first chance of a drawn choice.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon={epsilon} must lie in [0, 1]")
    return lambda params, key: Explored(shaping.no_moments(), key, jnp.float32(epsilon))._asdict()


def chosen(
    logp: Float[Array, " B"], group_ids: Int[Array, " B"], key: Key, epsilon: Float[Array, ""],
    *, valid: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:  # fmt: skip
    """One candidate of each group: the one of greatest ``logp``, with chance ``epsilon`` any."""
    coin, draw = (jax.random.uniform(jax.random.fold_in(key, k), logp.shape) for k in (0, 1))
    explores = coin[group_ids] < epsilon
    return selection.best_members(jnp.where(explores, draw, logp), group_ids, valid=valid)


class Explored(NamedTuple):
    """Extras of a state: rewards of what was carried out, the key of the next choice, the chance of any candidate."""

    seen: Any  # ``shaping.no_moments``, and what was added
    key: Key
    epsilon: Float[Array, ""]


def make_estimate(
    policy: Policy, credit: Callable[[Array, Array, Array], Array] = above_mean
) -> Callable[[Params, dict[str, Any], Trajectories, Rewards], Batch]:
    """The ``estimate`` slot: only the chosen candidates are in the mask; each counts once (``seq_sum``).

    Args:
      credit: ``(rewards [B], mean before this step, mean after it) -> [B]``.
    """

    def estimate(params, extras, rows, rewards):
        logp = jnp.sum(jnp.where(rows.mask, rows.sampler_logp, 0.0), axis=1)
        seen, key, epsilon = declared(Explored, extras)
        kept = chosen(logp, rows.group_ids, key, epsilon, valid=rewards.valid)
        after = shaping.add_rewards(seen, rewards.value, valid=kept).mean
        values = credit(rewards.value, seen.mean, after)
        make = builders.make_estimate(
            policy, lambda rows, rewards: group.per_token(values, rows.mask), reduction="seq_sum",
            keep=lambda rows, rewards: kept,
        )  # fmt: skip
        return make(params, extras, rows, rewards)

    return estimate


def decay_of(decay: float, steps: int, *, of: int = 60) -> float:
    """The factor of each of ``steps`` that together are as much as ``decay`` at each of ``of`` steps.

    The released code makes 60: six tasks, ten times. What it does at each of them, a longer run does more slowly.

    >>> round(decay_of(0.9, 60), 4), round(decay_of(0.9, 120) ** 2, 4), decay_of(1.0, 200)
    (0.9, 0.9, 1.0)
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay} must lie in [0, 1]")
    return decay ** (of / max(steps, 1))


def make_remember(decay: float) -> Callable[[TrainState, Batch, Trajectories, Rewards], dict[str, Any]]:
    """The ``remember`` slot: rewards of what was carried out, a new key, ``epsilon`` times ``decay``."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay} must lie in [0, 1]")

    def remember(state, batch, rows, rewards):
        seen, key, epsilon = declared(Explored, state.extras)
        seen = shaping.add_rewards(seen, rewards.value, valid=jnp.any(batch.mask, axis=1))
        return state.extras | Explored(seen, jax.random.fold_in(key, 2), epsilon * decay)._asdict()

    return remember
