"""Prompts of medium difficulty chosen by a value model (Prompt Curriculum Learning).

Paper:     Gao et al., "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135.
Claim:     a value model trained along with the policy finds prompts of success 1/2 far faster than rollouts do, and
           with them training is at least as accurate for fewer tokens.
Equations: of k m random prompts take the m with the least |V(x) - tau|; G responses each, p = mean r; A = r - mean, one
           on-policy step; then one step on sum (V(x) - p)^2 over the m prompts. V = sigmoid of a linear head on the
           base model's hidden state at the end of the prompt. tau_hard: tau = 0.3; frozen: V stays at 1/2, so any
           prompt will do; prefilter: prompts whose base pass rate lies in [0.25, 0.75]; dictionary: past success of
           each prompt, drawn by p (1 - p).
Left out:  a value model of the policy's size, dynamic sampling, tau = 0.7, the true p as an oracle, the study of the
           best batch size.
Expect:    group/degenerate_fraction pcl < frozen; eval/accuracy pcl > frozen and no worse than prefilter.
Measure:   held-out Countdown with 2 to 4 numbers; 8 seeds, equal rollouts.
Run:       python -m experiments.curriculum.pcl
"""

import dataclasses

import numpy as np
import optax

from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.balanced import make_balanced
from jaxrl_llm.curriculum.prompt_value import make_prompt_value
from jaxrl_llm.experiment import curricula, recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    prompts_per_step: int = 512
    group_size: int = 16
    choose: str = "value"  # value, prefilter, dictionary
    candidates: int = 4  # prompts valued for each one taken
    target: float = 0.5
    value_rate: float = 0.03  # step of the value head; 0 freezes it


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 120, "eval_every": 40, "prompts_per_step": 8, "group_size": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 1024,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 64, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 14,
}  # fmt: skip
ARMS = {
    "frozen": {"value_rate": 0.0},
    "prefilter": {"choose": "prefilter"},
    "dictionary": {"choose": "dictionary"},
    "pcl": {},
    "tau_hard": {"target": 0.3},
}
METRICS = ("eval/accuracy", "eval/accuracy_4", "eval/pass@8", "reward/mean", "group/degenerate_fraction")
CURVES = ("eval/accuracy", "eval/pass@8", "reward/mean", "group/degenerate_fraction", "tokens/generated")


def build(settings: Settings) -> experiment.Plan:
    """One online stage of centred advantages; the arm chooses how prompts are drawn."""
    found = recipes.bench(settings)
    if settings.choose == "value":
        tx = optax.adam(settings.value_rate)
        sampler = make_prompt_value(
            curricula.prompt_features(settings), tx, candidates=settings.candidates, target=settings.target
        )
    elif settings.choose == "prefilter":
        every = np.arange(found.train.tokens.shape[0])
        rates = curricula.sample_pass_rates(found, settings, every, samples=8)
        sampler = curricula.make_chosen((rates >= 0.25) & (rates <= 0.75), "solved in 25 to 75 % of its samples")
    else:
        sampler = make_balanced()
    online = curricula.make_grpo(settings, found, sampler=sampler, advantages=group.dr_grpo_advantages)
    return curricula.make_plan(settings, found, [experiment.Stage(online, settings.steps)], more=curricula.by_level)


def claim(results: experiment.Results) -> experiment.Claim:
    """A trained value model finds prompts with both outcomes and ends higher than random prompts, for no rollout."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "pcl", "frozen"),
        experiment.smaller(results, "group/degenerate_fraction", "pcl", "frozen"),
        experiment.greater(results, "eval/accuracy", "pcl", "prefilter", by=-0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
