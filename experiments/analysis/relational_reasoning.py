"""Systematic relational reasoning: sets composed along paths and met across them, beyond the trained sizes.

Paper:     Khalid, Nourollah and Schockaert, "Benchmarking Systematic Relational Reasoning with Large Language and
           Reasoning Models" (STaR), arXiv:2503.23487.
Claim:     models compose qualitative relations better than chance but poorly, and worse with longer and more paths.
Equations: comp(R, S) = union of the table's entries over members; a path's set is the fold of comp over its k edges;
           the answer is the one relation in the sets of all b paths. A long path is a short one whose edges were
           replaced by chains of the same meaning. scratchpad: the sets are written out; rl: GRPO on a right answer from
           the scratchpad model; longer: as many further updates of imitation; solver: the fold itself. allen: the same
           on Allen's algebra with 13 relations, the others on RCC-8 with 8.
Left out:  language in the prompt.
Expect:    eval/drop (near - far) above 0.1 for scratchpad, and above 0 for direct, rl and allen_scratchpad;
           near/accuracy: scratchpad > direct; far/accuracy: scratchpad > direct, rl > longer, rl < solver;
           allen_scratchpad > allen_direct. The solver has no drop.
Measure:   64 puzzles of each of ten cells, drawn for every run of those that training never has, in whatever order of
           paths; near: two and three edges as in training, far: four to six, each with two and three paths. Edges lie
           anywhere on their path, so that training has had all places. Macro-F1 beside accuracy; chance 1/8 and 1/13.
           direct and scratchpad are only measured after equal imitation; equal updates of rl and longer. The bed is
           invalid unless scratchpad is right on half of near, and direct wrong on a twentieth.
Run:       python -m experiments.analysis.relational_reasoning
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax

from experiments.analysis.parts import qualitative_calculi, relations
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Sizes for the small model."""

    steps: int = 100
    eval_every: int = 25
    learning_rate: float = 5e-4
    prompts_per_step: int = 8
    group_size: int = 8
    base_steps: int = 1500
    calculus: Callable = qualitative_calculi.rcc8
    text: Callable = relations.worked  # what is imitated, of the calculus
    measured: Callable = relations.make_policy_measure  # of the calculus
    further: str = ""  # what follows: nothing, "sft" or "rl"


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "direct": {"text": relations.direct},
    "scratchpad": {},
    "longer": {"further": "sft"},
    "rl": {"further": "rl"},
    "solver": {"measured": relations.make_solver_measure, "base_steps": 1},
    "allen_direct": {"calculus": qualitative_calculi.allen, "text": relations.direct},
    "allen_scratchpad": {"calculus": qualitative_calculi.allen},
    "allen_rl": {"calculus": qualitative_calculi.allen, "further": "rl"},
}
METRICS = ("near/accuracy", "far/accuracy", "near/f1", "far/f1", "eval/drop", "eval/consistent", "near/room")
BED = experiment.Bed(judges=(("scratchpad", "near/accuracy", 0.5), ("direct", "near/room", 0.05)))
CURVES = (*METRICS, *(f"k{k}b{b}/accuracy" for k, b in relations.CELLS), "policy/entropy")


def further(task: relations.Questions, settings: Settings) -> tuple[experiment.Stage, ...]:
    """More imitation, GRPO, or nothing."""
    world = task.world(settings.calculus)
    if settings.further == "sft":
        sizes = {"steps": settings.steps, "learning_rate": settings.learning_rate}
        return (strings.supervised_stage(world, settings.text(task, settings.calculus), **sizes),)
    if settings.further == "":
        return ()
    prompts, is_right = task.asked(settings.calculus)

    def score(answers, trajectories):
        _, responses = strings.responses_of(world, trajectories)
        right = is_right(responses, trajectories.problem_ids)
        return Rewards(right.astype(jnp.float32), jnp.ones(right.shape, bool))

    advantages = builders.per_response(group.group_normalized_advantages)
    online = strings.learned_from_prompts(
        world, prompts, score, estimate=builders.make_estimate(world.policy, advantages),
        loss=builders.make_policy_loss(world.policy, clipped_policy_loss), tx=optax.adam(settings.learning_rate),
        prompts_per_step=settings.prompts_per_step, group_size=settings.group_size,
    )  # fmt: skip
    return (experiment.Stage(online, settings.steps),)


def build(settings: Settings, task: relations.Questions = relations.PUZZLES) -> experiment.Plan:
    """A base that imitates, and what follows."""
    draw, world = settings.text(task, settings.calculus), task.world(settings.calculus)
    base = strings.make_base(world, draw, steps=settings.base_steps, table=4096, learning_rate=3e-3)
    return experiment.Plan(base, further(task, settings), settings.measured(task, settings.calculus))


def claim(results: experiment.Results) -> experiment.Claim:
    """What works its sets out falls with longer paths; it is better than an answer alone, and training helps further.

    Without Allen's algebra, on rows of one's own, nothing is said of it.
    """
    arms = ["direct", "rl", *({"allen_scratchpad"} & set(results.arms))]
    falls = [experiment.above(results, "eval/drop", arm, 0.0) for arm in arms]
    if "allen_direct" in results.arms:
        falls.append(experiment.greater(results, "near/accuracy", "allen_scratchpad", "allen_direct"))
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.above(results, "eval/drop", "scratchpad", 0.1),
        experiment.greater(results, "near/accuracy", "scratchpad", "direct"),
        experiment.greater(results, "far/accuracy", "scratchpad", "direct"),
        experiment.greater(results, "far/accuracy", "rl", "longer"),
        experiment.smaller(results, "far/accuracy", "rl", "solver"),
        *falls,
    )


if __name__ == "__main__":
    experiment.main(__name__)
