"""A generative reward model whose sampled judgements are put to a vote (DeepSeek-GRM, SPCT).

Paper:     Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", arXiv:2504.02495.
Claim:     rejective fine-tuning and rule-based online RL make a judge that writes its critique first better, and better
           at being sampled many times: sums of scores over k judgements of shuffled answers beat one, and a meta reward
           model that picks the half to be summed beats the plain sum.
Equations: a report names its principle (reasoning or looks, by the question), checks each step, and gives scores that
           follow; correct iff a best answer alone has the highest score (pairs without a best one teach nothing);
           rejective: own correct reports on pairs of which not all 3 samples are correct; RL: +1 or -1, GRPO with G = 4
           and k3 of weight 0.08; vote: sum of k scores, every other sample with the answers swapped; meta: the sum of
           the k / 2 with the highest p(correct). base: none of it; rejected: the first alone; no_rejection: RL alone;
           direct: both, without a critique; no_principles: both, without the name; hinted, unhinted: both, from a base
           that has read hints which answer is the best; in hinted a pair without a right sample gets 3 more with a
           hint, which are learnt without it. Every arm trains a meta model on its own samples.
Left out:  principles in free words, one and four answers.
Expect:    eval/vote_1 rl > rejected > base and rl > no_principles; eval/vote_gain (32 votes less 1) rl > base;
           eval/vote_32 rl > direct; eval/meta_gain (the meta model's vote of 32 less the plain one) of rl above 0.
Measure:   fresh pairs of worked sums with a best answer, in both orders; votes of k = 1, 2, 4, 8, 16 and 32; equal
           updates before the meta model.
Run:       python -m experiments.reward_models.deepseek_grm
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import judge_pairs as toy
from experiments.reward_models.parts import judgements, report_judges
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes

VOTES = (1, 2, 4, 8, 16, 32)


def correct(task: Reports, tagged, scored, scores, prompts):
    return jnp.where(scored & judgements.picks_best(scores, toy.principled_scores(task, prompts)), 1.0, -1.0)


def reinforced(task: Reports, settings):
    """RL on whether a report picks the best answer."""
    stage = report_judges.rl_stage(
        task,
        correct,
        steps=settings.steps,
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        learning_rate=settings.learning_rate,
        kl_weight=settings.kl_weight,
    )
    return (stage,)


def nothing(task, settings):
    """No RL."""
    return ()


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Group size and weight of the KL are the paper's; the judge is a small decoder made here."""

    steps: int = 150  # of RL
    then: Callable[..., tuple[experiment.Stage, ...]] = reinforced  # what follows the rejection
    learning_rate: float = 1e-3
    eval_every: int = 400  # the measurement is long: at the ends of stages only
    base_steps: int = 600
    reports: Callable = toy.draw_principled
    rejection_steps: int = 100
    hints: int = 0  # samples with a hint of a pair that had no right one
    meta_steps: int = 150
    prompts_per_step: int = 16
    group_size: int = 4
    kl_weight: float = 0.08


SMOKE = {"steps": 2, "eval_every": 8, "base_steps": 2, "rejection_steps": 2, "meta_steps": 2, "prompts_per_step": 2}
ARMS = {
    "base": {"then": nothing, "rejection_steps": 0},
    "rl": {},
    "rejected": {"then": nothing},
    "no_rejection": {"rejection_steps": 0},
    "direct": {"reports": partial(toy.draw_principled, named=False, reasons=False)},
    "no_principles": {"reports": partial(toy.draw_principled, named=False)},
    "hinted": {"reports": partial(toy.draw_principled, hints=0.2), "hints": 3},
    "unhinted": {"reports": partial(toy.draw_principled, hints=0.2)},
}
METRICS = ("eval/vote_1", "eval/vote_32", "eval/meta_32", "eval/vote_gain", "eval/meta_gain")
CURVES = (*(f"eval/vote_{k}" for k in VOTES), "eval/meta_32", "reward/mean")


def of_votes(every, gold):
    """Share of pairs with a best answer that the first k reports pick, for every k, of ``[P, 32, 2]`` scores."""
    apart = gold[:, 0] != gold[:, 1]

    def share(scores):
        return reduce.scalars(judgements.picks_best(scores, gold).astype(jnp.float32), apart)

    # a single report is judged in both orders: the first two are of one each
    alone = 0.5 * (share(every[:, 0]) + share(every[:, 1]))
    return {"eval/vote_1": alone} | {f"eval/vote_{k}": share(judgements.voted(every[:, :k])) for k in VOTES[1:]}


def measure(task: Reports, params, key):
    """Votes of 1 to 32 reports, half of them on swapped answers, plain and chosen by the meta model."""
    asked, most = task.draw_prompts(jax.random.fold_in(key, 0), 128), VOTES[-1]
    gold, half = toy.principled_scores(task, asked), most // 2
    scores, trust, read = [], [], []
    for side, prompts in enumerate((asked, task.swapped(asked))):
        said = strings.sample(task.world, params["judge"], prompts, jax.random.fold_in(key, 1 + side), samples=half)
        _, scored, found = toy.read_report(task, said)
        trust.append(
            report_judges.meta_logits(task, params["meta"], jnp.repeat(prompts, half, axis=0), said).reshape(-1, half)
        )
        scores.append((found[:, ::-1] if side else found).reshape(-1, half, 2))
        read.append(scored)
    every = jnp.stack(scores, axis=2).reshape(-1, most, 2)  # the orders alternate
    trusted = jnp.stack(trust, axis=2).reshape(-1, most)
    right = of_votes(every, gold)
    meta = judgements.picks_best(judgements.voted(every, trusted, keep=half), gold).astype(jnp.float32)
    right["eval/meta_32"] = reduce.scalars(meta, gold[:, 0] != gold[:, 1])
    return right | {
        "eval/vote_gain": right["eval/vote_32"] - right["eval/vote_1"],
        "eval/meta_gain": right["eval/meta_32"] - right["eval/vote_32"],
        "eval/readable": reduce.scalars(jnp.concatenate(read).astype(jnp.float32)),
    }


def build(settings: Settings, task: Reports = toy.SUMS) -> experiment.Plan:
    """The judge's stages as the arm has them, then the meta model on its samples."""
    start = report_judges.make_start(task, steps=settings.base_steps, draw=settings.reports)
    stages = []
    if settings.rejection_steps:
        stages.append(
            report_judges.rejection_stage(
                task,
                steps=settings.rejection_steps,
                gold=strings.bound(toy.principled_scores, task),
                hints=settings.hints,
            )  # fmt: skip
        )
    stages += settings.then(task, settings)
    stages.append(
        report_judges.meta_stage(task, steps=settings.meta_steps, gold=strings.bound(toy.principled_scores, task))
    )
    return experiment.Plan(start, tuple(stages), strings.bound(measure, task))


def claim(results: experiment.Results) -> experiment.Claim:
    """Each stage makes a better judge, RL gains more from votes, and the meta model does not spoil the vote."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/vote_1", "rl", "rejected"),
        experiment.greater(results, "eval/vote_1", "rejected", "base"),
        experiment.greater(results, "eval/vote_gain", "rl", "base"),
        experiment.greater(results, "eval/vote_32", "rl", "direct"),
        experiment.greater(results, "eval/vote_1", "rl", "no_principles"),
        experiment.above(results, "eval/meta_gain", "rl", 0.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
