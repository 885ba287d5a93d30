"""New problems made from what the model fails at (SwS).

Paper:     Liang et al., "SwS: Self-aware Weakness-driven Problem Synthesis in Reinforcement Learning for LLM
           Reasoning", arXiv:2506.08989.
Claim:     problems synthesised from the concepts of those that a first round of RL did not learn help more than going
           on with the old ones, and more than problems synthesised at random.
Equations: weak: max accuracy over the epochs of the first round <= 1/2 and its slope <= 0; a category's budget ~ its
           share of weak problems; concept sets by frequency, then softmax((co-occurrence + cosine) / 0.2); kept: at
           least one perfect and no bad vote, the solver's majority answer with a share >= 1/2, accuracy of the model in
           [1/8, 7/8]. Second round: GRPO on the old and the new problems, groups of accuracy in [1/8, 7/8] alone.
           continued: no new problems. uniform: equal budgets, concepts of all problems. no_filter: whatever the
           accuracy. oracle: budgets ~ 1 - the category's accuracy, from many samples. Over rows of one's own a model
           behind --synthesiser ADDRESS names concepts, writes problems for sets of 5, votes twice and solves each 5
           times; categories are the levels of the rows.
Left out:  language models in the embedded world, where recipes with errors are generator, judges and solver and sets
           have 3 of 10 concepts; several models, one for each role.
Expect:    eval/accuracy sws > uniform > continued; eval/accuracy_7, the weakest category, sws > uniform.
Measure:   held-out chains of 5 to 7 operations (the categories), of which the base has read those of 5; 8 seeds, each
           with a first round, the same for all arms whatever their rate, and new problems of its own; equal rollouts
           and updates in the second round. If oracle does not beat uniform, or uniform gains less than 0.1 in the
           second round (eval/gain, from the accuracy that the first one leaves), the bed cannot show what an aim is
           worth. weak/share: of the training problems, those that the first round left weak; where it is 0 there is
           nothing to aim at, and sws does as uniform does.
Run:       python -m experiments.curriculum.sws
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.curriculum.parts import chain_concepts, synthesis, weakness, written_problems
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.run import flags
from jaxrl_llm.run.bench import is_generated, problem_sets


@dataclasses.dataclass(frozen=True)
class Settings(written_problems.Settings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    prompts_per_step: int = 1024
    train_problems: int = 12000
    epochs: int = 3  # of the first round
    first_rate: float = 0.0  # of its updates: one first round for arms of any learning rate; 0: that of the second
    new_problems: int = 40000
    aim: Callable | None = synthesis.at_weakness  # where new problems go; None: there are none
    keep_low: float = 0.125  # accuracy of a new problem that is kept
    keep_high: float = 0.875
    low: float = 0.125  # of a group that trains
    high: float = 0.875


EMBEDDED = {
    "levels": (5, 6, 7), "steps": 160, "eval_every": 40, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 56,
    "learning_rate": 2e-4, "first_rate": 2e-4, "train_problems": 96, "eval_problems": 96, "new_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 32, "train_problems": 16,
    "eval_problems": 16, "eval_samples": 2, "new_problems": 16, "epochs": 1,
}  # fmt: skip
ARMS = {
    "continued": {"aim": None},
    "sws": {},
    "uniform": {"aim": synthesis.everywhere},
    "no_filter": {"keep_low": 0.0, "keep_high": 1.0},
    "oracle": {"aim": synthesis.at_failures},
}
BED = experiment.Bed(positive="oracle", judges=(("uniform", "eval/gain", 0.1),))
METRICS = ("eval/accuracy", "eval/gain", "eval/accuracy_5", "eval/accuracy_6", "eval/accuracy_7", "weak/share")
CURVES = ("eval/accuracy", "eval/accuracy_7", "reward/mean", "group/degenerate_fraction")


def build(settings: Settings) -> experiment.Plan:
    """The second round: one online stage from the first round's parameters, on the old and the arm's new problems.

    Both are the seed's own: a plan of seed 0, with ``Plan.of_seed``.
    """
    second = _generated(settings) if is_generated(settings.data) else _over_rows(settings)
    built = second(0)

    def of_seed(plan: experiment.Plan, seed: int) -> experiment.Plan:
        own = second(seed)
        table = {name: getattr(own.stages[0].method, name) for name in ("problems", "score", "figures")}
        (stage,) = plan.stages
        stages = (stage._replace(method=stage.method._replace(**table)),)
        measure = own.measure if plan.measure is built.measure else plan.measure  # a rate is tried without measuring
        return plan._replace(init=own.init, stages=stages, host_score=own.host_score, measure=measure)

    return built._replace(of_seed=of_seed)


def _generated(settings: Settings) -> Callable[[int], experiment.Plan]:
    written_problems.check_generated(settings)
    found, old = recipes.bench(settings), curricula.train_problems(settings)
    curricula.device_score(found)  # of problems that are not in the bench, too
    if settings.aim is not None:
        chain_concepts.check_chains(old)  # before the first round is trained

    def second(seed: int) -> experiment.Plan:
        first, new = first_of(settings, seed), []
        if settings.aim is not None:
            aim = settings.aim(old, first, settings.new_problems)
            new = synthesis.synthesise(settings, aim, first.params, recipe_of(settings), seed)
        return second_round(settings, found, first, problems=synthesis.encode(found, old + new))

    return second


def _over_rows(settings: Settings) -> Callable[[int], experiment.Plan]:
    """The same over rows of one's own, whose new problems a model writes."""
    found, old = recipes.bench(settings), list(problem_sets(settings)[0])
    ask_all = None if settings.aim is None else written_problems.open_synthesiser(settings, old)

    def second(seed: int) -> experiment.Plan:
        first, new = first_of(settings, seed), []
        if settings.aim is not None:
            aim = settings.aim(old, first, settings.new_problems)
            new = written_problems.synthesise(settings, aim, first.params, recipe_of(settings), seed, ask_all)
        return second_round(settings, written_problems.bench_of(settings, found, old + new), first)

    return second


def first_of(settings: Settings, seed: int) -> synthesis.FirstRound:
    """The first round of a seed, at a rate of its own: arms whose second round has another rate share it."""
    flags.check_amount("first_rate", settings.first_rate)
    rate = settings.first_rate or settings.learning_rate
    return synthesis.first_round(dataclasses.replace(settings, learning_rate=rate), settings.epochs, seed)


def recipe_of(settings: Settings) -> synthesis.Recipe:
    """Which new problems the arm keeps."""
    return synthesis.Recipe(low=settings.keep_low, high=settings.keep_high)


def second_round(
    settings: Settings, found: recipes.Bench, first: synthesis.FirstRound, **slots: Any
) -> experiment.Plan:
    """GRPO from the parameters of the first round on groups of middling accuracy alone."""
    share = float(np.mean(weakness.weak_problems(jnp.asarray(first.history, jnp.float32))))

    def keep(trajectories, rewards):
        bounds = {"low": settings.low, "high": settings.high, "valid": rewards.valid}
        return group.mean_within(rewards.value, trajectories.group_ids, **bounds)

    def figures(batch, metrics):
        return {"weak/share": jnp.asarray(share, jnp.float32)}

    online = curricula.make_single_turn_grpo(settings, found, keep=keep, figures=figures, **slots)
    plan = curricula.make_single_turn_plan(
        settings, found, [experiment.Stage(online, settings.steps)], more=curricula.by_level
    )
    return plan._replace(init=lambda key: first.params, measure=with_gain(plan.measure, first.heldout))


@lru_cache(maxsize=64)  # of the seeds, whose arms share the compiled measurement
def with_gain(measure: Callable[..., dict[str, Array]], start: float) -> Callable[..., dict[str, Array]]:
    """The measurement and ``eval/gain``, its accuracy less that of the start."""

    def figures(params, key):
        found = measure(params, key)
        return found | {"eval/gain": found["eval/accuracy"] - start}

    return figures


def claim(results: experiment.Results) -> experiment.Claim:
    """Problems aimed at weaknesses beat problems made at random, above all on the hardest level, and no new ones."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "sws", "uniform"),
        experiment.greater(results, "eval/accuracy", "uniform", "continued"),
        experiment.greater(results, "eval/accuracy_7", "sws", "uniform"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
