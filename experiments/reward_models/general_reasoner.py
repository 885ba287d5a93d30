"""A verifier that reasons before it compares answers (General-Reasoner).

Paper:     Ma et al., "General-Reasoner: Advancing LLM Reasoning Across All Domains", arXiv:2505.14652.
Claim:     RL without supervised data works beyond mathematics when a small generative verifier with a chain of thought
           compares the answers; without the thought it is misled, and a rule misses right answers.
Equations: R = -0.5 without an answer; [passed] (1 - 0.05 min(10, |tokens of the answer - tokens of the reference|));
           GRPO on the problems that the taught model solves in 1 to 7 of 8 samples, in either form. cot: a decoder
           reads both numbers, writes the canonical form of each and then its verdict; direct: the same decoder writes
           its verdict at once, from as many judged examples; no_length: without the price; all_problems: none is left
           out; rule: passed if the number is the same; oracle: passed if it is right; large: by a judge that is wrong
           on 5 %, or by a model of language behind --large-judge ADDRESS, whom cot and direct then imitate.
Left out:  here, a verifier of 1.5B parameters; the data pipeline but for its last filter; embedded, KL of 1e-4.
Expect:    eval/accuracy cot > direct > rule; judge/false_positives cot < direct.
Measure:   held-out chains of 4 and 5 operations, right by residue; references are v or v + m by a coin, and the model
           is first taught to write either; each seed trains its verifier; equal rollouts. The bed is invalid unless the
           verifier of cot has 0.75 of judge/balanced (0.5: says always the same).
Run:       python -m experiments.reward_models.general_reasoner; at scale --model DIR --data FILE, whose verifier reads
           the text of answers, and --large-judge http://localhost:8000/v1 --large-judge-model NAME, whom it imitates
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reward_models.parts import answer_judges, free_answers, large_judges, text_answers
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train import offline

PUBLISHED = 100_000  # examples


def cot(settings, free):
    return answer_judges.make_generative(
        answer_judges.examples_of(settings, free, PUBLISHED),
        error_rate=0.0,
        worked=True,
        soft=False,
        log=answer_judges.log_of(free),
    )


def direct(settings, free):
    return answer_judges.make_generative(
        answer_judges.examples_of(settings, free, PUBLISHED),
        error_rate=0.0,
        worked=False,
        soft=False,
        log=answer_judges.log_of(free),
    )


def large(settings, free):
    return large_judges.large(settings, free, error_rate=0.05)


def rule(settings, free):
    return answer_judges.without_fitting(free.exact)


def oracle(settings, free):
    return answer_judges.without_fitting(free.equivalent)


def mixed(rates: np.ndarray) -> np.ndarray:
    """Which problems have right and wrong samples; all of them where none has.

    >>> mixed(np.array([0.0, 0.5, 1.0])).tolist(), mixed(np.array([0.0, 1.0])).tolist()
    ([False, True, False], [True, True])
    """
    found = (rates > 0) & (rates < 1)
    return found if found.any() else np.ones(rates.shape, bool)


def rates_once_taught(settings) -> np.ndarray:
    """Shares of 8 samples that are right, of the model as RL finds it: the warm stage teaches the forms of answers.

    Problems are chosen once, as published data are: by one run of that stage, for all seeds.
    """
    return _rates(recipes.bench_identity(settings), settings.learning_rate, settings.warm_steps)


@lru_cache(maxsize=8)
def _rates(identity: tuple, rate: float, steps: int) -> np.ndarray:
    settings = dataclasses.replace(recipes.OnlineSettings(**dict(identity)), learning_rate=rate)
    found, key = free_answers.by_residues(settings), jax.random.key(23)
    stage = free_answers.warm_stage(settings, steps=steps)
    extras = stage.extras(found.model.params, key) if stage.extras is not None else {}
    params = jax.tree.map(jnp.copy, found.model.params)
    state = offline.init_state(stage.method, params, key, extras=extras)
    taught = offline.scan_steps(stage.method, state, steps)[0].params if steps else params
    rows = np.arange(found.train.tokens.shape[0])
    return curricula.pass_rates(
        found, found.model._replace(params=taught), rows, samples=8, max_new_tokens=settings.max_new_tokens
    )


@dataclasses.dataclass(frozen=True)
class Settings(large_judges.Settings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 700
    prompts_per_step: int = 1024
    compare: Callable = cot  # of the settings: who compares answers
    examples: int = 0  # that the verifier is distilled from; 0: 100,000, of rows of one's own 4,000
    length_weight: float = 0.05
    warm_steps: int = 0
    kl_weight: float = 1e-4  # of k3 to the policy at the start; 0: no reference
    keep: Callable | None = mixed  # which problems train, by the shares of 8 samples that are right; None: all


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 44,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96, "warm_steps": 60, "examples": 1000,
    "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "warm_steps": 2, "examples": 32,
}  # fmt: skip
ARMS = {
    "rule": {"compare": rule},
    "cot": {},
    "direct": {"compare": direct},
    "no_length": {"length_weight": 0.0},
    "all_problems": {"keep": None},
    "oracle": {"compare": oracle},
    "large": {"compare": large},
}
METHOD = "cot"
METRICS = ("eval/accuracy", "eval/pass@2", "judge/false_positives", "judge/balanced", "reward/mean")
CURVES = ("eval/accuracy", "judge/false_positives", "judge/balanced", "reward/mean", "policy/entropy", "eval/tokens")
# one who always says yes has 0.5 of it; of plain accuracy it has the policy's own, 0.79
BED = experiment.Bed(judges=(("cot", "judge/balanced", 0.75),))


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage for both forms of answers, then GRPO on the arm's verifier."""
    free = large_judges.by_words(text_answers.make_free(settings), settings)
    verifier = settings.compare(settings, free)

    def worth(said, value, answered, answers):
        return shaping.verified_rewards(
            said > 0.5,
            answered,
            jnp.where(answered, free.size(value), 0.0),
            free.size(answers["reference"]),
            length_weight=settings.length_weight,
        )

    slots = {}
    if settings.keep is not None:
        kept = settings.keep(rates_once_taught(settings))
        slots["sampler"] = curricula.make_chosen(kept, "solved in some and not in all of its samples")
    stage = answer_judges.judged_stage(
        settings, free, verifier, advantages=group.group_normalized_advantages, worth=worth,
        kl_weight=settings.kl_weight, **slots,
    )  # fmt: skip
    stages = [free_answers.warm_stage(settings, steps=settings.warm_steps), stage]
    plan = curricula.make_single_turn_plan(settings, free.bench, stages)
    return plan._replace(measure=recipes.make_measure(settings, free_answers.by_residues))


def claim(results: experiment.Results) -> experiment.Claim:
    """A verifier that reasons beats one that does not, which beats the rule; it accepts fewer wrong answers."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "cot", "direct"),
        experiment.greater(results, "eval/accuracy", "direct", "rule"),
        experiment.smaller(results, "judge/false_positives", "cot", "direct"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
