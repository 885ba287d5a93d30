"""A judge trained by the outcome of its judgements (JudgeLRM).

Paper:     Chen et al., "JudgeLRM: Large Reasoning Models as a Judge", arXiv:2504.00050.
Claim:     RL on judge-wise outcome rewards beats supervised judges, most where judging needs reasoning; the terms for
           the scores' closeness help.
Equations: R = S - 2 where the report is out of form; else S + 2 for the right relation (first >= second) of the scores,
           S - 1.5 for the wrong one, +1 for exact scores, +0.6 for a total error up to 2, +0.2 where they are as far
           apart as gold's. GRPO with k3 of weight 0.001. no_scores: without the last three; outcome: +1 or -1 for the
           relation alone; sft: supervised for as long; direct: supervised without reasoning, then RL; three_way, not
           of the paper: +1 or -1 for better, equal or worse, what is measured, as a control of the bed.
Left out:  the length terms (the released scripts switch them off); pairs of real answers.
Expect:    eval/accuracy judgelrm > sft; the gain over sft in eval/reasoned less that in eval/surface, seed by seed,
           above 0; eval/accuracy judgelrm > no_scores.
Measure:   agreement with gold (better, worse, equal) on fresh pairs of worked sums with a first error or a visible
           flaw; the judge can check a sum, and then learns from reports whose checks err at 15 %; equal updates. The
           bed is invalid unless sft agrees in 0.4 of the pairs that only their steps tell apart (eval/reasoned).
Run:       python -m experiments.reward_models.judgelrm [--world machines, whose answers are runs of an automaton]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import judge_machines, judgements, report_judges
from experiments.reward_models.parts import judge_pairs as toy
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

right_reports = partial(toy.draw_reports, error_rate=0.0)


def full(task: Reports, tagged, scored, scores, prompts):
    structure = judgements.structure_rewards(tagged, scored)
    return judgements.judge_rewards(structure, scores, task.gold_scores(prompts))


def no_scores(task: Reports, tagged, scored, scores, prompts):
    structure = judgements.structure_rewards(tagged, scored)
    return judgements.judge_rewards(structure, scores, task.gold_scores(prompts), score_terms=False)


def outcome(task: Reports, tagged, scored, scores, prompts):
    gold = task.gold_scores(prompts)
    same = (scores[:, 0] >= scores[:, 1]) == (gold[:, 0] >= gold[:, 1])
    return jnp.where(scored & same, 1.0, -1.0)


def three_way(task: Reports, tagged, scored, scores, prompts):
    return jnp.where(scored & judgements.three_way(scores, task.gold_scores(prompts)), 1.0, -1.0)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The paper's form of the reward and weight of the KL; the judge is a small decoder made here."""

    steps: int = 150
    learning_rate: float = 3e-4
    eval_every: int = 50
    skilled_steps: int = 4000  # on right reports
    base_steps: int = 300  # on careless ones
    reward: Callable | None = full  # None: supervised training goes on
    reports: Callable = toy.draw_reports  # of the careless judge at the start
    prompts_per_step: int = 8
    group_size: int = 8
    kl_weight: float = 0.001


SMOKE = {"steps": 2, "eval_every": 2, "skilled_steps": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "sft": {"reward": None},
    "judgelrm": {},
    "no_scores": {"reward": no_scores},
    "outcome": {"reward": outcome},
    "direct": {"reports": toy.draw_bare_reports},
    "three_way": {"reward": three_way},
}
# more careless reports teach sft nothing new, and outcome takes equal for better: whether judging can be learned shows
# on what is measured itself
BED = experiment.Bed(metric="eval/accuracy", baseline="three_way", judges=(("sft", "eval/reasoned", 0.4),))
WORLDS = {"sums": toy.SUMS, "machines": judge_machines.MACHINES}
METRICS = ("eval/accuracy", "eval/reasoned", "eval/surface", "eval/consistent", "eval/readable")
CURVES = ("eval/accuracy", "eval/reasoned", "eval/surface", "reward/mean", "kl/ref")


def build(settings: Settings, task: Reports = toy.SUMS) -> experiment.Plan:
    """A judge that has seen careless reports, then GRPO on the arm's reward."""
    start = report_judges.make_start(
        task, steps=settings.base_steps, draw=settings.reports, skilled=(settings.skilled_steps, right_reports)
    )
    if settings.reward is None:
        rows = settings.prompts_per_step * settings.group_size
        numbers = {"steps": settings.steps, "rows_per_step": rows, "learning_rate": settings.learning_rate}
        stage = report_judges.supervised_stage(task, toy.draw_reports, **numbers)
    else:
        stage = report_judges.rl_stage(
            task,
            settings.reward,
            steps=settings.steps,
            prompts_per_step=settings.prompts_per_step,
            group_size=settings.group_size,
            learning_rate=settings.learning_rate,
            kl_weight=settings.kl_weight,
        )
    return experiment.Plan(start, (stage,), strings.bound(report_judges.figures, task))


def claim(results: experiment.Results) -> experiment.Claim:
    """Outcome rewards make a better judge than supervision, above all on pairs that need reasoning; scores help."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "judgelrm", "sft"),
        experiment.gains_more(results, "eval/reasoned", "eval/surface", "judgelrm", "sft"),
        experiment.greater(results, "eval/accuracy", "judgelrm", "no_scores"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
