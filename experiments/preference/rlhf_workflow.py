"""Rounds of sampling, judging and DPO against DPO on one offline table (RLHF workflow).

Paper:     Dong et al., "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863.
Claim:     pairs sampled from the policy of the moment and judged by a preference model beat the same number of pairs
           sampled beforehand.
Equations: in each round K responses a prompt, judged by a reward model r: chosen = argmax r, rejected = argmin r
           (any_two, best_random: other pairs), ties dropped; loss -(1 - e) log sig(h) - e log sig(-h), h = beta [(lp -
           lp_ref)(w) - (lp - lp_ref)(l)], e = 0.1, beta = 0.1. lp_ref: the first policy (init) or that of the round's
           start (current).
Left out:  the length penalty (all responses are equally long), other checkpoints as explorers, a pairwise judge.
Expect:    eval/gold: iterative > offline, and iterative > any_two.
Measure:   true reward of samples on fresh prompts; reward model trained on 1024 labels, 10 % flipped; three rounds of
           256 prompts; offline has all 768 prompts at once. 8 seeds, equal pairs, judged samples and updates.
Run:       python -m experiments.preference.rlhf_workflow
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm import experiment
from jaxrl_llm.curriculum import pairs as pair_choice
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta, smoothing and K are the paper's."""

    steps: int = 80  # of a round
    eval_every: int = 40
    learning_rate: float = 1e-3
    reference_steps: int = 200
    reward_steps: int = 200
    rounds: int = 3
    prompts_per_round: int = 256
    samples: int = 8
    rows_per_step: int = 32
    choose: Callable = pair_choice.best_and_worst
    anchor: Callable = preference_strings.reference_of
    beta: float = 0.1
    label_smoothing: float = 0.1


SMOKE = {
    "steps": 1, "eval_every": 1, "reference_steps": 2, "reward_steps": 2, "prompts_per_round": 4, "samples": 3,
    "rows_per_step": 4,
}  # fmt: skip
ARMS = {
    "offline": {"rounds": 1},
    "iterative": {},
    "iterative_current": {"anchor": preference_strings.policy_of},
    "best_random": {"choose": pair_choice.best_and_random},
    "best_second": {"choose": pair_choice.best_and_second},
    "any_two": {"choose": pair_choice.any_two},
}
METRICS = ("eval/gold", "eval/proxy", "eval/kl", "eval/unseen")
CURVES = (*METRICS, "pair/accuracy", "pair/chosen_drift")
ROUNDS = 3  # in which the budget of every arm is counted
flipped = partial(toy.draw_pairs, flip_rate=0.1)


@lru_cache(maxsize=16)
def make_pairs(prompts: int, samples: int, choose: Callable) -> Callable:
    """Samples of the policy at the start of a round, judged by the reward model."""

    def found(params, key):
        asked = toy.draw_prompts(jax.random.fold_in(key, 0), prompts)
        drawn = strings.sample(
            preference_strings.WORLD, params["policy"], asked, jax.random.fold_in(key, 1), samples=samples
        )
        scores = preference_strings.proxy(params, jnp.repeat(asked, samples, axis=0), drawn).reshape(prompts, samples)
        chosen, rejected, kept = choose(scores, jax.random.fold_in(key, 2))
        drawn = drawn.reshape(prompts, samples, -1)
        return toy.Pairs(asked, pair_choice.pick(drawn, chosen), pair_choice.pick(drawn, rejected)), kept

    return found


def build(settings: Settings) -> experiment.Plan:
    """``rounds`` stages of DPO, each on pairs of its own."""
    share = ROUNDS // settings.rounds
    stage = preference_strings.preference_stage(
        partial(preference.dpo_loss, beta=settings.beta, label_smoothing=settings.label_smoothing),
        make_pairs(share * settings.prompts_per_round, settings.samples, settings.choose),
        steps=share * settings.steps,
        rows_per_step=settings.rows_per_step,
        learning_rate=settings.learning_rate,
        anchor=settings.anchor,
    )
    start = preference_strings.make_start(
        reference_steps=settings.reference_steps, reward_steps=settings.reward_steps, draw_pairs=flipped
    )
    return experiment.Plan(start, (stage,) * settings.rounds, preference_strings.measure_parts)


def claim(results: experiment.Results) -> experiment.Claim:
    """Rounds of fresh pairs beat one offline table, and best against worst beats any two responses."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "iterative", "offline"),
        experiment.greater(results, "eval/gold", "iterative", "any_two"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
