"""What one arm of an experiment does: stages of training on the same parameters, and a measurement."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

from jaxrl_llm.rollout.host_episodes import HostEpisodes
from jaxrl_llm.train import offline, online
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.types import Key, Params, Rewards, TrainState, Trajectories


def no_extras(params: Params, key: Key) -> dict[str, Any]:
    """A method that needs nothing beside the policy."""
    return {}


class Stage(NamedTuple):
    """One method for a number of steps; ``extras(params, key)`` makes what its state carries, e.g. the reference."""

    method: Online | Offline
    steps: int
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras


class Plan(NamedTuple):
    """An arm: ``init(key)`` gives the starting parameters of a seed, ``measure(params, key)`` scalar metrics.

    Equal functions are computed (``init``) or compiled (``extras``, ``measure``) once for all arms. Without stages
    nothing is trained: an arm that is only measured.

    With ``on_host`` the rewards come from ``host_score`` in Python, ``measure`` is called as it is, and seeds run one
    after another; else everything is compiled and the seeds are an axis of one program. A ``world`` in Python, on the
    host as well, rolls out in place of the stages' own rollouts.
    """

    init: Callable[[Key], Params]
    stages: tuple[Stage, ...]
    measure: Callable[[Params, Key], dict[str, Array]]
    on_host: bool = False
    host_score: Callable[[Trajectories], Rewards] | None = None
    world: HostEpisodes | None = None


def start(stage: Stage, params: Params, key: Key, extras: dict[str, Any] | None = None) -> TrainState:
    """The state at the beginning of a stage; ``extras`` where they are already made."""
    make = online.init_state if isinstance(stage.method, Online) else offline.init_state
    return make(stage.method, params, key, extras=stage.extras(params, key) if extras is None else extras)


def rollouts(plan: Plan) -> int:
    """Responses generated for training by one seed."""
    return sum(
        s.steps * s.method.prompts_per_step * s.method.group_size for s in plan.stages if isinstance(s.method, Online)
    )


def updates(plan: Plan) -> int:
    """Optimiser steps of one seed."""
    return sum(s.steps * getattr(s.method, "updates_per_rollout", 1) for s in plan.stages)
