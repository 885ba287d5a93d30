"""Rules whose ratings are all over the scale count less in a composed reward (ENCORE).

Paper:     Li et al., "Multi-head Reward Aggregation Guided by Entropy", arXiv:2503.20995.
Claim:     rules with a high entropy of ratings tell preferences badly, so weights that fall with entropy, without any
           training, beat equal, random and learned weights, one rule, and one Bradley-Terry head.
Equations: H_k = entropy of the ratings of rule k over the data; w = softmax(-H / tau), tau = 2 (encore_05, encore_1:
           0.5, 1; anti: tau = -2); reward sum_k w_k psi_k(x, y), psi_k heads of one model fitted to the ratings by
           squared error. uniform: w = 1 / K; random: drawn anew for each seed; best_rule: the rule that ranks pairs
           best; learned: w fitted by Bradley-Terry on pairs; single: one head fitted on those pairs.
Left out:  safety benchmarks, language models as raters: ten rules rate five qualities, 0 to 0.9 of it at random.
Expect:    pair/accuracy encore > uniform, > anti and > learned; eval/utility of a policy trained on the reward encore >
           uniform; rule/correlation of H_k and the accuracy of rule k below -0.7, without which the
           weights have no reason.
Measure:   pairs and prompts that no model saw, judged by the true utility; 8 seeds, equal updates and rollouts.
Run:       python -m experiments.reward_models.encore
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import attribute_rewards, combine
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

LEVELS = 5
rate = partial(text.rate, rules=10, levels=LEVELS, noise=0.1)


def by_entropy(temperature):
    return lambda task, key, entropy: jnp.log(combine.entropy_weights(entropy, temperature=temperature))


def equal(task, key, entropy):
    return jnp.zeros_like(entropy)


def random(task, key, entropy):
    return jnp.log(jax.random.exponential(key, entropy.shape))


def best_rule(task: Replies, key, entropy):
    pairs = task.draw_pairs(key, 512)
    rated = [rate(task, key, pairs.prompts, x).astype(float) for x in pairs[1:]]
    return jnp.log(jax.nn.one_hot(jnp.argmax(combine.win_rates(*rated)), entropy.shape[0]) + 1e-9)


NOISY = partial(attribute_rewards.draw_pairs, flip_rate=0.1)


def draw(task: Replies, key, n):
    """Replies of the behaviour and their ratings."""
    prompts, responses = task.draw_behaviour(jax.random.fold_in(key, 0), n)
    return prompts, responses, rate(task, jax.random.fold_in(key, 1), prompts, responses) / (LEVELS - 1)


def ten_heads():
    """A head for every rule, fitted to ratings and weighted."""
    return draw, attribute_rewards.label_loss, attribute_rewards.mixed


def one_head():
    """One head, fitted to pairs."""
    return NOISY, attribute_rewards.preference_loss, attribute_rewards.first_output


def as_given(task, steps):
    """The weights stay what the arm's ``mix`` made them."""
    return ()


def from_pairs(task: Replies, steps):
    """The weights are fitted to pairs."""
    return (attribute_rewards.fit_stage(task, NOISY, attribute_rewards.mix_loss, steps=steps),)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """tau is the paper's; the models are decoders of 32 tokens made here."""

    steps: int = 60  # of GRPO on the composed reward
    learning_rate: float = 1e-3
    eval_every: int = 30
    base_steps: int = 150
    fit_steps: int = 200
    mix: Callable = by_entropy(2.0)  # logarithms of the weights
    judge: Callable = ten_heads  # how heads are fitted, and what they say together
    weigh: Callable[[int], tuple[experiment.Stage, ...]] = as_given  # how the weights are fitted


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2}
ARMS = {
    "uniform": {"mix": equal},
    "encore": {},
    "encore_1": {"mix": by_entropy(1.0)},
    "encore_05": {"mix": by_entropy(0.5)},
    "anti": {"mix": by_entropy(-2.0)},
    "random": {"mix": random},
    "best_rule": {"mix": best_rule},
    "learned": {"mix": equal, "weigh": from_pairs},
    "single": {"judge": one_head},
}
METRICS = ("pair/accuracy", "eval/utility", "rule/correlation", "eval/safe")
CURVES = ("pair/accuracy", "eval/utility", "eval/proxy", "kl/ref")


def correlation(task: Replies, params, key):
    pairs = task.draw_pairs(key, 512, sharpness=1e4)
    both = [attribute_rewards.scores(task, params["reward"], pairs.prompts, x) for x in (pairs.first, pairs.second)]
    return {"rule/correlation": combine.pearson(params["entropy"], combine.win_rates(*both))}


def build(settings: Settings, task: Replies = text.LANGUAGE) -> experiment.Plan:
    """Heads fitted to ratings (or one to pairs), weights from the arm, then a policy trained on the composed reward."""
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=10)

    def init(key):
        rated = jnp.round(draw(task, jax.random.fold_in(key, 3), 1024)[2] * (LEVELS - 1)).astype(int)
        entropy = combine.rating_entropy(rated, levels=LEVELS)
        return start(key) | {"entropy": entropy, "mix": settings.mix(task, jax.random.fold_in(key, 4), entropy)}

    table, fit, proxy = settings.judge()
    stages = (
        attribute_rewards.fit_stage(task, table, fit, steps=settings.fit_steps),
        *settings.weigh(task, settings.fit_steps),
        attribute_rewards.grpo_stage(task, proxy, steps=settings.steps, learning_rate=settings.learning_rate),
    )
    return experiment.Plan(init, stages, strings.bound(attribute_rewards.measure, task, proxy, (correlation,)))


def claim(results: experiment.Results) -> experiment.Claim:
    """Entropy tells which rules are bad; weights by it rank pairs better than equal, opposite and learned ones."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "pair/accuracy", "encore", arm) for arm in ("uniform", "anti", "learned")),
        experiment.greater(results, "eval/utility", "encore", "uniform"),
        experiment.below(results, "rule/correlation", "encore", -0.7),
        experiment.greater(results, "pair/accuracy", "encore", "single"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
