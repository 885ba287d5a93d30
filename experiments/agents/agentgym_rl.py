"""How many turns an episode may have, growing over training (AgentGym-RL, ScalingInter-RL).

Paper:     Xi et al., "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making through Multi-Turn
           Reinforcement Learning", arXiv:2509.08755.
Claim:     with few turns an agent learns fast but never what long tasks need, with many from the beginning training is
           unstable; a horizon that grows in stages ends above both.
Equations: episodes of training step n are cut after h turns, h = h_j, j = min(n // P, J - 1); a cut one keeps its
           reward, 0; A = (R - mean) / std of the group at every token of an action. long: h = 12 (baseline); short:
           h = 4; scaling: 4, 8, 12; reversed (control): 12, 8, 4.
Left out:  servers of environments, PPO and REINFORCE++, the KL term, two updates a rollout.
Expect:    eval/success: scaling > short and scaling > long.
Measure:   held-out corridors of the key-door world, actions turn by turn, always 12 turns; 8 seeds, equal episodes and
           updates, not equal turns. near: a shortest plan of at most 5 actions, far: more.
Run:       python -m experiments.agents.agentgym_rl; at scale --model DIR --data webshop:FOLDER (alfworld:, textworld:)
"""

import dataclasses
from functools import partial

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor_arena, turn_limits
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rollout.host.driver import only_on_host
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Stage

CELLS, MOST_TURNS = 6, 12


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """Sizes of the paper's kind, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 300
    learning_rate: float = 1e-6
    eval_every: int = 15
    prompts_per_step: int = 16
    group_size: int = 8
    max_turns: int = MOST_TURNS
    base_steps: int = 150
    turns: tuple[int, ...] = (4, 8, 12)
    period: int = 100  # steps of a stage; the last goes on


EMBEDDED = {"steps": 60, "learning_rate": 1e-3, "prompts_per_step": 8, "group_size": 4, "period": 20}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "period": 1}
ARMS = {
    "long": {"turns": (12,)},
    "scaling": {},
    "short": {"turns": (4,)},
    "reversed": {"turns": (12, 8, 4)},
}
METRICS = ("eval/success", "eval/success_near", "eval/success_far", "eval/turns", "eval/moved", "policy/entropy")
CURVES = ("eval/success", "eval/success_far", "eval/turns", "length/mean_tokens", "policy/entropy")
# short cannot reach far goals by design; whether the world is learned shows on the paper's baseline
BED = experiment.Bed(baseline="long")


def build(settings: Settings) -> Plan:
    """One online stage whose rollout reads its horizon off the training step."""
    turns_at = partial(turn_limits.staged_turns, turns=settings.turns, period=settings.period)
    if settings.data:
        if settings.max_turns < max(settings.turns):
            raise UserError(f"--max-turns {settings.max_turns} is below --turns {max(settings.turns)}; raise it")
        slots = turn_limits.scheduled(only_on_host, turns_at)
        return multi_turn_plan.make_plan(
            settings,
            lambda tasks, rollout: episode_methods.make_grpo(tasks, settings, **slots),
            through=turn_limits.on_host,
        )
    arena = keydoor_arena.make_keydoor(cells=CELLS, turns=MOST_TURNS)
    rollout = arenas.arena_episodes(arena, arena.train, group_size=settings.group_size)
    online = episode_methods.make_grpo(arena, settings, **turn_limits.scheduled(rollout, turns_at))
    more = keydoor_arena.by_length(arena, cells=CELLS, most=5)
    measure = strings.bound(arenas.measure, arena, samples=8, more=more)
    return Plan(arenas.make_base(arena, steps=settings.base_steps), (Stage(online, settings.steps),), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """A horizon that grows in stages ends above a short one and above a long one."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "scaling", "short"),
        experiment.greater(results, "eval/success", "scaling", "long"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
