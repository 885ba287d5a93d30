"""Group-relative REINFORCE on stale samples: clipping matters, importance sampling does not (REC and RED).

Paper:     Yao et al., "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm", arXiv:2509.24203.
Claim:     REINFORCE with a group baseline follows from a regularised surrogate that never asks where samples came
           from. Clipping is what keeps stale samples safe; the importance ratio can be dropped; dropping excess
           negatives or up-weighting positives is as sound, and faster.
Equations: loss = -A W M logp over tokens, A = r - mean. reinforce: W = M = 1; one_side_is: PPO's M and W = rho (the
           gradient of GRPO); one_side: PPO's M, W = 1; two_sides, ring: other M; sequence: PPO's M on the ratio of the
           whole sequence; red_drop: excess negatives dropped; red_weight: W = exp(A); opmd: A = (r - tau log mean
           exp(r / tau)) / (1 + tau); asymre: A = r - mean + 0.1, M = W = 1. gspo: PPO's M on the geometric mean of the
           ratios of a sequence, mean over tokens and then over sequences; wide: PPO's M from 0.4 to 3, in place of 0.8
           to 1.2. reinforce_n, one_side_n: samples of n updates ago; fresh: reinforce on samples of now.
Left out:  OPMD with the group's mean as baseline, and with (tau / 2) (log pi / pi_old)^2 beside REINFORCE; the
           regularisers k2, c (log pi / pi_old)^2, and forward KL, -c log pi, at every token. In the embedded arms every
           sample is 8 updates old, in place of a renewal every 20.
Expect:    eval/accuracy: one_side, red_drop and red_weight above reinforce, which gains nothing from such samples, and
           one_side close to one_side_is (within 0.05); fresh shows what reinforce does where samples are its own.
Measure:   held-out Countdown on the settings of the bed stale_sampler; equal rollouts and updates in every arm. Random
           legal steps are right for 0.12, ceiling 1. In the record opmd ends at 0 in all seeds of nano and at 0.01 of
           nano_1: its baseline lies above the mean, so that the advantages of a group add up to less than 0.
Run:       python -m experiments.policy_gradient.rec_offpolicy
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

from experiments.beds.parts import rare_answers
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.advantages.off_policy import asymre_advantages, opmd_advantages, red_drop_advantages
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import off_policy
from jaxrl_llm.train.methods import builders


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    prompts_per_step: int = 96
    sync_every: int = 20  # updates between renewals of the sampler
    lag: int = 0  # updates between every sample and its use; 0: what sync_every makes of it
    advantages: Callable[..., Array] = group.dr_grpo_advantages
    keep: Callable[..., Array] = off_policy.keep_one_side
    weigh: Callable[..., Array] = off_policy.unweighted
    ratio_of: Callable[..., Array] = off_policy.token_ratio
    reduction: str = "token_mean"  # see reduce.tokens


EMBEDDED = {**rare_answers.EMBEDDED, "lag": 8}  # of the bed stale_sampler, and its dose
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "reinforce": {"keep": off_policy.keep_all},
    "one_side_is": {"weigh": off_policy.importance_weights},
    "one_side": {},
    "red_drop": {"keep": off_policy.keep_all, "advantages": red_drop_advantages},
    "red_weight": {"keep": off_policy.keep_all, "weigh": off_policy.advantage_weights},
    "two_sides": {"keep": off_policy.keep_two_sides},
    "ring": {"keep": off_policy.keep_ring},
    "sequence": {"ratio_of": off_policy.sequence_ratio},
    "gspo": {"ratio_of": off_policy.mean_ratio, "reduction": "seq_mean"},
    "wide": {"keep": partial(off_policy.keep_one_side, clip_low=0.6, clip_high=2.0)},
    "opmd": {"keep": off_policy.keep_all, "advantages": partial(opmd_advantages, tau=1.0)},
    "asymre": {"keep": off_policy.keep_all, "advantages": asymre_advantages},
    "fresh": {"keep": off_policy.keep_all, "lag": 0, "sync_every": 1},
    "reinforce_2": {"keep": off_policy.keep_all, "lag": 2},
    "one_side_2": {"lag": 2},
    "reinforce_16": {"keep": off_policy.keep_all, "lag": 16},
    "one_side_16": {"lag": 16},
}
METHOD = "one_side"
# reinforce on old samples is the disease; the task must be learned from fresh ones
BED = experiment.Bed(baseline="fresh")
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "policy/entropy", "policy/clip_fraction", "kl/sampler_mean", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose samples come from a stale copy; the arm sets advantages, mask and weight."""
    bench = recipes.bench(settings)
    slots, extras = recipes.old_actor(settings.lag, settings.sync_every)

    def advantages(trajectories, rewards):
        values = settings.advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            bench.model.policy, advantages, reduction=settings.reduction, temperature=settings.temperature
        ),
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(off_policy.rec_loss, keep=settings.keep, weigh=settings.weigh, ratio_of=settings.ratio_of),
            anchor=builders.sampler_anchor,
            reduction=settings.reduction,
            temperature=settings.temperature,
        ),
        tx=optax.adam(settings.learning_rate),
        **slots,
    )
    return recipes.one_stage(settings, bench, online, extras=extras)


def claim(results: experiment.Results) -> experiment.Claim:
    """On stale samples the clip without importance sampling equals the clip with it, and beats plain REINFORCE."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.close(results, "eval/accuracy", "one_side", "one_side_is", within=0.05),
        experiment.greater(results, "eval/accuracy", "one_side", "reinforce"),
        experiment.greater(results, "eval/accuracy", "red_drop", "reinforce"),
        experiment.greater(results, "eval/accuracy", "red_weight", "reinforce"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
