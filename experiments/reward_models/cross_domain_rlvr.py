"""A small judge distilled from a large one as a soft reward (RL with verifiable rewards across domains).

Paper:     Su et al., "Crossing the Reward Bridge: Expanding RL with Verifiable Rewards Across Diverse Domains",
           arXiv:2503.23829.
Claim:     where answers are free-form, rewards of a generative judge beat rules; a small judge distilled from the logs
           of a large one does as well as that one, and its probabilities serve at least as well as its verdicts.
Equations: r = P(yes) where it says yes, 1 - P(no) where it says no, 0 else (soft), or 1[yes] (binary); over the batch
           r~ = (r - mean) / std, 0 where all are equal; REINFORCE with a clip (rloo: leave-one-out baseline;
           reinforce_pp: REINFORCE++ with the group's mean as baseline). The small judge is a decoder that reads both
           numbers digit by digit and writes its verdict, trained on the large one's log. rule: 1 for the same number;
           rule_soft: shared digits (Jaccard); large: the judge that was distilled, wrong on 5 %, or a model of language
           behind --large-judge ADDRESS; raw: soft rewards as they are.
           At scale 0.01 of k3 to the policy at the start is a term of the loss (--kl-weight).
Left out:  here, judges of 7B and 72B parameters and domains beyond three kinds of arithmetic; embedded, KL.
Expect:    eval/accuracy small_soft > rule; small_soft no worse than small, and small no worse than large, by more than
           0.05: at eight seeds 0.042 is the least that other records could tell.
Measure:   held-out chains of 4 and 5 operations, right by residue; references are v or v + m by a coin, and the model
           is first taught to write either; each seed trains its judge; equal rollouts. The bed is invalid unless the
           judge of small_soft has 0.75 of judge/balanced (0.5: says always the same).
Run:       python -m experiments.reward_models.cross_domain_rlvr; at scale --model DIR --data FILE of any domain,
           --large-judge http://localhost:8000/v1 --large-judge-model NAME: the log that small judges learn is its
"""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array

from experiments.reward_models.parts import answer_judges, free_answers, large_judges, text_answers
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes

PUBLISHED = 160_000  # examples


def as_it_is(rewards, group_ids, *, valid):
    """No normalisation: the reward is the advantage."""
    return rewards


def over_the_batch(rewards, group_ids, *, valid):
    return group.batch_whitened(rewards, valid=valid)


def _distilled(settings, free, *, soft):
    """The judge that learns ``examples`` of the large one's log, wrong at its rate."""
    return answer_judges.make_generative(
        answer_judges.examples_of(settings, free, PUBLISHED),
        error_rate=settings.error_rate,
        worked=False,
        soft=soft,
        steps=settings.judge_steps,
        log=answer_judges.log_of(free),
    )


def small(settings, free):
    return _distilled(settings, free, soft=False)


def small_soft(settings, free):
    return _distilled(settings, free, soft=True)


def large(settings, free):
    return large_judges.large(settings, free, error_rate=settings.error_rate)


def rule(settings, free):
    return answer_judges.without_fitting(free.exact)


def rule_soft(settings, free):
    return answer_judges.without_fitting(free.shared)


def of_the_group(rewards, group_ids, *, valid):
    return group.reinforce_pp_baseline_advantages(rewards, group_ids, valid=valid)


@dataclasses.dataclass(frozen=True)
class Settings(large_judges.Settings):
    """The paper's values where they are known; see EMBEDDED for the small model."""

    judge: Callable = small_soft  # of the settings
    advantages: Callable[..., Array] = over_the_batch
    examples: int = 0  # of the large judge's log; 0: 160,000, of rows of one's own 4,000
    judge_steps: int = 400  # in which a small judge learns them
    error_rate: float = 0.05
    warm_steps: int = 0
    kl_weight: float = 0.01  # of k3 to the policy at the start; 0: no reference. The paper's is not known


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 44,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96, "warm_steps": 36, "examples": 8000,
    "judge_steps": 1600, "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "warm_steps": 2, "examples": 64,
    "judge_steps": 2,
}  # fmt: skip
ARMS = {
    "rule": {"judge": rule},
    "small_soft": {},
    "small": {"judge": small},
    "large": {"judge": large},
    "rule_soft": {"judge": rule_soft},
    "raw": {"advantages": as_it_is},
    "rloo": {"advantages": group.rloo_advantages},
    "reinforce_pp": {"advantages": of_the_group},
}
METHOD = "small_soft"
METRICS = ("eval/accuracy", "eval/pass@2", "reward/mean", "judge/false_positives", "judge/balanced")
CURVES = ("eval/accuracy", "reward/mean", "judge/false_positives", "judge/balanced", "policy/entropy", "eval/tokens")
# one who always says yes has 0.5 of it; of plain accuracy it has the policy's own, 0.79
BED = experiment.Bed(judges=(("small_soft", "judge/balanced", 0.75),))


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage for both forms of answers, then REINFORCE on the arm's judge."""
    free = large_judges.by_words(text_answers.make_free(settings), settings)
    judge = settings.judge(settings, free)
    stages = [
        free_answers.warm_stage(settings, steps=settings.warm_steps),
        answer_judges.judged_stage(settings, free, judge, advantages=settings.advantages, kl_weight=settings.kl_weight),
    ]
    plan = curricula.make_single_turn_plan(settings, free.bench, stages)
    return plan._replace(measure=recipes.make_measure(settings, free_answers.by_residues))


def claim(results: experiment.Results) -> experiment.Claim:
    """A judge beats the rule, a soft small one is no worse than a binary one, and that no worse than the large one."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "small_soft", "rule"),
        experiment.greater(results, "eval/accuracy", "small_soft", "small", by=-0.05),
        experiment.greater(results, "eval/accuracy", "small", "large", by=-0.05),
    )


if __name__ == "__main__":
    experiment.main(__name__)
