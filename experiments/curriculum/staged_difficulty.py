"""Stages of rising difficulty, measured by a ladder of models.

Paper:     Ji et al., "How Difficulty-Aware Staged Reinforcement Learning Enhances LLMs' Reasoning Capabilities: A
           Preliminary Experimental Study", arXiv:2504.00829.
Claim:     training on problems of a measured difficulty, and going on to harder ones in stages, beats training on all
           of them mixed and on any one level.
Equations: pass rates p of a small, a medium and a large model; level 1: 0 < p_small < 1; level 2: (p_small = 0 and
           p_medium > 0) or (0 < p_small < 1 and 0 < p_medium < 1); level 3: p_large = 0 and half of the others. GRPO;
           every stage starts from the parameters of the one before with a new optimiser.
Left out:  mixing mathematics with code, the reference model (no KL here), stages that end by a validation score.
Expect:    eval/accuracy staged > mixed and > each single level; staged > reverse.
Measure:   held-out Countdown with 2 to 4 numbers; the ladder is nano, tiny, and tiny at temperature 0.5; 8 seeds, three
           stages with equal rollouts and updates in every arm.
Run:       python -m experiments.curriculum.staged_difficulty
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import experiment
from jaxrl_llm.curriculum.subset import ladder_levels
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper gives no numbers; see EMBEDDED for the small model."""

    stages: tuple[int, ...] = (1, 2, 3)  # levels in the order of training; 0: all problems
    ladder: tuple[str, ...] = ("", "", "")  # three models from small to large; empty: the one that trains
    ladder_temperatures: tuple[float, ...] = (1.0, 1.0, 1.0)
    ladder_samples: int = 8


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 40, "eval_every": 40, "prompts_per_step": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 512,
    "ladder": ("nano", "tiny", "tiny"), "ladder_temperatures": (1.0, 1.0, 0.5),
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 48, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 14, "ladder": ("nano", "nano", "nano"), "ladder_samples": 4,
    "ladder_temperatures": (1.0, 0.6, 0.3),
}  # fmt: skip
ARMS = {
    "mixed": {"stages": (0, 0, 0)},
    "level1": {"stages": (1, 1, 1)},
    "level2": {"stages": (2, 2, 2)},
    "level3": {"stages": (3, 3, 3)},
    "staged": {},
    "reverse": {"stages": (3, 2, 1)},
}
METHOD = "staged"
METRICS = ("eval/accuracy", "eval/accuracy_2", "eval/accuracy_3", "eval/accuracy_4", "eval/pass@8")
CURVES = ("eval/accuracy", "eval/accuracy_4", "eval/pass@8", "reward/mean", "group/degenerate_fraction")


def level_rows(settings: Settings, found) -> list[np.ndarray]:
    """Which training problems belong to all, level 1, level 2, level 3."""
    if len(settings.ladder) != 3 or len(settings.ladder_temperatures) != 3:
        raise UserError(f"--ladder {' '.join(settings.ladder)}: name three models and three temperatures")
    every = np.arange(found.train.tokens.shape[0])
    rates = [
        curricula.sample_pass_rates(
            found, settings, every, samples=settings.ladder_samples, model=name, temperature=temperature
        )
        for name, temperature in zip(settings.ladder, settings.ladder_temperatures, strict=True)
    ]
    coins = jnp.asarray(np.random.default_rng(0).random(every.size) < 0.5)
    levels = ladder_levels(*(jnp.asarray(x, jnp.float32) for x in rates), coins)
    return [np.ones(every.size, bool), *(np.asarray(x) for x in levels)]


def build(settings: Settings) -> experiment.Plan:
    """One online stage for each level of the arm's order, GRPO throughout."""
    found = recipes.bench(settings)
    rows = level_rows(settings, found)
    stages = [
        experiment.Stage(
            curricula.make_grpo(settings, found, sampler=curricula.make_chosen(rows[level], f"of level {level}")),
            settings.steps,
        )
        for level in settings.stages
    ]
    return curricula.make_plan(settings, found, stages, more=curricula.by_level)


def claim(results: experiment.Results) -> experiment.Claim:
    """Levels in rising order beat all problems mixed, each level alone, and the reverse order."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "eval/accuracy", "staged", arm) for arm in ARMS if arm != "staged"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
