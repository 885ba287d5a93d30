"""Test bed: errands of several steps on a grid, paid at their end (knob: how much of the reward only the end earns).

Paper:     none; a bed for methods about episodes: credit of turns, horizons, sub-goals.
Claim:     episodes that are paid only where the door opens teach less than episodes half of whose reward is earned
           with the key.
Equations: GRPO on whole episodes, A = (R - mean) / std of the group, R = s [door opened] + (1 - s) ([key picked up] +
           [door opened]) / 2, s = sparsity. grpo: s = 1; subgoals: s = 0 (the positive control); turns_n: at most n
           turns in an episode; side_3: smaller grids; apart: as many episodes, in groups of two, so that fewer meet in
           one situation.
Left out:  the shop, which is played over its files: --data webshop:FOLDER with --model DIR.
Expect:    eval/success: subgoals > grpo, turns_10 < grpo.
Measure:   128 held-out grids x 4 episodes; success is an open door. A share of 0.1 to 0.3 of the walker's own episodes
           that are imitated succeeds; guessing opens next to none; ceiling 1. Equal episodes and updates.
Run:       python -m experiments.beds.errands; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/errands.py
"""

import dataclasses
from functools import partial

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor_arena
from jaxrl_llm import experiment
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Stage


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """For --data and a model of one's own; EMBEDDED are those of the small decoder and its grids."""

    steps: int = 150
    eval_every: int = 10
    learning_rate: float = 1e-6
    prompts_per_step: int = 16
    group_size: int = 8
    base_steps: int = 150
    side: int = 4
    turns: int = 14
    skill: float = 0.4  # of the walker that the base imitates
    sparsity: float = 1.0  # share of the reward that only the open door earns


EMBEDDED = {"steps": 100, "learning_rate": 1e-3, "prompts_per_step": 4}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "side": 3, "turns": 4}
ARMS = {
    "grpo": {},
    "subgoals": {"sparsity": 0.0},
    "sparsity_50": {"sparsity": 0.5},
    "turns_10": {"turns": 10},
    "side_3": {"side": 3},
    "apart": {"prompts_per_step": 16, "group_size": 2},
}
METRICS = ("eval/success", "eval/turns", "eval/revisits")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "policy/entropy")
BED = experiment.Bed(metric="eval/success", chance=0.02, baseline="grpo", positive="subgoals", knob="sparsity")


def build(settings: Settings) -> Plan:
    """GRPO on episodes; half of what is not kept for the end is earned with the key."""
    if settings.data:
        return multi_turn_plan.make_plan(settings, partial(episode_methods.make_grpo, settings=settings))
    arena = keydoor_arena.make_grid_arena(
        side=settings.side, turns=settings.turns, skill=settings.skill, key_share=(1.0 - settings.sparsity) / 2.0
    )
    online = episode_methods.make_grpo(arena, settings)
    measure = arenas.make_measure(arena, samples=4)
    return Plan(arenas.make_base(arena, steps=settings.base_steps), (Stage(online, settings.steps),), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Sub-goals that are paid teach more of the errand than its end alone."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "subgoals", "grpo"),
        experiment.smaller(results, "eval/success", "turns_10", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
