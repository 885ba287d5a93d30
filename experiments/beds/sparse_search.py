"""Test bed: a search whose right answers are rare, and mostly earn nothing (knob: sparsity).

Paper:     none; a bed for methods about sparse rewards: adaptive sampling, curricula, hints, credit.
Claim:     where the right answers to most problems earn nothing, drawing only problems that pay beats uniform draws.
Equations: r = [right] [problem pays]; of the training problems a share `sparsity`, chosen by number, never pays; A =
           (r - mean) / std of the group, loss -A log pi. paying: draws only problems that pay (the positive control);
           sparsity_n: the share in percent;
           at 0 the two draws are the same (dense, the positive control as well).
Left out:  responses above 18 tokens, which the bundled models do not write here; larger numbers.
Expect:    eval/accuracy: paying > grpo; sparsity_90 < dense.
Measure:   held-out Countdown with three numbers, judged without the knob; floor 0.15, ceiling 1; equal rollouts and
           updates; group/degenerate_fraction: groups without a signal.
Run:       python -m experiments.beds.sparse_search; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/sparse_search.py
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from experiments.beds.parts import rare_answers
from jaxrl_llm import experiment
from jaxrl_llm.curriculum.subset import make_subset
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import recipes
from jaxrl_llm.types import Sampler


def everywhere(pays) -> Sampler:
    return make_uniform()


@dataclasses.dataclass(frozen=True)
class Settings(rare_answers.Settings):
    """Values of the bed for a model of your own; see EMBEDDED for the small ones."""

    sparsity: float = 0.75  # share of the training problems whose right answers earn nothing
    draws: Callable[..., Sampler] = everywhere  # (which problems pay [N]) -> sampler


EMBEDDED = rare_answers.EMBEDDED
SMOKE = rare_answers.SMOKE
ARMS = {
    "grpo": {}, "paying": {"draws": make_subset},
    "dense": {"sparsity": 0.0}, "sparsity_50": {"sparsity": 0.5}, "sparsity_90": {"sparsity": 0.9},
}  # fmt: skip
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "policy/entropy")
BED = experiment.Bed(metric="eval/accuracy", chance=0.12, baseline="grpo", positive="dense", knob="sparsity")


def build(settings: Settings) -> experiment.Plan:
    """Plain group advantages; the reward is withheld from a fixed share of the problems."""
    bench = recipes.bench(settings)
    if not settings.sparsity:
        return rare_answers.build(settings)
    ids = jnp.arange(bench.train.tokens.shape[0], dtype=jnp.int32)
    pays = np.asarray(rare_answers.share(0, ids)) >= settings.sparsity

    def score(answers, rows):
        rewards = rare_answers.judge(bench)(answers, rows)
        return rewards._replace(value=jnp.where(jnp.asarray(pays)[rows.problem_ids], rewards.value, 0.0))

    return rare_answers.build(settings, score=score, sampler=settings.draws(pays))


def claim(results: experiment.Results) -> experiment.Claim:
    """Where three problems of four never pay, drawing only those that pay beats uniform draws."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "paying", "grpo"),
        experiment.smaller(results, "eval/accuracy", "sparsity_90", "dense"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
