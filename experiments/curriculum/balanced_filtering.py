"""Every batch filled with prompts of intermediate difficulty (balanced online difficulty filtering).

Paper:     Bae et al., "Online Difficulty Filtering for Reasoning Oriented Reinforcement Learning", arXiv:2504.03380.
Claim:     a group teaches in proportion to p (1 - p); batches of only those groups whose measured accuracy p is
           intermediate exceed plain GRPO in 60 % of its training; easy or hard prompts alone do worse.
Equations: keep a group iff low <= mean_G r <= high (balanced: high = 1 - low); draw until the batch is full of kept
           groups, all from the policy that they train; then GRPO. drop_solved: 0 < p < 1 alone (dynamic sampling).
Left out:  the asynchronous sampler, groups left over from an older policy (dropped here), the choice of low.
Expect:    eval/accuracy of balanced, after at most 60 % of the updates of grpo, within 0.02 of grpo's last or above;
           at equal rollouts balanced > easy and balanced > hard.
Measure:   held-out arithmetic chains of 1 to 8 operations; 8 seeds, equal rollouts in all arms: an iteration rolls out
           one batch, and an arm updates when it has a full one (filter/updated: updates per iteration). The learning
           rate of all arms is that of the sweep on the same chains (results/sweeps/dr_grpo.json).
Run:       python -m experiments.curriculum.balanced_filtering
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import optax

from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.reduce import scalars
from jaxrl_llm.train import refill
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import no_extras
from jaxrl_llm.types import declared


def full_batches(settings, make, keep, width):
    """An update waits until a full batch has passed."""

    def pool(params, key):
        return {refill.POOL: refill.empty_pool(settings.prompts_per_step * settings.group_size, width)}

    return refill.make_refill(make(), keep, settings.group_size), pool


def what_passed(settings, make, keep, width):
    """An update trains on what passed, however little."""

    def kept(extras, trajectories, rewards):
        return refill.Passed(keep(trajectories, rewards))._asdict()

    return {"estimate": make(keep=keep, row_extras=kept)}, no_extras


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    group_size: int = 16
    low: float = 0.25  # share of right answers in a group that trains, at least
    high: float = 0.75  # and at most
    fill: Callable[..., tuple[dict, Callable]] = full_batches  # what becomes of groups outside the bounds


EMBEDDED = {
    "levels": (1, 2, 3, 4, 5, 6, 7, 8), "steps": 40, "eval_every": 8, "prompts_per_step": 6, "group_size": 8,
    "max_new_tokens": 64, "learning_rate": 2e-4, "eval_problems": 64,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"low": 0.0, "high": 1.0},
    "drop_solved": {"low": 0.001, "high": 0.999},
    "balanced": {},
    "easy": {"low": 0.5, "high": 1.0},
    "hard": {"low": 0.0, "high": 0.5},
    "no_refill": {"fill": what_passed},
}
METHOD = "balanced"
METRICS = ("eval/accuracy", "eval/pass@4", "filter/kept_fraction", "filter/updated")
CURVES = (*METRICS, "policy/entropy", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage: GRPO on groups within the arm's bounds, in full batches or on what is there."""
    bench = recipes.bench(settings)

    def keep(trajectories, rewards):
        ids, bounds = trajectories.group_ids, {"low": settings.low, "high": settings.high}
        return group.mean_within(rewards.value, ids, valid=rewards.valid, **bounds)

    def advantages(trajectories, rewards):
        values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    def figures(batch, metrics):
        kept, updated = (
            scalars(declared(refill.Passed, batch.extras).kept.astype(float)),
            (batch.total > 0).astype(float),
        )
        return {"filter/kept_fraction": kept, "filter/updated": updated}

    policy, temperature = bench.model.policy, settings.temperature
    loss = builders.make_policy_loss(policy, clipped_policy_loss, temperature=temperature)
    width = bench.train.tokens.shape[1] + settings.max_new_tokens
    make = partial(builders.make_estimate, policy, advantages, temperature=temperature)
    slots, extras = settings.fill(settings, make, keep, width)
    tx = refill.skip_empty(optax.adam(settings.learning_rate))
    online = recipes.make_online(settings, bench, loss=loss, tx=tx, figures=figures, **slots)
    return recipes.one_stage(settings, bench, online, extras=extras)


def claim(results: experiment.Results) -> experiment.Claim:
    """Balanced batches beat plain GRPO, reach its accuracy in 60 % of its updates, and beat easy or hard ones."""
    steps, updated = results.curve("balanced", "filter/updated")
    updates = np.cumsum(np.diff(steps, prepend=0) * updated.mean(0))
    last = results.curve("grpo", "eval/accuracy")[0][-1]
    within = [int(s) for s, n in zip(steps, updates, strict=True) if n <= 0.6 * last] or [0]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "balanced", "grpo"),
        experiment.greater(results, "eval/accuracy", "balanced", "grpo", by=-0.02, step=(within[-1], int(last))),
        experiment.greater(results, "eval/accuracy", "balanced", "easy"),
        experiment.greater(results, "eval/accuracy", "balanced", "hard"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
