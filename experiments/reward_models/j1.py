"""A judge that is made to think again (simple test-time scaling for judges).

Paper:     Chan et al., "J1: Exploring Simple Test-Time Scaling for LLM-as-a-Judge", arXiv:2505.11875.
Claim:     supervised training on reports with second thoughts, then RL on the verdict, makes a judge that improves when
           it is forced to think longer; before RL it does not.
Equations: R = 1[verdict right], 0 for a report that cannot be read; REINFORCE++ (rewards whitened over the batch, PPO
           clip, k3 of weight 0.001). Forced: the end of the thoughts is replaced by WAIT r times, or as often as five
           rounds allow; at r = 0 the report is the judge's own. sft: reports with one to five rounds of checks, equally
           often; sft_plain: with one; j1, rl_plain: then RL, where the sft arms go on with supervision.
Left out:  reports of a strong model (here a careless judge, whose rounds all err alike, so that no trend is taught), a
           penalty inside the rewards.
Expect:    eval/slope, accuracy against the log of the tokens thought at r = 0, 1, 2, 4, j1 > sft and j1 > 0;
           eval/accuracy_r0 j1 > sft.
Measure:   agreement with gold on fresh pairs in both orders at every r (five rounds are the longest report of training,
           so r = 2 and 4 differ for a judge that thinks briefly), majority of 4 as the parallel alternative, verdicts
           that one more round puts right and spoils; the judge can check a sum, and then learns from careless reports;
           equal updates. A report that never closes its thoughts is wrong at every r.
Run:       python -m experiments.reward_models.j1 [--world machines, whose answers are runs of an automaton]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import judge_machines, judgements, report_judges
from experiments.reward_models.parts import judge_pairs as toy
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes

ROUNDS = (0, 1, 2, 4)
right_reflections = partial(toy.draw_reflections, error=0.0)


def verdict(task: Reports, tagged, scored, scores, prompts):
    return (scored & judgements.three_way(scores, task.gold_scores(prompts))).astype(jnp.float32)


def over_the_batch(rewards, group_ids, *, valid):
    return group.reinforce_pp_advantages(rewards, valid=valid)


def reinforced(task: Reports, settings):
    """REINFORCE++ on the judge's verdicts."""
    return report_judges.rl_stage(
        task,
        verdict,
        steps=settings.steps,
        prompts_per_step=settings.rollouts_per_step,
        group_size=1,
        learning_rate=settings.learning_rate,
        kl_weight=settings.kl_weight,
        advantages=over_the_batch,
        world=task.long,
    )


def imitated(task: Reports, settings):
    """More reports of the careless judge."""
    return report_judges.supervised_stage(
        task, settings.reports, steps=settings.steps, rows_per_step=settings.rollouts_per_step,
        learning_rate=settings.learning_rate,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The judge is a small decoder made here; the paper's has 7B."""

    steps: int = 300
    learning_rate: float = 3e-4
    eval_every: int = 100
    skilled_steps: int = 4000  # on right reports
    base_steps: int = 300  # on careless ones
    reports: Callable = toy.draw_reflections  # of the careless judge at the start, some in several rounds
    learn: Callable[..., experiment.Stage] = reinforced
    rollouts_per_step: int = 256  # of one report each: with 64 rl_plain went from .45 to .53 in 135 updates, and fell
    kl_weight: float = 0.001


SMOKE = {"steps": 2, "eval_every": 2, "skilled_steps": 2, "base_steps": 2, "rollouts_per_step": 4}
ARMS = {
    "sft": {"learn": imitated},
    "j1": {},
    "sft_plain": {"learn": imitated, "reports": toy.draw_reports},
    "rl_plain": {"reports": toy.draw_reports},
}
# supervision goes on with what it has seen: whether judging can be learned shows on plain reports under RL
BED = experiment.Bed(metric="eval/accuracy_r0", baseline="rl_plain", judges=(("sft", "eval/accuracy_r0", 0.4),))
D_STAR = {"eval/slope": 0.04}  # of accuracy where the thoughts become e times as long
WORLDS = {"sums": toy.SUMS, "machines": judge_machines.MACHINES}
METRICS = ("eval/accuracy_r0", "eval/accuracy_r4", "eval/slope", "eval/majority_4", "eval/put_right", "eval/spoilt")
CURVES = ("eval/accuracy_r0", "eval/accuracy_r1", "eval/accuracy_r4", "eval/slope", "eval/tokens_r0", "reward/mean")


def measure(task: Reports, params, key):
    """Accuracy and tokens at every number of forced rounds, their trend, and what one more round changes."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), 96)
    prompts = jnp.concatenate([prompts, task.swapped(prompts)])  # a judge that likes a place gains nothing
    gold, right, tokens, figures = task.gold_scores(prompts), [], [], {}
    for rounds in ROUNDS:
        read, scores, spent = report_judges.forced_scores(
            task, params["judge"], prompts, jax.random.fold_in(key, 1), rounds=rounds
        )
        right.append(read & judgements.three_way(scores, gold))
        tokens.append(reduce.scalars(spent) + 1.0)
        figures[f"eval/accuracy_r{rounds}"] = reduce.scalars(right[-1].astype(jnp.float32))
        figures[f"eval/tokens_r{rounds}"] = tokens[-1]
    accuracy = jnp.stack([figures[f"eval/accuracy_r{rounds}"] for rounds in ROUNDS])
    read, scores = report_judges.judged(
        task, params["judge"], prompts, jax.random.fold_in(key, 2), samples=4, world=task.long
    )
    votes = jnp.sum(jnp.where(read, jnp.sign(scores[:, :, 0] - scores[:, :, 1]), 0.0), axis=1)
    majority = jnp.sign(votes) == jnp.sign(gold[:, 0] - gold[:, 1])
    changed = {f"eval/{name}": value for name, value in judgements.flips(right[0], right[1]).items()}
    slope = judgements.log_slope(accuracy, jnp.stack(tokens))
    return figures | changed | {"eval/slope": slope, "eval/majority_4": reduce.scalars(majority.astype(jnp.float32))}


def build(settings: Settings, task: Reports = toy.SUMS) -> experiment.Plan:
    """A judge from careless reports, then more of them or REINFORCE++ on its verdicts."""
    start = report_judges.make_start(
        task, steps=settings.base_steps, draw=settings.reports, skilled=(settings.skilled_steps, right_reflections)
    )
    return experiment.Plan(start, (settings.learn(task, settings),), strings.bound(measure, task))


def claim(results: experiment.Results) -> experiment.Claim:
    """Only after RL does forced thought help, and RL helps at once, too."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/slope", "j1", "sft"),
        experiment.greater(results, "eval/accuracy_r0", "j1", "sft"),
        experiment.above(results, "eval/slope", "j1", 0.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
