"""Rounds of sampling, judging and DPO against DPO on one offline table (RLHF workflow).

Paper:     Dong et al., "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863.
Claim:     pairs sampled from the policy of the moment and judged by a preference model beat the same number of pairs
           sampled beforehand.
Equations: in each round K responses a prompt, scored by r(x, y) - c |y| with a Bradley-Terry reward r (no_penalty: r
           alone; round_robin: wins against the other K - 1 by a pairwise judge, both orders heard): chosen = argmax,
           rejected = argmin (any_two, best_random, best_second: other pairs), ties dropped; loss -(1 - e) log sig(h) -
           e log sig(-h), h = beta [(lp - lp_ref)(w) - (lp - lp_ref)(l)], e = 0.1, beta = 0.1. lp_ref: the first policy
           (init) or that of the round's start (current). explorers: a quarter of the K each from the policy, the
           policy at temperatures 0.7 and 1.3, and the first checkpoint.
Left out:  large models. Differs from the paper in that the penalty's weight is what people like of a token here; over
           rows of one's own, where nobody knows that, c is 0 but for --penalty (no_penalty is then iterative): half a
           reward a token would only shorten texts.
Expect:    mean eval/gold over the budgets of eval/kl up to 4: iterative > offline, iterative > any_two, iterative >
           no_penalty, explorers > iterative; eval/length: iterative < no_penalty.
Measure:   the true worth of four samples on each of 512 prompts, which does not grow with length, though labels do;
           judges read 8192 labels, 10 % flipped (gate: judge/accuracy 0.75); three rounds of 256 prompts; offline has
           all 768 prompts at once, the first third with the pairs of the first round. Equal pairs, judged samples and
           updates. One point of a curve, where it first passes 4 nats, differs by 0.68 from seed to seed, so that 64 of
           them do not show a quarter of the gain; the mean of the way there, from measurements of every tenth update,
           is the same comparison at equal budgets with less of that.
Run:       python -m experiments.preference.rlhf_workflow; with --model DIR --data FILE on a model and rows of your own
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import pair_judges, varied_lengths
from jaxrl_llm import experiment, reduce
from jaxrl_llm.curriculum import pairs as pair_choice
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta, smoothing and K are the paper's."""

    steps: int = 80  # of a round
    eval_every: int = 10
    learning_rate: float = 3e-4
    reference_steps: int = 200
    reward_steps: int = 600
    rounds: int = 3
    prompts_per_round: int = 256
    samples: int = 8
    rows_per_step: int = 32
    choose: Callable = pair_choice.best_and_worst
    explore: Callable = varied_lengths.own_samples
    judge: str = "bt"
    penalty: float = 0.0  # of a token; EMBEDDED: what people like of one
    anchor: Callable = preference_strings.reference_of
    beta: float = 0.1
    label_smoothing: float = 0.1


EMBEDDED = {"penalty": varied_lengths.LIKING}
SMOKE = {
    "steps": 1, "eval_every": 1, "reference_steps": 2, "reward_steps": 2, "prompts_per_round": 4, "samples": 4,
    "rows_per_step": 4,
}  # fmt: skip
ARMS = {
    "offline": {"rounds": 1},
    "iterative": {},
    "iterative_current": {"anchor": preference_strings.policy_of},
    "no_penalty": {"penalty": 0.0},
    "explorers": {"explore": varied_lengths.explored},
    "round_robin": {"judge": "generative", "penalty": 0.0},
    "best_random": {"choose": pair_choice.best_and_random},
    "best_second": {"choose": pair_choice.best_and_second},
    "any_two": {"choose": pair_choice.any_two},
}
METRICS = ("eval/gold", "eval/length", "eval/kl", "judge/accuracy")
CURVES = ("eval/gold", "eval/length", "eval/kl", "pair/accuracy", "pair/chosen_drift")
BED = experiment.Bed(judges=(("iterative", "judge/accuracy", 0.75), ("round_robin", "judge/accuracy", 0.75)))
ROUNDS = 3  # in which the budget of every arm is counted
SCORES = {"bt": varied_lengths.by_scalar, "generative": varied_lengths.by_round_robin}


@lru_cache(maxsize=16)
def make_pairs(task: Preferences, settings: Settings, rounds: int) -> Callable:
    """Candidates of the explorers, judged and penalised: the prompts of so many rounds, all at the start of the first.

    The first of several rounds is that of one, sample for sample.
    """

    def of_round(params, key):
        asked = task.draw_prompts(jax.random.fold_in(key, 0), settings.prompts_per_round)
        drawn = settings.explore(task, params, asked, jax.random.fold_in(key, 1), settings.samples)
        scores = SCORES[settings.judge](task, params["judge"], asked, drawn)
        scores = varied_lengths.penalised(task, scores, drawn, weight=settings.penalty)
        chosen, rejected, kept = settings.choose(scores, jax.random.fold_in(key, 2))
        both = [pair_choice.pick(drawn, x) for x in (chosen, rejected)]
        anchor = settings.anchor(params)
        return asked, *both, *(strings.sum_logp(task.world, anchor, asked, x) for x in both), kept

    def rows(params, key):
        found = jax.lax.map(lambda k: of_round(params, jax.random.fold_in(key, k)), jnp.arange(rounds))
        return tuple(x.reshape(-1, *x.shape[2:]) for x in found)

    return rows


def measure(task: Preferences, judge: str, params, key):
    """The policy against the truth, the judge against people."""
    score = pair_judges.KINDS[judge][0]
    found = varied_lengths.measure(task, params, key)
    return found | varied_lengths.judge_accuracy(task, score, params, jax.random.fold_in(key, 7))


def build(settings: Settings, task: Preferences = varied_lengths.STRINGS) -> experiment.Plan:
    """``rounds`` stages of DPO, each on pairs of its own.

    Raises:
      UserError: for a number of rounds among which the budget of all arms cannot be divided.
    """
    if settings.rounds < 1 or ROUNDS % settings.rounds:
        raise UserError(f"--rounds {settings.rounds}: prompts and updates of {ROUNDS} rounds are the budget of every "
                        f"arm; give 1 or {ROUNDS}")  # fmt: skip

    def loss(params, extras, batch):
        prompts, *both, won, lost, kept = batch
        logp = strings.sum_logp(task.world, params["policy"], jnp.tile(prompts, (2, 1)), jnp.concatenate(both))
        chosen, rejected = jnp.split(logp, 2)
        numbers = {"beta": settings.beta, "label_smoothing": settings.label_smoothing}
        terms = preference.dpo_loss(chosen, rejected, won, lost, **numbers)
        tokens = sum(task.lengths(x) for x in both)
        return reduce.scalars(terms.loss, kept), {
            "pair/chosen_drift": reduce.scalars(chosen - won, kept),
            "pair/accuracy": reduce.scalars(terms.aux["accuracy"], kept),
            "tokens/trained": jnp.sum(jnp.where(kept, tokens, 0.0)),
        }

    share = ROUNDS // settings.rounds
    stage = strings.table_stage(
        make_pairs(task, settings, share), loss, steps=share * settings.steps,
        rows_per_step=settings.rows_per_step, learning_rate=settings.learning_rate,
    )  # fmt: skip
    start = varied_lengths.make_start(
        task, settings.judge, reference_steps=settings.reference_steps, reward_steps=settings.reward_steps
    )
    return experiment.Plan(start, (stage,) * settings.rounds, strings.bound(measure, task, settings.judge))


def claim(results: experiment.Results) -> experiment.Claim:
    """Rounds of fresh pairs beat one offline table; extremes, the penalty and the explorers each add to it."""
    fixed = experiment.up_to("eval/kl", 4.0)
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "iterative", "offline", step=fixed),
        experiment.greater(results, "eval/gold", "iterative", "any_two", step=fixed),
        experiment.greater(results, "eval/gold", "iterative", "no_penalty", step=fixed),
        experiment.greater(results, "eval/gold", "explorers", "iterative", step=fixed),
        experiment.smaller(results, "eval/length", "iterative", "no_penalty"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
