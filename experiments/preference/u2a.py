"""Which negative examples to unlearn, and how much (Unlearning to Align).

Paper:     Feng et al., "Bridging the Gap Between Preference Alignment and Machine Unlearning" (U2A), arXiv:2504.06659.
Claim:     negatives differ widely in worth; chosen and weighted by their effect they align at little cost.
Equations: inner: sum_i w_i log pi(y_i) + NLL of retained text; value: -<grad J, grad log pi(y_i)>, J the reward
           (implicit: with (H + 0.1)^-1 grad J); top: the 16 of highest positive value, weight 1; u2a: w <- clip(w +
           eta (value / largest - gamma), 0, 1). random: any 16; all: all; npo: -2/beta log sig(-beta log pi/ref).
           Values are found anew in each of 4 rounds; one in which none is positive changes nothing. J is the mean of
           256 samples; with --reward-steps N of a Bradley-Terry model of labelled pairs, as good as rm/accuracy and
           rm/correlation say, and in the record of the true reward.
Left out:  the paper's own stopping rule, in whose place a round stands that changes nothing (in every round of the
           first records one of 256 negatives is positive).
Expect:    eval/gold at eval/kl 0.3: u2a > random and u2a > all; eval/perplexity of retained text there: u2a < all.
           npo over all (4.08) and dpo on pairs (4.79) beat u2a (3.01) in the first record: both are parts here.
Measure:   true reward of four samples on each of 512 fresh prompts, perplexity of the behaviour's text; 256 negatives,
           half of them harmless text with duplicates. unlearn/bad: the share of the weight that lies on the half that
           is bad, of which random has one half. At 1.5 nats and at 1, where it was read before, runs of random had
           ended. Equal updates.
Run:       python -m experiments.preference.u2a [--world lists, where an item counts once]
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import preference_strings, shopping_lists, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import negatives
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference, supervised
from jaxrl_llm.types import Params


def explicit(task, policy, prompts, kept, gain):
    """The reward's gradient as it is."""
    return gain


def implicit(task, policy, prompts, kept, gain):
    """Through what the retained text lets the parameters do (bi-level)."""
    return negatives.solved(lambda p: -reduce.scalars(strings.sum_logp(task.world, p, prompts, kept)), policy, gain)


def unlearning(settings, task, loss, **sizes):
    """Ascent on weighted negatives."""
    rows = make_rows(task, settings.pool, settings.keep, settings.weigh, settings.gain, reward_by(settings))
    return strings.table_stage(rows, loss, **sizes)


def from_pairs(settings, task, loss, **sizes):
    """DPO in place of unlearning."""
    dpo = partial(preference.dpo_loss, beta=0.1)
    return preference_strings.preference_stage(task, dpo, preference_strings.fresh_pairs(task, settings.pool), **sizes)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """K and the price of a weight follow the sheet; the paper gives none."""

    steps: int = 20  # of a round
    eval_every: int = 10
    learning_rate: float = 5e-4
    reference_steps: int = 200
    reward_steps: int = 0  # of a reward model, by which negatives are worth; 0: by the true reward
    rounds: int = 4
    pool: int = 256
    keep: int = 16
    weigh: Callable = negatives.priced
    gain: Callable = explicit  # what a change of the parameters is worth
    bounded: float = 0.0  # beta of NPO; 0: plain ascent
    retain: float = 1.0
    learn: Callable[..., experiment.Stage] = unlearning


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "rounds": 1, "pool": 8, "keep": 2}
ARMS = {
    "all": {"weigh": negatives.uniform},
    "u2a": {},
    "top": {"weigh": negatives.best},
    "random": {"weigh": negatives.at_random},
    "implicit": {"gain": implicit},
    "npo": {"weigh": negatives.uniform, "bounded": 0.1},
    "dpo": {"learn": from_pairs},
}
WORLDS = {"strings": toy.STRINGS, "lists": shopping_lists.LISTS}
METRICS = ("eval/gold", "eval/perplexity", "eval/unseen", "unlearn/used", "unlearn/bad")
CURVES = ("eval/gold", "eval/perplexity", "eval/kl", "unlearn/used", "unlearn/bad", "unlearn/drift")


def true_reward(task: Preferences, params: Params) -> Callable[[Array, Array], Array]:
    """The law of the world, or the judge of rows of one's own."""
    return task.gold_reward


def learned_reward(task: Preferences, params: Params) -> Callable[[Array, Array], Array]:
    """What a reward model makes of responses, which stays as it is."""
    return partial(preference_strings.proxy, task, params)


def reward_by(settings: Settings) -> Callable[..., Callable[[Array, Array], Array]]:
    """Whose reward is to rise."""
    return learned_reward if settings.reward_steps else true_reward


@lru_cache(maxsize=16)
def make_rows(task: Preferences, pool: int, keep: int, weigh: Callable, worth: Callable, by: Callable):
    """Negatives with weights from the policy of the moment, and text to retain."""

    def rows(params, key):
        policy, keys = params["policy"], jax.random.split(key, 4)
        prompts, bad = task.draw_negatives(keys[0], pool)
        kept = task.draw_responses(keys[1], prompts)
        gain = preference_strings.reward_gradient(task, policy, keys[2], samples=pool, reward_of=by(task, params))
        gain = worth(task, policy, prompts, kept, gain)
        values = negatives.marginal_values(lambda p: strings.sum_logp(task.world, p, prompts, bad), policy, gain)
        ref = strings.sum_logp(task.world, params["reference"], prompts, bad)
        weights = weigh(values, keys[3], keep) * (pool / keep)
        return prompts, bad, kept, weights, ref, negatives.goes_on(weights), jnp.arange(pool) % 2 == 0

    return rows


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Rounds: score, choose, unlearn."""

    def loss(params, extras, batch):
        prompts, bad, kept, weights, ref, goes_on, harms = batch
        logp = strings.sum_logp(task.world, params["policy"], jnp.tile(prompts, (2, 1)), jnp.concatenate([bad, kept]))
        down, retained = jnp.split(logp, 2)
        terms = supervised.ascent_loss(down, weights)
        if settings.bounded:
            terms = supervised.npo_loss(down, ref, beta=settings.bounded)
        value = reduce.scalars(terms.loss) - settings.retain * reduce.scalars(goes_on * retained)
        return value / task.world.response_tokens, {
            "unlearn/used": reduce.scalars((weights > 0).astype(jnp.float32)),
            "unlearn/bad": jnp.sum(jnp.where(harms, weights, 0.0)) / jnp.maximum(jnp.sum(weights), 1e-6),
            "unlearn/drift": reduce.scalars(down - ref),
            "unlearn/stopped": 1.0 - reduce.scalars(goes_on),
            "tokens/trained": jnp.asarray(2.0 * bad.size, jnp.float32),
        }

    sizes = {"steps": settings.steps, "rows_per_step": 64, "learning_rate": settings.learning_rate}
    stage = settings.learn(settings, task, loss, **sizes)
    start = preference_strings.make_start(
        task, reference_steps=settings.reference_steps, reward_steps=settings.reward_steps
    )
    number = preference_strings.evaluated(task)
    measure = strings.bound(preference_strings.measure_text, task, evaluated=number)
    return experiment.Plan(start, (stage,) * settings.rounds, measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Weighted negatives align better than random ones and than all, and retained text stays likelier than with all."""
    fixed = experiment.at("eval/kl", 0.3)
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "u2a", "random", step=fixed),
        experiment.greater(results, "eval/gold", "u2a", "all", step=fixed),
        experiment.smaller(results, "eval/perplexity", "u2a", "all", step=fixed),
        experiment.greater(results, "eval/gold", "u2a", "npo", step=fixed),
        experiment.greater(results, "eval/gold", "u2a", "dpo", step=fixed),
    )


if __name__ == "__main__":
    experiment.main(__name__)
