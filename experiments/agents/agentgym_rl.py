"""How many turns an episode may have, growing over training (AgentGym-RL, ScalingInter-RL).

Paper:     Xi et al., "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making through Multi-Turn
           Reinforcement Learning", arXiv:2509.08755.
Claim:     with few turns an agent learns fast but never what long tasks need, with many from the beginning training is
           unstable; a horizon that grows in stages ends above both.
Equations: episodes of training step n are cut after h turns, h = h_j, j = min(n // P, J - 1); a cut one keeps its
           reward, 0; A = (R - mean) / std of the group at every token of an action. scaling: h = 20, 30, 40; long: 40
           (baseline); short: 20; reversed (control): 40, 30, 20.
Left out:  servers of environments, PPO and REINFORCE++, two updates a rollout, embedded the KL term. Stages end after
           so many steps, as in the paper: a schedule by measured success would give every seed and arm other ones. In
           40 turns the base begins at 0.3, and 42 steps, the budget on which the bed is certified (there a base of
           0.08 comes to 0.40 in 24 turns), take long to 0.91: 27 leave the arms room.
Expect:    eval/success: scaling > short and scaling > long.
Measure:   held-out grids of the bed sub_goals, its base, sizes and rate: five by five cells, four places to go to in
           turn, always 40 turns; equal episodes and updates, not equal turns. near: a shortest plan of at most 17
           actions, far: more, up to 30. The base does 4 of 10 in 40 turns, 3 of 100 in 20; a walker at random none.
Run:       python -m experiments.agents.agentgym_rl; at scale --model DIR --data webshop:FOLDER (alfworld:, textworld:)
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, turn_limits
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of

MOST_TURNS, NEAR = 40, 17  # of the embedded world, and actions of a plan that is near


def growing(turns: tuple[int, ...]) -> tuple[int, ...]:
    """The stages as they are given."""
    return turns


def shortest(turns: tuple[int, ...]) -> tuple[int, ...]:
    """The first stage alone."""
    return turns[:1]


def longest(turns: tuple[int, ...]) -> tuple[int, ...]:
    """The last stage alone."""
    return turns[-1:]


def falling(turns: tuple[int, ...]) -> tuple[int, ...]:
    """The stages from the last to the first."""
    return turns[::-1]


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """Sizes of the paper's kind, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 300
    learning_rate: float = 1e-6
    eval_every: int = 15
    prompts_per_step: int = 16
    group_size: int = 8
    max_turns: int = 12
    base_steps: int = 100
    kl_weight: float = 0.001  # of k3 to the policy at the start; 0: no reference
    turns: tuple[int, ...] = (4, 8, 12)
    period: int = 100  # steps of a stage; the last goes on
    stages: Callable[[tuple[int, ...]], tuple[int, ...]] = growing


EMBEDDED = {
    "steps": 27, "eval_every": 3, "learning_rate": 3e-4, "prompts_per_step": 4, "turns": (20, 30, 40), "period": 9,
    "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "period": 1}
ARMS = {"long": {"stages": longest}, "scaling": {}, "short": {"stages": shortest}, "reversed": {"stages": falling}}
METRICS = ("eval/success", "eval/success_near", "eval/success_far", "eval/turns", "eval/moved", "policy/entropy")
CURVES = ("eval/success", "eval/success_far", "eval/turns", "length/mean_tokens", "policy/entropy")
# in short episodes some of the tasks cannot be done by design; whether the world is learned shows on long ones
BED = experiment.Bed(metric="eval/success", chance=0.0, ceiling=1.0, baseline="long")


def embedded(settings: Settings) -> Setup:
    """Errands on a grid, near and far."""
    arena = errands.make_errands(turns=MOST_TURNS)
    slots = {"rollout": arenas.arena_episodes(arena, arena.train, group_size=settings.group_size)}
    more = errands.by_length(arena, most=NEAR)
    return arenas.make_setup(arena, steps=settings.base_steps, slots=slots, samples=8, more=more)


def own(settings: Settings) -> Setup:
    """Envs of one's own, whose horizon comes with the acting parameters."""
    if settings.max_turns < max(settings.turns):
        raise UserError(f"--max-turns {settings.max_turns} is below --turns {max(settings.turns)}; raise it")
    return multi_turn_plan.hosted(settings, through=turn_limits.on_host)


def build(settings: Settings) -> Plan:
    """One online stage whose rollout reads its horizon off the training step."""
    turns_at = partial(turn_limits.staged_turns, turns=settings.stages(settings.turns), period=settings.period)
    setup = setup_of(settings, embedded, own)
    slots = turn_limits.scheduled(turns_at=turns_at, **setup.slots)
    online = episode_methods.make_grpo(setup.tasks, settings, kl_weight=settings.kl_weight, **slots)
    return setup.plan(Stage(online, settings.steps, episode_methods.reference_for(settings.kl_weight)))


def claim(results: experiment.Results) -> experiment.Claim:
    """A horizon that grows in stages ends above a short one and above a long one."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "scaling", "short"),
        experiment.greater(results, "eval/success", "scaling", "long"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
