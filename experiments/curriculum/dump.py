"""A bandit over data distributions with upper confidence bounds on learnability (DUMP).

Paper:     Wang et al., "DUMP: Automated Distribution-Level Curriculum Learning for RL-based LLM Post-training",
           arXiv:2504.09710.
Claim:     drawing distributions by an upper confidence bound on the mean absolute advantage learns a mixture faster
           than uniform draws, and stops spending on what cannot be learnt.
Equations: L_j = mean |A| over the newest rollouts of distribution j; UCB_j = L_j + sqrt(2 ln(n + 1) / (n_j + 1)); drawn
           with softmax(UCB / tau). no_bonus: without the root. success: softmax of the mean reward instead of |A|.
           ordered: easy to hard in equal shares of the run.
Left out:  logic puzzles, format rewards.
Expect:    eval/accuracy dump > uniform; dump beats no_bonus and success; drawn/7 and drawn/0 of dump below 1/8, what
           each of the eight distributions gets of uniform draws. (reward/mean no longer says what is spent on the
           impossible, since the solved distribution pays.)
Measure:   Countdown with 2, 3 and 4 numbers, small and large targets, and two distributions made on purpose: before
           these six one that is solved from the start (every response is right: the base solves no kind of problem
           always), behind them an impossible one (wrong targets); held out: the six real ones; 8 seeds, equal rollouts.
           drawn/<k>: share of the responses that went to distribution k: 0 the solved one, 7 the impossible one.
Run:       python -m experiments.curriculum.dump
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.curriculum.parts import bandit
from experiments.curriculum.parts.categories import spending, target_categories
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.types import Rewards


def success(mean_reward: Array, group_size: int) -> Array:
    """The bandit of the ablation: what is solved, not what is learnt."""
    return mean_reward


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    group_size: int = 16
    ordered: str = ""  # uniform or easy_to_hard: no bandit
    window: int = 19  # groups that are remembered; 300 rollouts in groups of 16
    bandit_temperature: float = 0.1
    explore: float = 2.0
    signal: Callable[..., Array] = bandit.mean_absolute_advantage
    impossible: float = 0.0  # share of the training problems that get a wrong target
    solved: float = 0.0  # share of them that every response solves


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 120, "eval_every": 40, "prompts_per_step": 8, "group_size": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 512,
    "window": 38, "impossible": 0.125, "solved": 0.125,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 64, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 10,
}  # fmt: skip
ARMS = {
    "uniform": {"ordered": "uniform"},
    "ordered": {"ordered": "easy_to_hard"},
    "dump": {},
    "no_bonus": {"explore": 0.0},
    "success": {"signal": success},
}
METRICS = (
    "eval/accuracy", "eval/accuracy_2", "eval/accuracy_3", "eval/accuracy_4", "reward/mean", "drawn/0", "drawn/7",
)  # fmt: skip
CURVES = (
    "eval/accuracy", "eval/accuracy_4", "eval/pass@8", "reward/mean", "group/degenerate_fraction",
    *(f"drawn/{k}" for k in range(8)),
)  # fmt: skip
ALL, NONE = -2, -1  # targets that every response reaches, and that none does


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO; problems that all responses solve, and those that none does, are categories too."""
    found = recipes.bench(settings)
    every = np.arange(found.train.tokens.shape[0])
    categories, slots = target_categories(found, every), {"problems": found.train}
    if settings.impossible or settings.solved:
        if min(settings.impossible, settings.solved) < 0 or settings.impossible + settings.solved >= 1:
            raise UserError(
                f"--impossible {settings.impossible:g} --solved {settings.solved:g}: both are shares of the training "
                "problems, which leave some as they are; give two that are not negative and add up to less than 1"
            )
        if settings.data != "countdown" or found.score is None:
            raise UserError(
                f"--impossible {settings.impossible:g} --solved {settings.solved:g} are for Countdown targets that are "
                f"judged on the device; with --data {settings.data} or a tokenizer of several characters a token give 0"
            )
        chance = np.random.default_rng(0).random(every.size)
        wrong, right = chance < settings.impossible, chance >= 1 - settings.solved
        categories = np.where(wrong, categories.max() + 1, np.where(right, -1, categories))
        categories = np.unique(categories, return_inverse=True)[1]
        answers = found.train.answers
        target = jnp.where(jnp.asarray(wrong), NONE, jnp.where(jnp.asarray(right), ALL, answers["target"]))
        problems = found.train._replace(answers={**answers, "target": target})
        slots = {"problems": problems, "score": lenient(found.score)}
    if settings.ordered:
        order = bandit.make_ordered_weights(settings.steps)
        arms = bandit.make_schedule(bandit.uniform_weights if settings.ordered == "uniform" else order)
    else:
        arms = bandit.make_ucb(
            window=settings.window,
            temperature=settings.bandit_temperature,
            explore=settings.explore,
            group_size=settings.group_size,
        )
    signal = partial(settings.signal, group_size=settings.group_size)
    sampler = bandit.make_categories(categories, arms, signal=signal)
    online = curricula.make_single_turn_grpo(settings, found, sampler=sampler, **slots, **spending(categories))
    return curricula.make_single_turn_plan(
        settings, found, [experiment.Stage(online, settings.steps)], more=curricula.by_level
    )


def lenient(score: Callable[..., Rewards]) -> Callable[..., Rewards]:
    """The judge for whom every response reaches the target ``ALL``."""

    def judged(answers, rows):
        found = score(answers, rows)
        return found._replace(value=jnp.where(answers["target"] == ALL, 1.0, found.value))

    return judged


def claim(results: experiment.Results) -> experiment.Claim:
    """The bandit on absolute advantages with a bonus beats uniform draws, and spends little where nothing is learnt."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "dump", "uniform"),
        experiment.below(results, "drawn/7", "dump", 1 / 8),
        experiment.below(results, "drawn/0", "dump", 1 / 8),
        experiment.greater(results, "eval/accuracy", "dump", "no_bonus"),
        experiment.greater(results, "eval/accuracy", "dump", "success"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
