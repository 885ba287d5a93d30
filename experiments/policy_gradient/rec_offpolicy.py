"""Group-relative REINFORCE on stale samples: clipping matters, importance sampling does not (REC and RED).

Paper:     Yao et al., "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm", arXiv:2509.24203.
Claim:     REINFORCE with a group baseline follows from a regularised surrogate that never asks where samples came
           from. Clipping is what keeps stale samples safe; the importance ratio can be dropped; dropping excess
           negatives or up-weighting positives is as sound, and faster.
Equations: loss = -A W M logp over tokens, A = r - mean. reinforce: W = M = 1; one_side_is: PPO's M and W = rho (the
           gradient of GRPO); one_side: PPO's M, W = 1; two_sides, ring: other M; sequence: PPO's M on the ratio of the
           whole sequence; red_drop: excess negatives dropped; red_weight: W = exp(A); opmd: A = (r - tau log mean
           exp(r / tau)) / (1 + tau); asymre: A = r - mean + 0.1, M = W = 1. reinforce_4, one_side_4, reinforce_1: the
           sampler is renewed every 4 updates, or is the policy.
Left out:  lagged in place of periodic synchronisation.
Expect:    with the sampler renewed every 20 updates: eval/accuracy one_side close to one_side_is (within 0.05), and
           one_side, red_drop and red_weight above reinforce, which unlearns there: these parts are of survival, and
           reinforce_1 shows what it does where samples are its own.
Measure:   held-out Countdown, sampler 0 to 19 updates old; 8 seeds, equal rollouts and updates in every arm.
Run:       python -m experiments.policy_gradient.rec_offpolicy
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

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
    advantages: Callable[..., Array] = group.dr_grpo_advantages
    keep: Callable[..., Array] = off_policy.keep_one_side
    weigh: Callable[..., Array] = off_policy.unweighted
    ratio_of: Callable[..., Array] = off_policy.token_ratio


EMBEDDED = {
    "data": "countdown", "levels": (3, 4), "steps": 240, "eval_every": 60, "prompts_per_step": 12,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 192,
}  # fmt: skip
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
    "opmd": {"keep": off_policy.keep_all, "advantages": partial(opmd_advantages, tau=1.0)},
    "asymre": {"keep": off_policy.keep_all, "advantages": asymre_advantages},
    "reinforce_1": {"keep": off_policy.keep_all, "sync_every": 1},
    "reinforce_4": {"keep": off_policy.keep_all, "sync_every": 4},
    "one_side_4": {"sync_every": 4},
}
METHOD = "one_side"
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "policy/entropy", "policy/clip_fraction", "kl/sampler_mean", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose samples come from a stale copy; the arm sets advantages, mask and weight."""
    bench = recipes.bench(settings)

    def advantages(trajectories, rewards):
        values = settings.advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(bench.model.policy, advantages, temperature=settings.temperature),
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(off_policy.rec_loss, keep=settings.keep, weigh=settings.weigh, ratio_of=settings.ratio_of),
            anchor=builders.sampler_anchor,
            temperature=settings.temperature,
        ),
        tx=optax.adam(settings.learning_rate),
        **recipes.stale_actor(settings.sync_every),
    )
    return recipes.one_stage(settings, bench, online, extras=recipes.behaviour_extras)


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
