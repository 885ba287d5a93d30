"""What one arm of an experiment does: stages of training on the same parameters, and a measurement."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.distributed.offload import parked_state
from jaxrl_llm.distributed.rollout_weights import Move
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.driver import HostEpisodes
from jaxrl_llm.train import offline, online
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.step import with_trained
from jaxrl_llm.types import Key, Params, Rewards, TrainState, Trajectories, declared


def no_extras(params: Params, key: Key) -> dict[str, Any]:
    """A method that needs nothing beside the policy."""
    return {}


def as_trained(params: Params, key: Key) -> Params:
    """What training made, unchanged."""
    return params


class Referred(NamedTuple):
    """Extras of a state: the parameters that a policy is compared with."""

    reference: Params


def referred(extras: dict[str, Any]) -> Params:
    """The parameters of the reference, from the state: a ``reference`` slot."""
    return declared(Referred, extras).reference


def reference_of(params: Params, extras: dict[str, Any], part: str = "") -> Params:
    """The reference of a state, of which beside an adapter ``part`` alone is kept: it has the base of the policy."""
    return with_trained(params, referred(extras), part)


def with_whole_reference(params: Params, extras: dict[str, Any], part: str) -> dict[str, Any]:
    """``extras`` with the whole reference in the place of the ``part`` that is kept of it."""
    return extras | Referred(reference_of(params, extras, part))._asdict()


def keep_reference(params: Params, key: Key) -> dict[str, Any]:
    """The ``extras`` of a stage that compares with its own start: ``Referred``, a copy of what is given."""
    return Referred(jax.tree.map(jnp.copy, params))._asdict()


class Tabled(NamedTuple):
    """Extras of a state: the table that minibatches are drawn from."""

    rows: Any


def tabled(extras: dict[str, Any]) -> Any:
    """The table, from the state: the ``rows`` slot of ``Offline``."""
    return declared(Tabled, extras).rows


class Stage(NamedTuple):
    """One method for a number of steps; ``extras(params, key)`` makes what its state carries, e.g. the reference.

    A stage of many cheap steps before the one that a claim is about says with ``eval_every`` how many steps lie at
    least between two measurements in it; 0: as many as the settings say.
    """

    method: Online | Offline
    steps: int
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras
    eval_every: int = 0


class Plan(NamedTuple):
    """An arm: ``init(key)`` gives the starting parameters of a seed, ``measure(params, key)`` scalar metrics.

    Equal functions are computed (``init``) or compiled (``extras``, ``measure``) once for all arms. Without stages
    nothing is trained: an arm that is only measured.

    With ``on_host`` the rewards come from ``host_score`` in Python, ``measure`` is called as it is, and seeds run one
    after another; else everything is compiled and the seeds are an axis of one program. A ``world`` in Python, on the
    host as well, rolls out in place of the stages' own rollouts.

    With ``of_seed`` the programs themselves belong to the seed (its own table of problems, say): the plan is that of
    seed 0, ``of_seed(plan, seed)`` that of another, and seeds run one after another. It changes the plan it is given,
    which may have been changed since it was built.

    A ``staleness`` is how many updates old samples may be, where that is the arm and no choice of the run: above 0 the
    arm needs the asynchronous loop, in which 0 makes its samples fresh beside arms whose samples are not.
    """

    init: Callable[[Key], Params]
    stages: tuple[Stage, ...]
    measure: Callable[[Params, Key], dict[str, Array]]
    on_host: bool = False
    host_score: Callable[[Trajectories], Rewards] | None = None
    world: HostEpisodes | None = None
    move: Move | None = None  # makes the weights of rollouts in a layout of their own, see ``train.host``
    model: Any = None  # the loaded model (``run.parts.Model``) whose policy the parameters are, where there is one
    # ``measure`` in its place while a learning rate is chosen, for methods that train on no rewards of their own:
    # ``reward/mean`` on problems that neither train nor are measured on
    validate: Callable[[Params, Key], dict[str, Array]] | None = None
    # ``finish(params, key)``: what is measured and exported of the trained parameters, for example a merge of models
    finish: Callable[[Params, Key], Params] = as_trained
    # ``exported(params)``: the loaded model and its own weights among finished parameters that hold more, or None; in
    # the place of ``model``
    exported: Callable[[Params], tuple[Any, Params] | None] | None = None
    of_seed: Callable[["Plan", int], "Plan"] | None = None
    staleness: int | None = None
    gives: bool = False  # ``init`` gives parameters that nobody else holds: a single seed trains them, not a copy


class Setup(NamedTuple):
    """What the method of an experiment is given, in an embedded world or in one of files: one wiring serves both.

    ``slots`` is what the online method takes here, ``tables`` what a stage takes that makes a table of its own when it
    begins, ``extras`` those of the online stage where they belong here, ``first`` the stages before those of the
    experiment, ``fields`` the other fields of the plan.
    """

    tasks: Any  # with a policy, for example ``episode_methods.EpisodeTasks``
    init: Callable[[Key], Params]
    measure: Callable[[Params, Key], dict[str, Array]]
    slots: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras
    first: tuple[Stage, ...] = ()
    fields: dict[str, Any] = {}

    def plan(self, *stages: Stage) -> Plan:
        """The stages of the experiment, behind those of the setup."""
        return Plan(self.init, (*self.first, *stages), self.measure, **self.fields)


def setup_of(settings: Any, embedded: Callable[[Any], Setup], own: Callable[[Any], Setup]) -> Setup:
    """``own(settings)`` where the settings name ``data``, else ``embedded(settings)``."""
    return (own if settings.data else embedded)(settings)


def of_seed(plan: Plan, seed: int) -> Plan:
    """The plan as this seed runs it, see ``Plan.of_seed``."""
    return plan if plan.of_seed is None else plan.of_seed(plan, seed)


def finished(plan: Plan, params: Params, key: Key) -> Params:
    """What is measured and exported of these parameters, see ``Plan.finish``.

    Args:
      key: of the measurement.
    """
    return plan.finish(params, jax.random.fold_in(key, 1))


def measured(plan: Plan) -> Callable[[Params, Key], dict[str, Array]]:
    """``(params, key) -> metrics`` of the finished parameters: ``measure`` itself where nothing is finished."""
    if plan.finish is as_trained:
        return plan.measure
    return lambda params, key: plan.measure(finished(plan, params, key), key)


def start(stage: Stage, params: Params, key: Key, extras: dict[str, Any] | None = None) -> TrainState:
    """The state at the beginning of a stage; ``extras`` where they are already made."""
    make = online.init_state if isinstance(stage.method, Online) else offline.init_state
    return make(stage.method, params, key, extras=stage.extras(params, key) if extras is None else extras)


def with_adapter(plan: Plan, part: str) -> Plan:
    """The plan with an adapter that trains in place of the weights, see ``train.step.trained_part``."""
    stages = (stage._replace(method=stage.method._replace(trained=part)) for stage in plan.stages)
    return plan._replace(stages=tuple(stages))


def with_parked_optimiser(plan: Plan) -> Plan:
    """The plan with optimisers whose state waits in the host's memory, see ``distributed.offload``."""
    stages = (stage._replace(method=stage.method._replace(tx=parked_state(stage.method.tx))) for stage in plan.stages)
    return plan._replace(stages=tuple(stages))


def most_parts(prompts: int, group_size: int, devices: int) -> int:
    """The most parts of a batch (at most 16) that hold whole groups and whose rows divide over the devices.

    >>> most_parts(24, 4, 1), most_parts(24, 4, 16)
    (12, 6)
    """
    return max((n for n in range(1, 17) if prompts % n == 0 and prompts // n * group_size % devices == 0), default=1)


def in_parts(plan: Plan, parts: int, *, devices: int = 1) -> Plan:
    """The plan with the batch of every update in parts whose gradients are added up.

    Args:
      parts: of whole groups, or of a supervised minibatch; where that has fewer rows, each is a part. 0: ``most_parts``
        of the stages that sample, and one where parts do not add up.
      devices: that the rows of a part divide over.

    Raises:
      UserError: for a number that does not divide a stage's batch, or a method whose parts do not add up.
    """
    stages = (stage._replace(method=_divided(stage.method, parts, devices)) for stage in plan.stages)
    return plan._replace(stages=tuple(stages))


def _divided(method: Online | Offline, parts: int, devices: int) -> Online | Offline:
    if isinstance(method, Online):
        groups, why = method.prompts_per_step, method.whole_batch
        size = method.group_size
        if method.minibatches > 1:  # of rows, whichever their groups
            groups, size = groups * size // method.minibatches, 1
        if parts == 0:
            return method._replace(microbatches=1 if why else most_parts(groups, size, devices))
    else:
        groups, why = method.rows_per_step, "" if method.whole else "its supervised loss is a mean over a minibatch"
        parts = min(parts or 1, groups) if parts % groups == 0 else parts
    if parts > 1 and why:
        raise UserError(f"--microbatches {parts}: this method takes its batch whole ({why}); drop the flag")
    if groups % parts:
        several = isinstance(method, Online) and method.minibatches > 1
        kind = "rows of a mini-batch" if several else "prompts" if isinstance(method, Online) else "supervised rows"
        raise UserError(f"--microbatches {parts} does not divide the {groups} {kind} of a step; choose a divisor")
    return method._replace(microbatches=parts)


def rollouts(plan: Plan) -> int:
    """Responses generated for training by one seed."""
    return sum(
        s.steps * s.method.prompts_per_step * s.method.group_size for s in plan.stages if isinstance(s.method, Online)
    )


def updates(plan: Plan) -> int:
    """Optimiser steps of one seed."""
    return sum(s.steps * _updates_of(s.method) for s in plan.stages)


def _updates_of(method: Online | Offline) -> int:
    return method.updates_per_rollout * method.minibatches if isinstance(method, Online) else 1
