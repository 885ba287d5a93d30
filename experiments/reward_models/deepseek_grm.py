"""A generative reward model whose sampled judgements are put to a vote (DeepSeek-GRM, SPCT).

Paper:     Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", arXiv:2504.02495.
Claim:     rejective fine-tuning and rule-based online RL make a judge that writes its critique first better, and better
           at being sampled many times: sums of scores over k judgements of shuffled answers beat one, and a meta reward
           model that picks the half to be summed beats the plain sum.
Equations: a report names its principle (reasoning or looks, by the question), checks each step, and gives scores that
           follow; correct iff a best answer alone has the highest score (pairs without a best one teach nothing), of a
           single answer iff its score, 1 or 0, is exact; rejective: own correct reports on pairs of which not all 3
           samples are correct; RL: +1 or -1, GRPO with G = 4 and k3 of weight 0.08; vote: sum of k scores, every other
           sample with the answers swapped; meta: the sum of the k / 2 with the highest p(correct). base: none of it;
           rejected: the first twice, the second time on reports of the judge that it made, in the place of RL;
           no_rejection: RL alone; direct: both, without a critique; no_principles: both,
           without the name; hinted, unhinted: both, from a base that has read hints which answer is the best; in hinted
           a pair without a right sample gets 3 more with a hint, which are learnt without it. panels: both, on one, two
           and four answers in equal shares, every sample in an order of its own; panels_rejected, panels_base likewise.
           Every arm trains a meta model on its own samples. Over pairs of one's own with --report words a report is
           free text of the loaded model: it is asked for principles, then critiques, then a line of scores, which alone
           is read (direct, no_principles: asked for less); it begins as it was loaded, or from the right reports of a
           model behind --writer ADDRESS.
Left out:  principles in free words in the embedded world, where a report names one of two; four answers in rows of
           one's own, which are pairs (panels there: one and two).
Expect:    eval/vote_1 rl > rejected > base and rl > no_principles; eval/vote_32 rl > base and > direct
           (the gain, 32 votes less 1, is at most what vote_1 leaves to 1: less for the better judge, whatever votes
           mend of independent slips, so that gains are shown and not compared); of rl above 0: eval/meta_gain (the meta
           model's vote of 32 less the plain one) and eval/shuffle_gain (the vote of 32 less one of 32 reports that all
           read the answers in one order); eval/vote_1 panels > panels_rejected.
Measure:   fresh pairs of worked sums with a best answer, in both orders (panels: of one, two and four, those of several
           with a best one); votes of k = 1, 2, 4, 8, 16 and 32; the judge can check a sum, then learns from careless
           reports; 250 updates before the meta model: 100 of rejection and 150 of RL, or of a second rejection
           (no_rejection 150, base none).
Run:       python -m experiments.reward_models.deepseek_grm
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import judge_pairs as toy
from experiments.reward_models.parts import judge_panels, judgements, report_judges
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes

OWN_ROWS = "experiments.reward_models.parts.worded_judges"
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


def rejection(task: Reports, settings, steps: int):
    """Rejective fine-tuning on reports of the judge as it is when this begins."""
    return report_judges.rejection_stage(
        task,
        steps=steps,
        prompts=settings.sampled,
        gold=strings.bound(toy.principled_scores, task),
        hints=settings.hints,
    )


def rejected_again(task: Reports, settings):
    """A second round of rejection, of as many updates as RL makes: what RL adds is not that it trains for longer."""
    return (rejection(task, settings, settings.steps),)


def nothing(task, settings):
    """No RL."""
    return ()


def as_pairs(task: Reports) -> Reports:
    """Pairs, as they are."""
    return task


def of_votes(every, gold):
    """Share of prompts with a best answer, or with one alone, that the first k reports judge rightly, for every k, of
    ``[P, 32, M]`` scores."""
    weighed = judgements.decided(gold)

    def share(scores, votes):
        said = judgements.by_majority(scores, gold, votes=votes)
        return reduce.scalars(judgements.picks_best(said, gold).astype(jnp.float32), weighed)

    # a single report of a pair is judged in both orders: the first two are of one each
    alone = 0.5 * (share(every[:, 0], 1) + share(every[:, 1], 1))
    return {"eval/vote_1": alone} | {f"eval/vote_{k}": share(judgements.voted(every[:, :k]), k) for k in VOTES[1:]}


scores_alone = partial(toy.draw_principled, named=False, reasons=False)
without_names = partial(toy.draw_principled, named=False)
ASKED = {scores_alone: "scores", without_names: "critique"}  # of a judge in words, where its arm begins with these
right_reports = partial(toy.draw_principled, error_rate=0.0, mistaken=0.0)


def both_orders(task: Reports, params, prompts, key):
    """``(scored, scores, trust)`` of 32 reports on each pair, the orders in turn, every other one swapped back."""
    return _two_halves(task, params, (prompts, task.swapped(prompts)), key, back=1)


def one_order(task: Reports, params, prompts, key):
    """As ``both_orders`` and ``any_order``, all in the order of the prompts: a liking for a place is in every vote."""
    return _two_halves(task, params, (prompts, prompts), key, back=None)


def _two_halves(task: Reports, params, orders, key, *, back: int | None):
    (prompts, _), half, found = orders, VOTES[-1] // 2, []
    for side, shown in enumerate(orders):
        said = strings.sample(task.world, params["judge"], shown, jax.random.fold_in(key, 1 + side), samples=half)
        _, scored, scores = toy.read_report(task, said)
        trust = report_judges.meta_logits(task, params["meta"], jnp.repeat(shown, half, axis=0), said)
        found.append((scored, scores[:, ::-1] if side == back else scores, trust))
    scored, scores, trust = (
        jnp.stack([x.reshape(prompts.shape[0], half, *x.shape[1:]) for x in side], axis=2)
        for side in zip(*found, strict=True)
    )
    rows = (prompts.shape[0], VOTES[-1])
    return scored.reshape(rows), scores.reshape(*rows, -1), trust.reshape(rows)


def any_order(task: Reports, params, prompts, key):
    """``(scored, scores, trust)`` of 32 reports on each panel, each of an order of its own and put back."""
    every = jnp.repeat(prompts, VOTES[-1], axis=0)
    shown, order = task.shuffled(jax.random.fold_in(key, 1), every)
    said = strings.sample(task.world, params["judge"], shown, jax.random.fold_in(key, 2))
    _, scored, scores = toy.read_report(task, said)
    trust = report_judges.meta_logits(task, params["meta"], shown, said)
    rows = (prompts.shape[0], VOTES[-1])
    return scored.reshape(rows), judgements.restored(scores, order).reshape(*rows, -1), trust.reshape(rows)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Group size and weight of the KL are the paper's; the judge is a small decoder made here."""

    steps: int = 150  # of RL
    then: Callable[..., tuple[experiment.Stage, ...]] = reinforced  # what follows the rejection
    learning_rate: float = 3e-4
    eval_every: int = 400  # the measurement is long: at the ends of stages only
    skilled_steps: int = 4000  # on right reports
    base_steps: int = 300  # on careless ones
    answers: Callable[[Reports], Reports] = as_pairs  # how many there are to judge
    # what a judge in words writes first; "": see ASKED
    asked: Literal["", "principles", "critique", "scores"] = ""
    judged: Callable = both_orders  # the reports of the measurement
    reports: Callable = toy.draw_principled
    rejection_steps: int = 100
    hints: int = 0  # samples with a hint of a pair that had no right one
    meta_steps: int = 150
    sampled: int = 1024  # prompts whose own reports the rejection and the meta model learn from
    measured: int = 128  # prompts of a measurement
    prompts_per_step: int = 16
    group_size: int = 4
    kl_weight: float = 0.08


SMOKE = {
    "steps": 2,
    "eval_every": 8,
    "skilled_steps": 2,
    "base_steps": 2,
    "rejection_steps": 2,
    "meta_steps": 2,
    "prompts_per_step": 2,
    "sampled": 32,
    "measured": 8,
}
PANELS = {"answers": judge_panels.of_task, "judged": any_order}
ARMS = {
    "base": {"then": nothing, "rejection_steps": 0},
    "rl": {},
    "rejected": {"then": rejected_again},
    "no_rejection": {"rejection_steps": 0},
    "direct": {"reports": scores_alone},
    "no_principles": {"reports": without_names},
    "hinted": {"reports": partial(toy.draw_principled, hints=0.2), "hints": 3},
    "unhinted": {"reports": partial(toy.draw_principled, hints=0.2)},
    "panels": PANELS,
    "panels_rejected": PANELS | {"then": rejected_again},
    "panels_base": PANELS | {"then": nothing, "rejection_steps": 0},
}
METRICS = ("eval/vote_1", "eval/vote_32", "eval/meta_32", "eval/vote_gain", "eval/meta_gain", "eval/shuffle_gain")
CURVES = (*(f"eval/vote_{k}" for k in VOTES), "eval/meta_32", "reward/mean")


def counted_votes(gold, scored, scores):
    """``(counted [P, k], scores [P, k, M])`` of reports on answers of gold scores ``[P, M]``, -1 where none stands: one
    that cannot be read, or has another number of scores, votes for no answer (of a single one: for neither side)."""
    there = gold[:, None, :] >= 0
    counted = scored & jnp.all((scores >= 0) == there, axis=2)
    return counted, jnp.where(counted[:, :, None], scores, jnp.where(there, 0.5, -1.0))


def measure(task: Reports, judged, prompts, params, key):
    """Votes of 1 to 32 reports, plain and chosen by the meta model, and of 32 in one order."""
    asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
    gold, half = toy.principled_scores(task, asked), VOTES[-1] // 2
    scored, scores, trust = judged(task, params, asked, key)
    counted, every = counted_votes(gold, scored, scores)
    right = of_votes(every, gold)
    said = judgements.by_majority(judgements.voted(every, trust, keep=half), gold, votes=half)
    meta = judgements.picks_best(said, gold).astype(jnp.float32)
    right["eval/meta_32"] = reduce.scalars(meta, judgements.decided(gold))
    scored, scores, _ = one_order(task, params, asked, jax.random.fold_in(key, 3))
    unshuffled = of_votes(counted_votes(gold, scored, scores)[1], gold)["eval/vote_32"]
    return right | {
        "eval/vote_gain": right["eval/vote_32"] - right["eval/vote_1"],
        "eval/meta_gain": right["eval/meta_32"] - right["eval/vote_32"],
        "eval/shuffle_gain": right["eval/vote_32"] - unshuffled,
        "eval/readable": reduce.scalars(counted.astype(jnp.float32).reshape(-1)),
    }


def build(settings: Settings, task: Reports = toy.SUMS) -> experiment.Plan:
    """The judge's stages as the arm has them, then the meta model on its samples."""
    task = settings.answers(task)
    if task.asking is not None:
        task = task.asking(settings.asked or ASKED.get(settings.reports, "principles"))
    start = report_judges.make_start(
        task, steps=settings.base_steps, draw=settings.reports, skilled=(settings.skilled_steps, right_reports)
    )
    stages = []
    if settings.rejection_steps:
        stages.append(rejection(task, settings, settings.rejection_steps))
    stages += settings.then(task, settings)
    stages.append(
        report_judges.meta_stage(
            task, steps=settings.meta_steps, prompts=settings.sampled, gold=strings.bound(toy.principled_scores, task)
        )
    )
    return experiment.Plan(start, tuple(stages), strings.bound(measure, task, settings.judged, settings.measured))


def claim(results: experiment.Results) -> experiment.Claim:
    """Each stage makes a better judge, RL one that votes better, best in turns; the meta model improves the vote."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/vote_1", "rl", "rejected"),
        experiment.greater(results, "eval/vote_1", "rejected", "base"),
        *(experiment.greater(results, "eval/vote_32", "rl", arm) for arm in ("base", "direct")),
        experiment.greater(results, "eval/vote_1", "rl", "no_principles"),
        *(experiment.above(results, metric, "rl", 0.0) for metric in ("eval/meta_gain", "eval/shuffle_gain")),
        experiment.greater(results, "eval/vote_1", "panels", "panels_rejected"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
