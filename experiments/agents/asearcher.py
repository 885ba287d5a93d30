"""Search agents trained on episodes that outlive several versions of the weights (ASearcher).

Paper:     Gao et al., "Beyond Ten Turns: Unlocking Long-Horizon Agentic Search with Large-Scale Asynchronous RL",
           arXiv:2508.07976.
Claim:     long searches are learned only where training allows many turns; this makes few episodes very long, which is
           affordable where rollouts run independently of each other and of the trainer, and costs no accuracy.
Equations: r = F1 [every turn well formed], -0.5 for calling the question invalid; A = r - mean of the group, whitened
           over the tokens of groups whose rewards differ; loss -w min(rho A, clip(rho, 1 +- 0.4) A), rho = pi / pi_old,
           w = pi_old / mu, 0 above 5, one update a batch. asearcher: limit 8, tokens of weights 4 to 0 updates old;
           sync: weights never old; short: so, and limit 4; coupled: ratio and clip are around mu, and w = 1; no_filter:
           groups of equal rewards train as well.
Left out:  pages that a model summarises; blurring of details and checks of questions by models; thoughts; a judge.
           Here all of a batch begin with weights 4 updates old, and keys and values outlive a swap of the weights.
Expect:    eval/exact_many (4 and 5 hops, 8 turns allowed): sync > short, |asearcher - sync| < 0.05; flow/hours:
           asearcher < sync. Nothing is claimed of coupled and no_filter.
Measure:   held-out questions of 1 to 5 hops; 8 seeds, equal episodes and updates. flow/hours is simulated: turns as the
           policy takes them, each log-normal with median 20 s; asynchronously half of the machines sample, half as many
           episodes at a time, and half train, in twice the time.
Run:       python -m experiments.agents.asearcher
"""

import dataclasses
from collections.abc import Callable

import optax
from jaxtyping import Array

from jaxrl_llm import experiment, recipes
from jaxrl_llm.advantages import group, whiten
from jaxrl_llm.losses import off_policy, policy
from jaxrl_llm.planning import independent
from jaxrl_llm.rollout.versions import STALENESS
from jaxrl_llm.train import estimates
from jaxrl_llm.types import TokenTerms
from jaxrl_llm.worlds import arenas, toy_manyhop


def decoupled(logp, batch, clip, cap):
    """With one update a batch the policy is its own proximal policy."""
    rows = estimates.current_anchor(logp, batch), batch.sampler_logp, batch.advantages, batch.mask
    return off_policy.decoupled_policy_loss(logp, *rows, clip_low=clip, clip_high=clip, cap=cap)


def coupled(logp, batch, clip, cap):
    """One ratio corrects and is clipped."""
    rows = batch.sampler_logp, batch.advantages, batch.mask
    return policy.clipped_policy_loss(logp, *rows, clip_low=clip, clip_high=clip)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The paper's staleness and bounds; the model is a decoder of 32 numbers a token made here."""

    steps: int = 40
    learning_rate: float = 1e-3
    eval_every: int = 20
    prompts_per_step: int = 6
    group_size: int = 8
    base_steps: int = 300
    turns: int = 8  # at most, of an episode that trains
    eta: int = 4  # updates by which the weights that sample may lag
    loss: Callable[..., TokenTerms] = decoupled  # (logp, batch, clip, cap)
    clip: float = 0.4
    cap: float = 5.0
    keep: Callable[..., Array] = group.informative_groups  # with rewards that differ


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "sync": {"eta": 0}, "asearcher": {}, "coupled": {"loss": coupled}, "no_filter": {"keep": group.mean_within},
    "short": {"eta": 0, "turns": 4},
}  # fmt: skip
METRICS = ("eval/exact_many", "eval/exact", "eval/f1", "eval/searches_many", "flow/hours")
CURVES = (*METRICS, "reward/mean", "kl/sampler_mean", "policy/staleness", "policy/entropy")


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose weights are swapped while episodes run."""
    whole, size, eta = toy_manyhop.make_arena(), settings.group_size, settings.eta
    arena = arenas.shortened(whole, settings.turns)

    def keep(rows, rewards):
        return settings.keep(rewards.value, rows.group_ids, low=-1.0, high=1.0, valid=rewards.valid)

    def advantages(rows, rewards):
        mask = rows.mask & keep(rows, rewards)[:, None]
        return whiten.centred_token_advantages(rewards.value, rows.group_ids, mask, valid=rewards.valid)

    online = arenas.make_online(
        arena, score=toy_manyhop.score, tx=optax.adam(settings.learning_rate),
        estimate=estimates.make_estimate(
            arena.policy, advantages, keep=keep,
            row_extras=lambda extras, rows, rewards: {STALENESS: rows.extras[STALENESS]},
        ),
        loss=estimates.make_batch_loss(
            arena.policy, lambda logp, entropy, batch: settings.loss(logp, batch, settings.clip, settings.cap),
            diagnostics=lambda logp, entropy, batch: {f"policy/{STALENESS}": batch.extras[STALENESS]},
        ),
        prompts_per_step=settings.prompts_per_step, group_size=size,
        **arenas.swapping_actor(arena, lag=eta, group_size=size),
    )  # fmt: skip
    batch = settings.prompts_per_step * size
    hours = independent.make_hours(updates=settings.steps, batch=batch, most=settings.turns, staleness=eta)
    stage = experiment.Stage(online, settings.steps, recipes.lagged_extras(eta))
    measure = toy_manyhop.make_measure(whole, samples=3, more=hours)
    return experiment.Plan(arenas.make_base(whole, steps=settings.base_steps), (stage,), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """More turns in training answer questions of many hops; old weights cost no accuracy and save hours."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/exact_many", "sync", "short"),
        experiment.close(results, "eval/exact_many", "asearcher", "sync", within=0.05),
        experiment.smaller(results, "flow/hours", "asearcher", "sync"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
