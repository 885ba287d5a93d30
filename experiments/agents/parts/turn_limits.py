"""How many turns an episode may have, as a function of the training step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.rollout.host.driver import HostEpisodes, Played
from jaxrl_llm.types import Key, TrainState, Trajectories


def staged_turns(step: Int[Array, ""], *, turns: Sequence[int], period: int) -> Int[Array, ""]:
    """ScalingInter: ``h_j`` with ``j = min(step // period, J - 1)`` of the stages ``h_0 .. h_{J-1}``.

    One stage is a fixed horizon. Stages need not grow.

    From "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making through Multi-Turn Reinforcement Learning",
    arXiv:2509.08755, section 3 (ScalingInter-RL). Differs from the paper in that all stages have the same length.

    >>> import jax.numpy as jnp
    >>> [int(staged_turns(jnp.int32(n), turns=(6, 13, 20), period=100)) for n in (0, 99, 100, 250, 10**6)]
    [6, 6, 13, 20, 20]
    """
    if not turns or min(turns) < 1:
        raise ValueError(f"turns={tuple(turns)}: every stage needs a horizon of at least 1")
    if period < 1:
        raise ValueError(f"period={period} must be at least 1 step")
    stage = jnp.minimum(step.astype(jnp.int32) // period, len(turns) - 1)
    return jnp.asarray(list(turns), jnp.int32)[stage]


def scheduled(
    rollout: Callable[..., Trajectories], turns_at: Callable[[Array], Array]
) -> dict[str, Callable[..., Any]]:
    """Slots of ``Online`` for episodes of ``turns_at(step)`` turns at most: one program for all horizons.

    An episode that is cut keeps what reward it has. Measurements do not go through these slots: they allow all turns.

    Args:
      rollout: of ``multi_turn.make_episodes``, whose ``max_turns`` is the longest horizon.
    """

    def actor(state: TrainState) -> dict[str, Any]:
        return {"params": state.params, "turns": turns_at(state.step)}

    def limited(acting: dict[str, Any], tokens: Array, valid: Array, keys: Array, problem_ids: Array) -> Trajectories:
        return rollout(acting["params"], tokens, valid, keys, problem_ids, acting["turns"])

    return {"actor": actor, "rollout": limited}


def on_host(world: HostEpisodes) -> HostEpisodes:
    """A world in Python for a method with the slots of ``scheduled``: its horizon comes with the acting parameters."""

    def play(acting: dict[str, Any], tokens: Array, valid: Array, keys: Key, problem_ids: Array) -> Played:
        return world.play(acting["params"], tokens, valid, keys, problem_ids, int(acting["turns"]))

    return HostEpisodes(play, world.compiled)
