"""Test bed: episodes of turns with sub-goals, most of which are not paid (knobs: sparsity, horizon, shared states).

Paper:     none; a bed for methods about credit over turns: per-turn rewards, situations, horizons, tools.
Claim:     where only the end of an episode is paid, learning is slower than where its sub-goals are paid as well.
Equations: R_k = [done] at the last turn of a share `sparsity` of the training tasks, chosen by number, and for the
           others 1 / n for every one of n sub-goals where it is reached; A_k = (G_k - mean) / std over the group's
           turns of number k, G_k = R_k + R_k+1 + ..; clipped ratios. dense: sparsity 0 (the positive control);
           sparsity_n: the share in percent; near, far: 3 places in 18 turns, 5 in 30; skies_8: the same situation looks
           different in 7 of 8 cases. shop: the same in a shop with users who hold back.
Left out:  language models; tools.
Expect:    eval/success: dense > grpo, sparsity_50 > grpo.
Measure:   held-out grids of five by five cells with four places to go to in turn in at most 24 turns, judged by the
           end alone; the base imitates a walker who hardly tells left from right. Equal episodes and updates.
           eval/shared: turns of the same task in one situation; reward/mean is what is paid.
Run:       python -m experiments.beds.sub_goals; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/sub_goals.py
"""

import dataclasses
from collections.abc import Callable

from experiments.agents.parts import arena as arenas
from experiments.beds.parts import goal_worlds
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Stage


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Values for the small decoder that is made here."""

    steps: int = 40
    eval_every: int = 4
    learning_rate: float = 3e-4
    prompts_per_step: int = 4
    group_size: int = 8
    base_steps: int = 100  # of imitation
    world: Callable[[int, int, int, int], goal_worlds.World] = goal_worlds.grid
    side: int = 5  # rows and columns of a grid
    places: int = 4  # to go to, each a sub-goal
    turns: int = 24  # of an episode at most
    skies: int = 1  # that look different and mean nothing: more of them, fewer turns of a group share a situation
    sparsity: float = 1.0  # share of the training tasks of which only the end is paid


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "grpo": {},
    "dense": {"sparsity": 0.0},
    "sparsity_50": {"sparsity": 0.5},
    "near": {"places": 3, "turns": 18},
    "near_dense": {"places": 3, "turns": 18, "sparsity": 0.0},
    "far": {"places": 5, "turns": 30},
    "far_dense": {"places": 5, "turns": 30, "sparsity": 0.0},
    "skies_8": {"skies": 8},
    "shop": {"world": goal_worlds.shop, "base_steps": 300},
    "shop_dense": {"world": goal_worlds.shop, "base_steps": 300, "sparsity": 0.0},
}
METRICS = ("eval/success", "eval/turns", "eval/pass@8", "eval/shared")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "policy/entropy")
# a walker at random does 2 of a million tasks; of the held-out tasks 2 of 128 have a longer plan than there are turns
# half of what paying the end alone costs, 0.058, stated when that was known: a quarter of what dense gains, 0.095, is
# more than there is to mend
D_STAR = {"eval/success": 0.029}
BED = experiment.Bed(
    metric="eval/success", chance=0.0, ceiling=0.984, baseline="grpo", positive="dense", knob="sparsity"
)


def build(settings: Settings) -> Plan:
    """GRPO from turn to turn on whole episodes from a base that imitates a walker who knows a part of the task."""
    if not 0 <= settings.sparsity <= 1:
        raise UserError(f"--sparsity {settings.sparsity} is a share; choose one in [0, 1]")
    world = settings.world(settings.side, settings.places, settings.turns, settings.skies)
    online = episode_methods.make_grpo(
        goal_worlds.to_train(world, settings.sparsity), settings, advantages=goal_worlds.from_here_on
    )
    base = arenas.make_base(world.arena, steps=settings.base_steps)
    measure = strings.bound(arenas.measure, world.arena, samples=goal_worlds.SAMPLES, figures=goal_worlds.figures)
    return Plan(base, (Stage(online, settings.steps),), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Episodes whose sub-goals are paid teach more than episodes of which only the end is paid."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "dense", "grpo"),
        experiment.greater(results, "eval/success", "sparsity_50", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
