"""Learning from wrong answers alone (PSR, NSR, W-REINFORCE).

Paper:     Zhu et al., "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning", arXiv:2506.01347.
Claim:     training on wrong samples alone (NSR) improves pass@k at every k and keeps the model's diversity; training
           on right ones alone (PSR) raises pass@1 and hurts large k; up-weighting the negatives is best overall.
Equations: A = +lambda for a right sample, -1 for a wrong one, no baseline: reinforce lambda = 1, w_reinforce 0.1;
           w_twentieth 0.05, w_half 0.5, w_twice 2; psr and nsr update on right and on wrong samples alone; clipped
           surrogate 0.2, token mean, no KL.
Left out:  PPO, k up to 256 (here 16).
Expect:    eval/pass@16 nsr > psr and w_reinforce > psr; policy/entropy nsr > psr; eval/accuracy psr and nsr above the
           base model (step 0), eval/pass@16 psr below it.
Measure:   held-out Countdown, 16 samples a problem; 8 seeds, equal rollouts in every arm (the subsets of psr and nsr
           train on fewer tokens). Random legal steps are right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.nsr
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

from experiments.parts import rare_search
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, sign
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


def _signed(rewards: Array, group_ids: Array, *, valid: Array, **weights: float) -> Array:
    return sign.signed_advantages(rewards, valid=valid, **weights)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    prompts_per_step: int = 1024
    advantages: Callable[..., Array] = _signed
    samples: Callable[..., Array] | None = None  # sign.right_samples, sign.wrong_samples, or all
    clip: float = 0.2


EMBEDDED = {**rare_search.EMBEDDED, "eval_samples": 16}
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 16,
}  # fmt: skip
ARMS = {
    "grpo": {"advantages": group.group_normalized_advantages},
    "reinforce": {},
    "psr": {"samples": sign.right_samples},
    "nsr": {"samples": sign.wrong_samples},
    "w_reinforce": {"advantages": partial(_signed, right_weight=0.1)},
    "w_twentieth": {"advantages": partial(_signed, right_weight=0.05)},
    "w_half": {"advantages": partial(_signed, right_weight=0.5)},
    "w_twice": {"advantages": partial(_signed, right_weight=2.0)},
}
METRICS = ("eval/accuracy", "eval/pass@4", "eval/pass@16", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage: the arm says which samples count and with which sign and weight."""
    bench = recipes.bench(settings)
    chosen = settings.samples

    def advantages(trajectories, rewards):
        values = settings.advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            bench.model.policy,
            advantages,
            temperature=settings.temperature,
            keep=None if chosen is None else lambda trajectories, rewards: chosen(rewards.value),
        ),
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(clipped_policy_loss, clip_low=settings.clip, clip_high=settings.clip),
            temperature=settings.temperature,
        ),
        tx=optax.adam(settings.learning_rate),
    )
    return recipes.one_stage(settings, bench, online)


def claim(results: experiment.Results) -> experiment.Claim:
    """Wrong samples alone improve pass@k and keep entropy; right samples alone raise pass@1 and lose pass@16."""
    last = results.curve("psr", "eval/accuracy")[0][-1]
    gains = [experiment.greater(results, "eval/accuracy", arm, arm, step=(last, 0)) for arm in ("psr", "nsr")]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/pass@16", "nsr", "psr"),
        *gains,
        experiment.smaller(results, "eval/pass@16", "psr", "psr", step=(last, 0)),
        experiment.greater(results, "eval/pass@16", "w_reinforce", "psr"),
        experiment.greater(results, "policy/entropy", "nsr", "psr"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
