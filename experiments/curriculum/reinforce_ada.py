"""Responses drawn in rounds until a prompt has shown both sides (Reinforce-Ada).

Paper:     Xiong et al., "Reinforce-Ada: An Adaptive Sampling Framework for Reinforce-Style LLM Training",
           arXiv:2510.04996.
Claim:     drawing responses in rounds, leaving a prompt when it has enough of both kinds, and training on a balanced
           few of them beats groups of the same size, because far fewer groups lack a gradient.
Equations: up to 4 rounds of M responses; exit after a round with >= 1 right (ada_pos), or with >= n/2 right and >= n/2
           wrong (ada_balanced); of the pool train the first n/2 right and n/2 wrong, filled from the other class; A_i =
           r_i - mean of the whole pool (ada_local: of the trained ones; ada_std: over the pool's deviation). grpo_4, 8,
           16, 32: plain groups, A_i = r_i - mean; dapo: groups of 16 of which those with equal rewards are dropped
           from the token mean, A_i over the deviation; clip 0.2 / 0.28, token mean, no KL.
Left out:  the entropy bonus of 1e-4 (the released script has none), training on samples of earlier rounds' policies;
           the draws of new prompts for groups that dapo drops (rollouts are equal to those of grpo_16).
Expect:    eval/accuracy ada_balanced > grpo_16, which spends at least as many rollouts, > ada_pos and > grpo_4, which
           spends less than half; group/degenerate_fraction ada_balanced < grpo_4.
Measure:   held-out Countdown with 3 numbers; 8 seeds, equal updates. The columns rollouts and tokens count what
           was drawn of a pool, which is reward/valid_fraction of its capacity. They are what a sampler in rounds
           would draw: here the whole pool is sampled, so that nothing is saved in time or in processors.
Run:       python -m experiments.curriculum.reinforce_ada
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from experiments.curriculum.parts.pool_rollout import keep_members, make_pool_rollout
from experiments.parts import rare_search
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, pools
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


def all_drawn(drawn: Array, trained: Array) -> Array:
    """All responses of the pool."""
    return drawn


def the_trained(drawn: Array, trained: Array) -> Array:
    """Those that train."""
    return trained


def plain(values: Array, base: Array) -> Array:
    """``r - mean``."""
    return pools.pool_advantages(values, base)


def over_deviation(values: Array, base: Array) -> Array:
    """``(r - mean) / (std + 1e-4)``, both of the pool's compared members."""
    centred, weight = pools.pool_advantages(values, base), base.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1.0)
    deviation = jnp.sqrt(jnp.sum(weight * centred**2, axis=1, keepdims=True) / jnp.maximum(count - 1.0, 1.0))
    return centred / (deviation + 1e-4)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    prompts_per_step: int = 512
    group_size: int = 32  # capacity of a pool: rounds times responses of a round
    per_round: int = 8
    keep: int = 4  # responses of a pool that train
    done: Callable[..., Array] = pools.positive_exit
    among: Callable[[Array, Array], Array] = all_drawn  # whose rewards a response is compared with
    scale: Callable[[Array, Array], Array] = plain  # (rewards, compared) -> advantages, both [P, C]
    mixed_only: float = 0.0  # 1: pools of equal rewards are left out of the token mean


EMBEDDED = {**rare_search.EMBEDDED, "group_size": 16, "per_round": 4, "eval_samples": 8}
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "max_new_tokens": 6, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 8,
}  # fmt: skip
BALANCED = pools.make_balanced_exit(4)  # names the rule in the arms; how many it waits for is ``keep``, see exit_of
ARMS = {
    "grpo_4": {"group_size": 4, "per_round": 4, "done": pools.never_exit, "among": the_trained},
    "grpo_8": {"group_size": 8, "per_round": 8, "keep": 8, "done": pools.never_exit, "among": the_trained},
    "grpo_16": {"group_size": 16, "keep": 16, "done": pools.never_exit, "among": the_trained},
    "ada_pos": {},
    "ada_balanced": {"done": BALANCED},
    "ada_local": {"done": BALANCED, "among": the_trained},
    "ada_std": {"done": BALANCED, "scale": over_deviation},
    "grpo_32": {"group_size": 32, "per_round": 32, "keep": 32, "done": pools.never_exit, "among": the_trained},
    "dapo": {
        "group_size": 16,
        "keep": 16,
        "done": pools.never_exit,
        "among": the_trained,
        "scale": over_deviation,
        "mixed_only": 1.0,
    },
}
METHOD = "ada_balanced"
METRICS = ("eval/accuracy", "eval/pass@8", "group/degenerate_fraction", "reward/valid_fraction")
CURVES = (*METRICS, "reward/mean", "tokens/generated", "policy/entropy")


def exit_of(settings: Settings) -> Callable[..., Array]:
    """When a pool is done; a balanced one with as many of both kinds as train.

    Raises:
      UserError: for a balanced pool of fewer than two that train.
    """
    if settings.done is not BALANCED:
        return settings.done
    if settings.keep < 2:
        raise UserError(
            f"--keep {settings.keep}: a balanced pool trains on a right and a wrong response; give 2 or more"
        )
    return pools.make_balanced_exit(settings.keep)


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose groups are pools of fixed capacity with the responses that were really drawn."""
    found = recipes.bench(settings)
    capacity, keep = settings.group_size, settings.keep

    def grid(x):
        return x.reshape(-1, capacity)

    def members(rewards):
        right, drawn = grid(rewards.value > 0.5), grid(rewards.valid)
        counts = [jnp.sum((x & drawn).astype(jnp.int32), axis=1) for x in (right, ~right)]
        return pools.earliest(right, drawn, *pools.balanced_counts(*counts, keep))

    def trains(rewards):
        right, drawn = grid(rewards.value > 0.5), grid(rewards.valid)
        mixed = jnp.any(right & drawn, axis=1, keepdims=True) & jnp.any(~right & drawn, axis=1, keepdims=True)
        return mixed | (settings.mixed_only == 0)

    def advantages(trajectories, rewards):
        base = settings.among(grid(rewards.valid), members(rewards))
        values = settings.scale(grid(rewards.value), base).reshape(-1)
        return group.per_token(values, trajectories.mask)

    inner = builders.make_estimate(
        found.model.policy,
        advantages,
        temperature=settings.temperature,
        keep=lambda trajectories, rewards: (members(rewards) & trains(rewards)).reshape(-1),
    )

    def estimate(params, extras, trajectories, rewards):
        return keep_members(inner(params, extras, trajectories, rewards), members(rewards), keep)

    loss = builders.make_policy_loss(
        found.model.policy,
        partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28),
        temperature=settings.temperature,
    )
    rollout = recipes.rollout_of(settings, found, group_size=capacity)
    drawn = partial(pools.rounds_drawn, per_round=settings.per_round, done=exit_of(settings))
    slots = make_pool_rollout(rollout, found, capacity=capacity, drawn=drawn)
    online = curricula.make_single_turn_grpo(settings, found, estimate=estimate, loss=loss, **slots)
    return recipes.one_stage(settings, found, online)


def claim(results: experiment.Results) -> experiment.Claim:
    """Balanced adaptive pools beat plain groups of 16, as dear as they are, first-success pools and groups of 4."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "ada_balanced", "grpo_16"),
        experiment.greater(results, "eval/accuracy", "ada_balanced", "ada_pos"),
        experiment.greater(results, "eval/accuracy", "ada_balanced", "grpo_4"),  # with 2.5 times its rollouts
        experiment.smaller(results, "group/degenerate_fraction", "ada_balanced", "grpo_4"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
