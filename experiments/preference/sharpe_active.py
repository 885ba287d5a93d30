"""Choosing by a Sharpe ratio which pairs are worth a label (SHARP, W-SHARP).

Paper:     Belakaria et al., "Sharpe Ratio-Guided Active Learning for Preference Optimization in RLHF",
           arXiv:2503.22137.
Claim:     of few labels, those chosen by mean over deviation of the gradient that they would give teach DPO more than
           random ones.
Equations: p = sig(h), h the margin of DPO; SR = [q (1 - p) + (1 - q) p] / (sqrt(q (1 - q)) |1 - 2p|) with q = 1/2
           (sharp) or a judge's opinion (w_sharp); certainty: |h|; gradient: 2 p (1 - p) |grad lp(y1) - grad lp(y2)|.
           With q = p the ratio orders by |h| as q = 1/2 does, so that arm is none; entropy orders by |h| as well and
           is what sharp is under other ties: the noise of the bed. In the first round h = 0: sharp chooses at random.
Left out:  the paper's "return" and prior are a reconstruction from its abstract.
Expect:    eval/gold at eval/kl 2: w_sharp > random; sharp > random.
Measure:   true reward of samples on fresh prompts where each arm is 2 nats from the start; four rounds, in each 32
           labels (10 % flipped) out of 512 pairs and 30 updates on them; the judge is a reward model from 16384 labels
           that no arm trains on. Equal labels and updates. In 2 of the 16 seeds of the record an arm is 2 nats away
           within the first round, in which every score is of h = 0. The bed is invalid unless the judge orders 0.6 of
           pairs as gold does (rm/accuracy).
Run:       python -m experiments.preference.sharpe_active [--world lists, where an item counts once, or larger,
           a base of seven times the parameters; of a record also --bed NAME]
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, shopping_lists, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import active
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta is the paper's; budgets fit the small model."""

    steps: int = 30  # of a round
    eval_every: int = 10
    learning_rate: float = 3e-4
    reference_steps: int = 200
    reward_steps: int = 1000
    rounds: int = 4
    pool: int = 512
    labels: int = 32  # of a round
    judge_labels: int = 16384  # of the judge
    rows_per_step: int = 16
    worth: Callable = active.sharp
    beta: float = 0.1


SMOKE = {
    "steps": 1,
    "eval_every": 1,
    "reference_steps": 2,
    "reward_steps": 2,
    "pool": 8,
    "labels": 4,
    "judge_labels": 64,
}
ARMS = {
    "random": {"worth": active.any_pair},
    "sharp": {},
    "w_sharp": {"worth": active.w_sharp_judged},
    "entropy": {"worth": active.open_pair},
    "certainty": {"worth": active.certain_pair},
    "gradient": {"worth": active.expected_slope},
}
WORLDS = {"strings": toy.STRINGS, "lists": shopping_lists.LISTS, "larger": toy.LARGER}
METRICS = ("eval/gold", "eval/kl", "eval/unseen", "pair/chosen_drift", "rm/accuracy")
CURVES = ("eval/gold", "eval/kl", "eval/unseen", "pair/chosen_drift", "pair/accuracy")
BED = experiment.Bed(judges=(("w_sharp", "rm/accuracy", 0.6),))


@lru_cache(maxsize=16)
def make_pairs(task: Preferences, pool: int, labels: int, beta: float, worth: Callable):
    """The pairs of a fresh pool that are worth most to the policy of the moment, labelled."""

    def found(params, key):
        pairs = task.draw_pairs(jax.random.fold_in(key, 0), pool, flip_rate=0.1)
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (pool, 1))  # nobody sees who won
        first, second = jnp.where(turned, pairs.rejected, pairs.chosen), jnp.where(turned, pairs.chosen, pairs.rejected)
        unlabelled = pairs.prompts, first, second
        scores = worth(
            preference_strings.margins(task, params, *unlabelled, beta=beta),
            lambda: preference_strings.judged(task, params, *unlabelled),
            lambda: preference_strings.margin_slopes(task, params, *unlabelled),
        )
        chosen = active.top(scores, jax.random.fold_in(key, 2), labels)
        return jax.tree.map(lambda x: x[chosen], pairs), jnp.ones((labels,), bool)

    return found


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Rounds of choosing, labelling and DPO."""
    stage = preference_strings.preference_stage(
        task,
        partial(preference.dpo_loss, beta=settings.beta),
        make_pairs(task, settings.pool, settings.labels, settings.beta, settings.worth),
        steps=settings.steps,
        rows_per_step=settings.rows_per_step,
        learning_rate=settings.learning_rate,
    )
    sizes = {
        "reference_steps": settings.reference_steps,
        "reward_steps": settings.reward_steps,
        "labels": settings.judge_labels,
    }
    return experiment.Plan(
        preference_strings.make_start(task, **sizes),
        (stage,) * settings.rounds,
        strings.bound(preference_strings.measure_parts, task),
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Labels chosen by the Sharpe ratio, with a judge's prior or without, teach more than random ones."""
    fixed = experiment.at("eval/kl", 2.0)
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "w_sharp", "random", step=fixed),
        experiment.greater(results, "eval/gold", "sharp", "random", step=fixed),
        experiment.greater(results, "eval/gold", "w_sharp", "entropy", step=fixed),
    )


if __name__ == "__main__":
    experiment.main(__name__)
