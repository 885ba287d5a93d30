"""Entropy held at a target, kept groups carried over, hard problems weighted (Confucius3-Math).

Paper:     Wu et al., "Confucius3-Math: A Lightweight High-Performance Reasoning LLM for Chinese K-12 Mathematics
           Learning", arXiv:2506.18330.
Claim:     a term that holds the entropy at a target from both sides steadies it (TER); groups that pass the filter but
           exceed the batch, kept for the next one, save rollouts (RSR); a weight on hard groups lifts hard problems
           (PSHW); together they train better than GRPO.
Equations: loss + c |H - H*|, H the mean token entropy (bonus: - c H); batches of groups with 0 < mean r < 1 alone,
           surplus groups dropped (dapo) or put first in the next batch (rsr), no correction for their age; A_i = (R_i -
           mu)(1.256 - 0.256 mu) with R = 2 r - 1, mu its mean (pshw), in all other arms R_i - mu. ter_002, ter_010: c
           = 0.002 and 0.01; bonus_002, bonus_005, bonus_010 likewise. judged: all, and a response that does not end, or
           a fifth of whose runs of 8 tokens stood before, earns nothing. lengths: a third of the steps at 0.6 of the
           tokens with ter alone, then all three at 0.8, then at full length.
Left out:  a judge of the process beside the verifier (that of Countdown reads every step); token terms are a token
           mean in every arm where the paper has sums; H* is the entropy that this base model starts with; c is 0.01,
           ten times the paper's, for 120 updates (at 0.05 ter alone loses half of the accuracy, and a bonus of 0.05 all
           of it); the paper's ratios of lengths, for the shortest solution takes 12 of the 28 tokens.
Expect:    entropy/gap ter_010 < grpo; eval/accuracy ter_002 > bonus_002 and ter_010 > bonus_010, the term and the bonus
           at equal coefficients, so that the seeds that are judged pick none; filter/updated dapo_rsr > dapo, at an
           eval/accuracy no more than 0.02 lower; eval/accuracy_4 dapo_pshw > dapo; eval/accuracy all > grpo.
Measure:   held-out Countdown with 3 and 4 numbers; 8 seeds, equal rollouts in all arms: an iteration rolls out one
           batch, and an arm with a filter updates when it has a full one (filter/updated: updates per iteration).
Run:       python -m experiments.curriculum.confucius3
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts.repeats import repeated_share
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import entropy as entropies
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import refill
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards, Trajectories

RUN, REPEATED = 8, 0.2  # tokens of a run, and the share of runs seen before from which on a response fails


def as_verified(rewards: Rewards, trajectories: Trajectories) -> Rewards:
    return rewards


def well_formed(rewards: Rewards, trajectories: Trajectories) -> Rewards:
    """Nothing for a response that was cut off or repeats itself, however right."""
    fine = ~trajectories.truncated & (repeated_share(trajectories.tokens, trajectories.mask, n=RUN) < REPEATED)
    return rewards._replace(value=jnp.where(fine, rewards.value, 0.0))


def signed_advantages(rewards: Array, group_ids: Array, *, valid: Array | None = None) -> Array:
    """``R - mu`` of ``R = 2 r - 1``: those of the weighted arm without its weight, so that c means the same in both."""
    return group.hardness_weighted_advantages(rewards, group_ids, valid=valid, slope=0.0, constant=1.0)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 350
    target: float = 0.55  # entropy H*
    hold: float = 0.001  # coefficient c of the term that holds it
    bonus: float = 0.0  # coefficient of a plain entropy bonus
    overflow: Callable | None = refill.recovered  # of surplus groups, or refill.dropped; None: no filter
    advantages: Callable[..., Array] = group.hardness_weighted_advantages
    judge: Callable[..., Rewards] = as_verified  # of the verifier's rewards and the responses
    lengths: tuple[float, ...] = (1.0,)  # of max_new_tokens, in stages of equal steps


EMBEDDED = {
    "data": "countdown", "levels": (3, 4), "steps": 120, "eval_every": 20, "prompts_per_step": 6, "group_size": 8,
    "max_new_tokens": 28, "learning_rate": 1.5e-4, "eval_problems": 64, "eval_samples": 8, "train_problems": 2048,
    "target": 0.5, "hold": 0.01,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 8,
}  # fmt: skip
CENTRED = {"hold": 0.0, "advantages": signed_advantages}
PLAIN = {"overflow": None, **CENTRED}
ARMS = {
    "grpo": PLAIN,
    "bonus_002": {**PLAIN, "bonus": 0.002},
    "bonus_005": {**PLAIN, "bonus": 0.005},
    "bonus_010": {**PLAIN, "bonus": 0.01},
    "ter_002": {**PLAIN, "hold": 0.002},
    "ter_010": {**PLAIN, "hold": 0.01},
    "dapo": {"overflow": refill.dropped, **CENTRED},
    "dapo_rsr": CENTRED,
    "dapo_pshw": {"overflow": refill.dropped, "hold": 0.0},
    "all": {},
    "judged": {"judge": well_formed},
    "lengths": {"lengths": (0.6, 0.8, 1.0)},
}
METHOD = "all"
METRICS = ("eval/accuracy", "eval/accuracy_4", "entropy/gap", "filter/updated")
CURVES = ("eval/accuracy", "eval/accuracy_4", "eval/pass@8", "policy/entropy", "filter/updated", "reward/mean")


def build(settings: Settings) -> experiment.Plan:
    """Online stages of plain groups, or of batches of kept groups with the arm's overflow; one for each length."""
    found, parts = recipes.bench(settings), settings.lengths
    first = {"overflow": None, "advantages": signed_advantages} if len(parts) > 1 else {}
    steps = [settings.steps // len(parts)] * (len(parts) - 1)
    steps.append(settings.steps - sum(steps))
    stages = []
    for k, (part, count) in enumerate(zip(parts, steps, strict=True)):
        longest = max(1, round(part * settings.max_new_tokens))
        one = dataclasses.replace(settings, max_new_tokens=longest, **(first if k == 0 else {}))
        stages.append(stage_of(one, found, count))
    host_score = None if found.score else lambda rows: settings.judge(found.host_score(rows), rows)
    return curricula.make_single_turn_plan(settings, found, stages, more=curricula.by_level, host_score=host_score)


def stage_of(settings: Settings, found: recipes.Bench, steps: int) -> experiment.Stage:
    """So many steps of the settings' method at the settings' length."""
    policy, temperature, size = found.model.policy, settings.temperature, settings.group_size

    def terms(logp, entropy, batch):
        held = entropies.targeted_entropy_terms(entropy, batch.mask, target=settings.target)
        return settings.hold * held + settings.bonus * entropies.entropy_bonus_terms(entropy, batch.mask)

    def keep(trajectories, rewards):
        return group.group_spread(rewards.value, trajectories.group_ids, valid=rewards.valid) > 0

    def figures(batch, metrics):
        updated = batch.total > 0
        # the mean entropy of no token is none: an iteration without an update does not count
        entropy = jnp.where(updated, metrics["policy/entropy"], jnp.nan)
        gap = jnp.abs(entropy - settings.target)
        return {"policy/entropy": entropy, "entropy/gap": gap, "filter/updated": updated.astype(float)}

    loss = builders.make_policy_loss(policy, clipped_policy_loss, temperature=temperature, extra_terms=terms)
    estimate = builders.make_estimate(policy, builders.per_response(settings.advantages), temperature=temperature)
    slots, more = {"estimate": estimate}, {}
    if settings.overflow is not None:
        width = found.train.tokens.shape[1] + settings.max_new_tokens
        slots = refill.make_refill(estimate, keep, size, overflow=settings.overflow)
        more["extras"] = lambda params, key: {refill.POOL: refill.empty_pool(settings.prompts_per_step * size, width)}
    tx = refill.skip_empty(optax.adam(settings.learning_rate))
    if found.score is not None and settings.judge is not as_verified:
        slots["score"] = lambda answers, rows: settings.judge(found.score(answers, rows), rows)
    slots["whole_batch"] = "its mean entropy says which way it is held" if settings.hold else ""
    online = recipes.make_online(settings, found, loss=loss, tx=tx, figures=figures, **slots)
    return experiment.Stage(online, steps, **more)


def claim(results: experiment.Results) -> experiment.Claim:
    """The term holds the entropy, recovery saves rollouts, the weight lifts hard problems, and all three beat GRPO."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "all", "grpo"),
        experiment.smaller(results, "entropy/gap", "ter_010", "grpo"),
        experiment.greater(results, "eval/accuracy", "ter_002", "bonus_002"),
        experiment.greater(results, "eval/accuracy", "ter_010", "bonus_010"),
        experiment.greater(results, "filter/updated", "dapo_rsr", "dapo"),
        experiment.greater(results, "eval/accuracy", "dapo_rsr", "dapo", by=-0.02),
        experiment.greater(results, "eval/accuracy_4", "dapo_pshw", "dapo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
