"""Rules whose ratings are all over the scale count less in a composed reward (ENCORE).

Paper:     Li et al., "Multi-head Reward Aggregation Guided by Entropy", arXiv:2503.20995.
Claim:     rules with a high entropy of ratings tell preferences badly, so weights that fall with entropy, without any
           training, beat equal, random and learned weights, one rule, and one Bradley-Terry head.
Equations: H_k = entropy of the ratings of rule k over the data; w = softmax(-H / tau), tau = 2 (encore_05, encore_1:
           0.5, 1; anti: tau = -2); reward sum_k w_k psi_k(x, y), psi_k heads of one model fitted to the ratings by
           squared error. uniform: w = 1 / K; random: drawn anew for each seed; best_rule: the rule that ranks pairs
           best; learned: w fitted by Bradley-Terry on pairs; single: one head fitted on those pairs.
Left out:  safety benchmarks, language models as raters: of ten rules, two for each of five qualities, five go by a
           taste of their own in 0 to 0.4 of the replies, the others in 0.8 to 1; encore_careful, uniform_careful: none
           does, so that there is nothing to weigh.
Expect:    pair/accuracy encore > uniform, > anti and > learned; eval/utility of a policy trained on the reward encore >
           uniform. Without a correlation of H_k and the accuracy of rule k below -0.7 (rule/order, its negative, above)
           the weights have no reason, and without learned > uniform no weights can show: then the bed is invalid.
Measure:   pairs and prompts that no model saw, judged by the true utility, each seed with raters of its own; equal
           updates and rollouts. Heads of two seeds that no record has ranked 0.70 of pairs rightly with equal weights,
           0.72 by encore, 0.75 by encore_05, at a correlation of -0.84.
Run:       python -m experiments.reward_models.encore [--world briefings, where a topic is secret]
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
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

LEVELS = 5
CARELESS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.8, 0.9, 1.0, 1.0, 1.0)  # how often each rater goes by taste
RULES = len(CARELESS)


def _weighed(entropy, temperature):
    """A rule that gives everything one rating has entropy 0 and says nothing: it gets no weight."""
    weights = combine.entropy_weights(entropy, temperature=temperature, usable=entropy > 0)
    return jnp.log(jnp.where(jnp.any(entropy > 0), weights, 1.0) + 1e-9)


def by_entropy(temperature):
    return lambda task, key, entropy, rated: _weighed(entropy, temperature)


def equal(task, key, entropy, rated):
    return jnp.zeros_like(entropy)


def random(task, key, entropy, rated):
    return jnp.log(jax.random.exponential(key, entropy.shape))


def best_rule(task: Replies, key, entropy, rated):
    pairs = task.draw_pairs(key, 512)
    said = [rated(jax.random.fold_in(key, k), pairs.prompts, x).astype(float) for k, x in enumerate(pairs[1:])]
    return jnp.log(jax.nn.one_hot(jnp.argmax(combine.win_rates(*said)), entropy.shape[0]) + 1e-9)


NOISY = partial(attribute_rewards.draw_pairs, flip_rate=0.1)


def draw(task: Replies, tastes, key, n, *, careless):
    """Replies of the behaviour and their ratings."""
    prompts, responses = task.draw_behaviour(jax.random.fold_in(key, 0), n)
    said = text.rate(
        task, tastes, jax.random.fold_in(key, 1), prompts, responses, levels=LEVELS, careless=careless
    )  # fmt: skip
    return prompts, responses, said / (LEVELS - 1)


@lru_cache(maxsize=8)
def make_table(task: Replies, careless):
    """The ``extras`` of the fit: what the raters of the seed say of 1024 replies."""
    return lambda params, key: {"rows": draw(task, params["tastes"], key, 1024, careless=careless)}


def ten_heads(task: Replies, settings):
    """A head for every rule, fitted to ratings and weighted."""
    stage = attribute_rewards.fit_stage(task, NOISY, attribute_rewards.label_loss, steps=settings.fit_steps)
    return stage._replace(extras=make_table(task, settings.careless)), attribute_rewards.mixed


def one_head(task: Replies, settings):
    """One head, fitted to pairs."""
    stage = attribute_rewards.fit_stage(task, NOISY, attribute_rewards.preference_loss, steps=settings.fit_steps)
    return stage, attribute_rewards.first_output


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
    judge: Callable = ten_heads  # the stage that fits heads, and what they say together
    careless: tuple[float, ...] = CARELESS
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
    "uniform_careful": {"mix": equal, "careless": (0.0,) * RULES},
    "encore_careful": {"careless": (0.0,) * RULES},
}
BED = experiment.Bed(
    metric="pair/accuracy", baseline="uniform", chance=0.5, positive="learned", judges=(("encore", "rule/order", 0.7),),
    knob="careless",
)  # fmt: skip
# weights of ten heads that are as they are move a ranking by 0.05 at most, no matter what the fit has gained before
D_STAR = {"pair/accuracy": 0.02}
WORLDS = {"language": text.LANGUAGE, "briefings": attribute_briefings.BRIEFINGS}
METRICS = ("pair/accuracy", "eval/utility", "rule/correlation", "rule/order", "eval/safe")
CURVES = ("pair/accuracy", "eval/utility", "eval/proxy", "kl/ref")


def correlation(task: Replies, params, key):
    pairs = task.draw_pairs(key, 512, sharpness=1e4)
    both = [attribute_rewards.scores(task, params["reward"], pairs.prompts, x) for x in (pairs.first, pairs.second)]
    found = combine.pearson(params["entropy"], combine.win_rates(*both))
    return {"rule/correlation": found, "rule/order": -found}


def build(settings: Settings, task: Replies = text.LANGUAGE) -> experiment.Plan:
    """Heads fitted to ratings (or one to pairs), weights from the arm, then a policy trained on the composed reward."""
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=RULES)

    def init(key):
        tastes = text.draw_tastes(task, jax.random.fold_in(key, 5), RULES)
        said = draw(task, tastes, jax.random.fold_in(key, 3), 1024, careless=settings.careless)[2]
        entropy = combine.rating_entropy(jnp.round(said * (LEVELS - 1)).astype(int), levels=LEVELS)
        rated = partial(text.rate, task, tastes, levels=LEVELS, careless=settings.careless)
        mix = settings.mix(task, jax.random.fold_in(key, 4), entropy, rated)
        return start(key) | {"tastes": tastes, "entropy": entropy, "mix": mix}

    fit, proxy = settings.judge(task, settings)
    stages = (
        fit,
        *settings.weigh(task, settings.fit_steps),
        attribute_rewards.grpo_stage(task, proxy, steps=settings.steps, learning_rate=settings.learning_rate),
    )
    return experiment.Plan(init, stages, strings.bound(attribute_rewards.measure, task, proxy, (correlation,)))


def claim(results: experiment.Results) -> experiment.Claim:
    """Weights by entropy rank pairs better than equal, opposite and learned ones, and train a better policy."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "pair/accuracy", "encore", arm) for arm in ("uniform", "anti", "learned")),
        experiment.greater(results, "eval/utility", "encore", "uniform"),
        experiment.greater(results, "pair/accuracy", "encore", "single"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
