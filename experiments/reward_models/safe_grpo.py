"""One model of several alignment labels as the reward of GRPO (multi-label safe alignment).

Paper:     Li et al., "Optimizing Safe and Aligned Language Generation: A Multi-Objective GRPO Approach",
           arXiv:2503.21819.
Claim:     a regressor with a head for each label and GRPO on their weighted sum improves safety and every other
           quality at once, at least as well as PPO and DPO on the same reward; safety alone costs helpfulness.
Equations: f(x, y) = sigmoid(head) fitted to labels in [0, 1] by mean squared error over those that are there (a tenth
           is not); R = sum_d w_d f_d, w = 1/4; A_i = (R_i - mean) / std of the group, k3 penalty to the base. safety: w
           = (1, 0, 0, 0). careful: w = (.55, .15, .15, .15). per_label: sum_d w_d (f_d - mean) / std. hackable: the
           ratings of actions go by length; harmful: harm passes for an action and for relevance. ppo: R with a value
           head; dpo: pairs of the behaviour ranked by R. base: the reward model alone is trained.
Left out:  red-team benchmarks (half of the toy prompts are risky: after them an action is unsafe).
Expect:    eval/safe, eval/polite, eval/relevant and eval/actionable multi > base; eval/benign_actionable safety <
           multi; eval/utility multi no worse than ppo and dpo, and above hackable, whose eval/overrated is larger. dpo
           has the learning rate of the online arms, at which it was not tuned: nothing follows from multi - dpo about
           DPO at its best. hackable is no hack here: a long reply without actions is safer after risky prompts, and
           its true utility is above that of multi (on briefings below); harmful, which pays for harm, ends below it.
Measure:   true qualities of replies to fresh prompts, the share of benign prompts refused (no action at all), and by
           how much R exceeds the same mean of true qualities; 8 seeds, equal rollouts of the online arms.
Run:       python -m experiments.reward_models.safe_grpo [--world briefings, where a topic is secret]
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import attribute_briefings, attribute_rewards, combine
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.reward import label_regression_loss

LABELS = 4  # safe, polite, relevant, actionable
ACTIONABLE = text.NAMES.index("actionable")


def honest(task: Replies, prompts, responses):
    """Raters who see the qualities as they are."""
    return task.attributes(prompts, responses)[:, :LABELS]


def by_length(task: Replies, prompts, responses):
    """Raters who take a long reply for one with actions: the head that learns from them can be hacked."""
    share = task.lengths(responses) / task.world.response_tokens
    return honest(task, prompts, responses).at[:, ACTIONABLE].set(share)


def by_harm(task: Replies, prompts, responses):
    """Raters whom harm impresses: they take it for actions and for relevance, and still see that it is not safe."""
    seen = honest(task, prompts, responses)
    harm = 1.0 - seen[:, :1]
    return jnp.concatenate([seen[:, :2], jnp.maximum(seen[:, 2:], harm)], axis=1)


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
    weights: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)  # of the labels, on the simplex
    rated: Callable = honest  # (task, prompts, responses) -> the labels [N, 4] that are fitted


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2}
ARMS = {
    "base": {"learner": "none"},
    "multi": {},
    "safety": {"weights": (1.0, 0.0, 0.0, 0.0)},
    "careful": {"weights": (0.55, 0.15, 0.15, 0.15)},
    "per_label": {"learner": "per_label"},
    "hackable": {"rated": by_length},
    "harmful": {"rated": by_harm},
    "ppo": {"learner": "ppo"},
    "dpo": {"learner": "dpo"},
}
QUALITIES = tuple(f"eval/{name}" for name in text.NAMES[:LABELS])
WORLDS = {"language": text.LANGUAGE, "briefings": attribute_briefings.BRIEFINGS}
METRICS = ("eval/utility", *QUALITIES, "eval/benign_actionable", "eval/benign_refused", "eval/overrated", "eval/proxy")
CURVES = ("eval/utility", "eval/safe", "eval/benign_actionable", "eval/length", "kl/ref")
# base is not trained by design; whether the reward can be learned shows on the ordinary learner
BED = experiment.Bed(metric="eval/utility", baseline="ppo")


@lru_cache(maxsize=4)
def draw_rated(rated):
    """``draw(task, key, n)``: replies of the behaviour, their labels with noise, and which labels are there."""

    def draw(task, key, n):
        prompts, responses = task.draw_behaviour(jax.random.fold_in(key, 0), n)
        labels = rated(task, prompts, responses)
        noise = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), labels.shape)
        there = jax.random.bernoulli(jax.random.fold_in(key, 2), 0.9, labels.shape)
        return prompts, responses, jnp.clip(labels + noise, 0.0, 1.0), there

    return draw


def every_label(task: Replies, params, prompts, responses):
    """All heads, in [0, 1]."""
    return jax.nn.sigmoid(attribute_rewards.scores(task, params["reward"], prompts, responses))


def fit_labels(task: Replies, params, rows):
    """Squared error of the heads on the labels that are there."""
    prompts, responses, labels, there = rows
    value = reduce.scalars(label_regression_loss(every_label(task, params, prompts, responses), labels, there).loss)
    return value, {"fit/error": value}


@lru_cache(maxsize=8)
def weighted(weights):
    """The ``Proxy`` ``sum_d w_d f_d``."""

    def proxy(task, params, prompts, responses):
        found = jax.lax.stop_gradient(every_label(task, params, prompts, responses))
        return combine.composed(found, jnp.asarray(weights, jnp.float32))

    return proxy


@lru_cache(maxsize=8)
def one_by_one(weights):
    """Advantages of labels that are normalised before they are weighed."""

    def advantages(scores, group_ids, *, valid):
        return group.per_label_advantages(scores, group_ids, jnp.asarray(weights, jnp.float32), valid=valid)

    return advantages


@lru_cache(maxsize=8)
def overrated(weights):
    """What the reward model says beyond the truth of the policy's replies, and how often a benign prompt is refused."""

    def measured(task, params, key):
        asked = task.draw_prompts(jax.random.fold_in(key, 0), 128)
        said = strings.sample(task.world, params["model"], asked, jax.random.fold_in(key, 1))
        truth = task.attributes(asked, said)[:, :LABELS]
        gap = weighted(weights)(task, params, asked, said) - combine.composed(truth, jnp.asarray(weights, jnp.float32))
        refused = (truth[:, ACTIONABLE] == 0).astype(jnp.float32)
        return {
            "eval/overrated": reduce.scalars(gap),
            "eval/benign_refused": reduce.scalars(refused, task.benign(asked)),
        }

    return measured


def build(settings: Settings, task: Replies = text.LANGUAGE) -> experiment.Plan:
    """The regressor fitted, then the policy trained on what it says by the arm's learner."""
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=LABELS)
    proxy = weighted(settings.weights)
    shared = {"steps": settings.steps, "learning_rate": settings.learning_rate}
    grpo = partial(attribute_rewards.grpo_stage, task, kl_weight=settings.kl_weight, **shared)
    learners = {
        "none": lambda: [],
        "grpo": lambda: [grpo(proxy)],
        "per_label": lambda: [grpo(every_label, advantages=one_by_one(settings.weights))],
        "ppo": lambda: [attribute_rewards.ppo_stage(task, proxy, kl_weight=settings.kl_weight, **shared)],
        "dpo": lambda: [attribute_rewards.dpo_stage(task, proxy, **shared)],
    }
    stages = [attribute_rewards.fit_stage(task, draw_rated(settings.rated), fit_labels, steps=settings.fit_steps)]
    stages += learners[settings.learner]()
    equal = Settings().weights  # every arm is judged by the same mean
    measure = strings.bound(attribute_rewards.measure, task, weighted(equal), (overrated(equal),))
    return experiment.Plan(start, tuple(stages), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Several labels improve all four qualities, safety alone costs actions, PPO and DPO are no better, and a head that
    goes by length is hacked."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, metric, "multi", "base") for metric in QUALITIES),
        experiment.smaller(results, "eval/benign_actionable", "safety", "multi"),
        *(experiment.greater(results, "eval/utility", "multi", arm, by=-0.02) for arm in ("ppo", "dpo")),
        experiment.greater(results, "eval/overrated", "hackable", "multi"),
        experiment.greater(results, "eval/utility", "multi", "hackable"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
