"""The probability of the reference answer under the model's own reasoning as the reward (RLPR).

Paper:     Yu et al., "RLPR: Extrapolating RLVR to General Domains without Verifiers", arXiv:2506.18254.
Claim:     how likely the policy finds the reference behind its own reasoning rewards answers that no rule can compare;
           the mean of token probabilities beats their product, and removing what could be guessed without reasoning and
           prompts whose rewards do not vary both help.
Equations: s = clip(mean_i p(y*_i | x, z) - mean_i p_0(y*_i | x), 0, 1), p_0 without reasoning the policy from which RL
           starts; R = 0.9 s + 0.1 [answered]; GRPO on prompts whose std of R is at least beta times a running mean of
           it, from the 11th step on. product: prod_i p_i; biased: without p_0; unfiltered: all prompts; rule: 1 for the
           same number. refill: twice as many prompts are drawn, and the first ones that pass fill the batch. penalty:
           less 0.2 times the share of 4-grams that were said before. verifree: R = prod_i p_i without p_0 and filter, A
           = R less the mean of the others of its group, on the tokens of the reasoning z alone, and R log p(y* | x, z)
           is raised as well; verifier: a generative judge says whether the answer is right.
Left out:  a verifier of language; the running mean forgets at 0.8, not at 0.99, within 40 steps.
Expect:    eval/accuracy (same residue) rlpr > rule, > product, > biased, > unfiltered, > verifree and > verifier.
Measure:   held-out chains of 4 and 5 operations; references are v or v + m by a coin, and the model is first taught to
           write either; equal updates on equally many prompts at most; refill draws twice the rollouts, for which rlpr
           with as many is no control. reward/mean is the truth for all arms, as in the files of judges: the number of
           the reference has a ceiling of a half, which an arm falls short of the more it prefers one form. reward/auc:
           how often what an arm is paid for ranks a right answer of a step above a wrong one (0.5: says nothing). The
           bed is invalid unless the judge of verifier has 0.75 of judge/balanced (0.5: says always the same).
Run:       python -m experiments.reward_models.rlpr
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts.repeats import repeated_share
from experiments.reward_models.parts import answer_judges, free_answers, text_answers
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.metrics import calibration
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import keep_reference, referred
from jaxrl_llm.types import declared


def as_scored(score, before):
    """No correction."""
    return score


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values for Qwen; see EMBEDDED for the small model."""

    prompts_per_step: int = 768
    how: Callable | None = free_answers.mean_probability  # None: the rule
    correct: Callable = free_answers.debiased  # for what the base gives the reference without reasoning
    beta: float = 0.5  # of the filter; 0: none
    forget: float = 0.99
    filter_from: int = 11  # the first step that is filtered, counted from 1
    warm_steps: int = 0
    draw: int = 1  # times as many prompts as train; those that pass the filter fill the batch
    penalty: float = 0.0  # of 4-grams that were said before
    # weight with which the reference's own likelihood is raised; nothing is corrected, and answers are no actions
    raised: float = 0.0
    advantages: Callable[..., Array] = group.group_normalized_advantages
    examples: int = 0  # that a generative judge is trained on, in the place of probabilities
    judge_steps: int = 400  # of its training


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 44,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96, "warm_steps": 36, "forget": 0.8,
    "judge_steps": 1600,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "warm_steps": 2, "filter_from": 1,
    "judge_steps": 2,
}  # fmt: skip
ARMS = {
    "rule": {"how": None, "beta": 0.0},
    "rlpr": {},
    "product": {"how": free_answers.product_probability},
    "biased": {"correct": as_scored},
    "unfiltered": {"beta": 0.0},
    "refill": {"draw": 2},
    "penalty": {"penalty": 0.2},
    "verifree": {
        "how": free_answers.product_probability,
        "beta": 0.0,
        "raised": 1.0,
        "advantages": group.rloo_advantages,
    },
    "verifier": {"examples": 8000, "beta": 0.0},
}
METHOD = "rlpr"
METRICS = ("eval/accuracy", "eval/pass@2", "filter/kept", "reward/mean")
CURVES = (
    "eval/accuracy",
    "filter/kept",
    "reward/mean",
    "reward/auc",
    "eval/tokens",
    "policy/entropy",
    "judge/balanced",
)
BED = experiment.Bed(judges=(("verifier", "judge/balanced", 0.75),))  # one who always says yes has 0.5


def filled(keep: Array, size: int, most: int) -> Array:
    """Of the rows that pass, those of the first ``most`` groups of ``size``: what fills a batch.

    >>> import jax.numpy as jnp
    >>> filled(jnp.array([False, False, True, True, True, True, True, True]), 2, 2).tolist()
    [False, False, True, True, True, True, False, False]
    """
    groups = keep.reshape(-1, size)[:, 0]
    rank = jnp.cumsum(groups.astype(jnp.int32))
    return keep & jnp.repeat(rank <= most, size)


class Spread(NamedTuple):
    """Extras of a state: the moving average of the deviation within groups, and the steps it has seen."""

    spread: Array
    step: Array


class Paid(NamedTuple):
    """Extras of a batch: what each row is paid, before any penalty, and whether its answer is equivalent."""

    paid: Array
    equivalent: Array


class Filtered(NamedTuple):
    """Extras of a batch: the deviation of each row's group, and whether it trains."""

    spread: Array
    kept: Array


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage for both forms of answers, then GRPO on the probability of the reference."""
    free, size = text_answers.make_free(settings), settings.group_size
    found, policy = free.bench, free.bench.model.policy
    judge = answer_judges.make_generative(
        max(settings.examples, 1),
        error_rate=0.0,
        worked=False,
        soft=False,
        steps=settings.judge_steps,
        log=answer_judges.log_of(free),
    )

    def reward(params, extras, rows):
        answers = jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers)
        if settings.how is None:
            return free.exact(*free.read(rows), answers).astype(jnp.float32)
        if settings.examples:
            (verifier,) = declared(answer_judges.Verified, extras)
            return jax.lax.stop_gradient(judge.judge(verifier, *free.read(rows), answers))
        score = free_answers.reference_score(free, policy, params, rows, how=settings.how)
        if not settings.raised:
            first = referred(extras)
            before = free_answers.reference_score(free, policy, first, rows, how=settings.how, reasoning=False)
            return 0.9 * settings.correct(score, before) + 0.1 * free.read(rows)[1].astype(jnp.float32)
        return score

    def estimate(params, extras, rows, rewards):
        value = paid = reward(params, extras, rows)
        if settings.penalty:
            value = value - settings.penalty * repeated_share(rows.tokens, rows.mask, n=4)
        spread = jnp.repeat(jnp.std(value.reshape(-1, size), axis=1, ddof=1), size)
        usual, step = declared(Spread, extras)
        keep = (spread >= settings.beta * usual) | (step < settings.filter_from - 1)
        keep = filled(keep, size, settings.prompts_per_step)
        own = Filtered(spread, keep.astype(jnp.float32))._asdict()
        if settings.raised:
            shown = free_answers.with_reference(free, rows)
            own |= free_answers.Likelihood(shown, settings.raised * value)._asdict()
            rows = rows._replace(mask=free_answers.reasoning_of(free, rows))
        read = free.read(rows)
        right = free.equivalent(*read, jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers))
        own |= Paid(paid, right)._asdict()
        if settings.examples:
            own |= answer_judges.Passed(value > 0.5, right, read[1])._asdict()
        inner = builders.make_estimate(
            policy,
            builders.per_response(settings.advantages),
            temperature=settings.temperature,
            keep=lambda rows, rewards: keep,
            row_extras=lambda extras, rows, rewards: own,
        )
        return inner(params, extras, rows, rewards._replace(value=value))

    def remember(state, batch, rows, rewards):
        usual, step = declared(Spread, state.extras)
        mean, first = jnp.sum(declared(Filtered, batch.extras).spread) / batch.mask.shape[0], step == 0
        moved = settings.forget * usual + (1 - settings.forget) * mean
        return state.extras | Spread(jnp.where(first, mean, moved), step + 1)._asdict()

    def figures(batch, metrics):
        kept = {"filter/kept": jnp.sum(declared(Filtered, batch.extras).kept) / batch.mask.shape[0]}
        kept["reward/auc"] = jnp.nan_to_num(calibration.auroc(*declared(Paid, batch.extras)), nan=0.5)
        return kept | (answer_judges.figures_of(batch, metrics) if settings.examples else {})

    drawn = dataclasses.replace(settings, prompts_per_step=settings.draw * settings.prompts_per_step)
    online = curricula.make_single_turn_grpo(
        drawn, found, estimate=estimate, remember=remember, score=free_answers.score_by_judge(free, free.equivalent),
        figures=figures,
    )  # fmt: skip
    if settings.raised:
        online = online._replace(loss=free_answers.with_likelihood(policy, online.loss))

    def extras(params, key):
        start = Spread(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))._asdict()
        if settings.examples:
            return start | answer_judges.Verified(judge.fit(key))._asdict()
        # p_0 can already write both forms: the loaded model was not taught them, and finds one of them unlikely
        return start | (keep_reference(params, key) if settings.how and not settings.raised else {})

    stage = experiment.Stage(online, settings.steps, extras)
    warm = free_answers.warm_stage(settings, steps=settings.warm_steps)
    plan = curricula.make_single_turn_plan(settings, found, [warm, stage])
    return plan._replace(measure=recipes.make_measure(settings, free_answers.by_residues))


def claim(results: experiment.Results) -> experiment.Claim:
    """The probability of the reference beats the rule, the product, the biased and the unfiltered form, and rivals."""
    others = ("rule", "product", "biased", "unfiltered", "verifree", "verifier")
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "eval/accuracy", "rlpr", arm) for arm in others),
    )


if __name__ == "__main__":
    experiment.main(__name__)
