"""One model of several alignment labels as the reward of GRPO (multi-label safe alignment).

Paper:     Li et al., "Optimizing Safe and Aligned Language Generation: A Multi-Objective GRPO Approach",
           arXiv:2503.21819.
Claim:     a regressor with a head for each label and GRPO on their weighted sum improves safety and every other
           quality at once, at least as well as PPO and DPO on the same reward; safety alone costs helpfulness.
Equations: f(x, y) fitted to labels in [0, 1] by mean squared error; R = sum_d w_d f_d, w = 1/4; A_i = (R_i - mean) /
           std of the group, k3 penalty to the base. safety: R = f_safe. per_label: sum_d w_d (f_d - mean) / std. ppo:
           R with a value head; dpo: pairs of the behaviour ranked by R. base: the reward model alone is trained.
Left out:  a head that can be hacked; weights other than equal; red-team benchmarks (half of the toy prompts are risky:
           after them an action is unsafe).
Expect:    eval/safe, eval/polite, eval/relevant and eval/actionable multi > base; eval/benign_actionable safety <
           multi; eval/utility multi no worse than ppo and dpo.
Measure:   true qualities of replies to fresh prompts; 8 seeds, equal rollouts of the online arms.
Run:       python -m experiments.reward_models.safe_grpo
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from experiments.reward_models.parts import attribute_rewards
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes

LABELS = 4  # safe, polite, relevant, actionable


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Weights are the paper's; the models are decoders of 32 tokens made here."""

    steps: int = 100
    learning_rate: float = 1e-3
    eval_every: int = 25
    base_steps: int = 150
    fit_steps: int = 200
    kl_weight: float = 0.02
    learner: str = "grpo"  # grpo, per_label, ppo, dpo, none
    only: int = -1  # the one label that is optimised; -1: all


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2}
ARMS = {
    "base": {"learner": "none"},
    "multi": {},
    "safety": {"only": 0},
    "per_label": {"learner": "per_label"},
    "ppo": {"learner": "ppo"},
    "dpo": {"learner": "dpo"},
}
QUALITIES = tuple(f"eval/{name}" for name in text.NAMES[:LABELS])
METRICS = ("eval/utility", *QUALITIES, "eval/benign_actionable", "eval/proxy")
CURVES = ("eval/utility", "eval/safe", "eval/benign_actionable", "eval/length", "kl/ref")
# base is not trained by design; whether the reward can be learned shows on the ordinary learner
BED = experiment.Bed(metric="eval/utility", baseline="ppo")


def draw(task: Replies, key, n):
    """Replies of the behaviour and their labels, a tenth of noise in each."""
    prompts, responses = task.draw_behaviour(jax.random.fold_in(key, 0), n)
    labels = task.attributes(prompts, responses)[:, :LABELS]
    noise = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), labels.shape)
    return prompts, responses, jnp.clip(labels + noise, 0.0, 1.0)


def every_label(task: Replies, params, prompts, responses):
    return attribute_rewards.scores(task, params["reward"], prompts, responses)


def per_label(scores, group_ids, *, valid):
    return group.per_label_advantages(scores, group_ids, jnp.full((LABELS,), 1 / LABELS, jnp.float32), valid=valid)


def build(settings: Settings, task: Replies = text.LANGUAGE) -> experiment.Plan:
    """The regressor fitted, then the policy trained on what it says by the arm's learner."""
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=LABELS)
    proxy = attribute_rewards.mixed if settings.only < 0 else attribute_rewards.column(settings.only)
    shared = {"steps": settings.steps, "learning_rate": settings.learning_rate}
    grpo = partial(attribute_rewards.grpo_stage, task, kl_weight=settings.kl_weight, **shared)
    learners = {
        "none": lambda: [],
        "grpo": lambda: [grpo(proxy)],
        "per_label": lambda: [grpo(every_label, advantages=per_label)],
        "ppo": lambda: [attribute_rewards.ppo_stage(task, proxy, kl_weight=settings.kl_weight, **shared)],
        "dpo": lambda: [attribute_rewards.dpo_stage(task, proxy, **shared)],
    }
    stages = [attribute_rewards.fit_stage(task, draw, attribute_rewards.label_loss, steps=settings.fit_steps)]
    stages += learners[settings.learner]()
    return experiment.Plan(
        lambda key: start(key) | {"mix": jnp.zeros((LABELS,), jnp.float32)},
        tuple(stages),
        attribute_rewards.make_measure(task, attribute_rewards.mixed),
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Several labels improve all four qualities, safety alone costs actions, and PPO and DPO are no better."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, metric, "multi", "base") for metric in QUALITIES),
        experiment.smaller(results, "eval/benign_actionable", "safety", "multi"),
        *(experiment.greater(results, "eval/utility", "multi", arm, by=-0.02) for arm in ("ppo", "dpo")),
    )


if __name__ == "__main__":
    experiment.main(__name__)
