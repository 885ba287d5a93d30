"""More responses to hard prompts, and full-batch updates (DARS and DARS-B).

Paper:     Yang et al., "Depth-Breadth Synergy in RLVR: Unlocking LLM Reasoning Gains with Adaptive Exploration",
           arXiv:2508.13755.
Claim:     a group's cumulative advantage N 2a(1-a) favours prompts of medium accuracy a; re-sampling hard prompts until
           they weigh as much (ET) or more (HW) lifts pass@k with fewer responses than large groups; a large batch in
           several full passes lifts pass@1; together they lift both.
Equations: N responses give a (0 counts as 0.5/N); a < 1/2 draws ceil((wish - N S) / S) more, S = 2a(1-a), wish = N/2
           (et) or 2(1-a) N/2 (hw), up to the capacity; A = r - mean of the merged group; groups all right or all wrong
           are dropped; sum over tokens / (constant length). naive: the capacity for every prompt. breadth: twice the
           prompts, two full passes, half the iterations: as many updates and first-stage responses as grpo.
Left out:  batches of 3072 prompts, pass@128.
Expect:    eval/pass@16 dars_hw > naive, at fewer tokens, and > grpo, which draws a third; eval/accuracy breadth > grpo;
           dars_hw_breadth best.
Measure:   held-out Countdown with 3 numbers, 16 samples a problem; 8 seeds, equal updates; the columns
           rollouts and tokens count what was drawn of a pool's capacity: what a second draw would cost, for here the
           whole pool is sampled, so that nothing is saved in time or in processors. In the record pass@16 falls in
           every arm (0.79 before training; dars_hw ends at 0.68, naive at 0.62, grpo at 0.61): it is about who loses
           less of it, and no arm lifts it over the base.
Run:       python -m experiments.curriculum.dars
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from experiments.curriculum.parts.pool_rollout import make_pool_rollout
from experiments.parts import rare_search
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, pools
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


def first_stage(group_size: int, capacity: int) -> int:
    """A group; more are drawn for those that turn out to be hard."""
    return group_size


def all_at_once(group_size: int, capacity: int) -> int:
    """As many for every prompt."""
    return capacity


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 86
    prompts_per_step: int = 3072
    learning_rate: float = 5e-6
    group_size: int = 8  # responses of the first stage, N
    most: int = 64  # responses of both stages; 0: there is no second one
    begin: Callable[[int, int], int] = first_stage  # responses before the second draw
    wish: Callable[..., Array] = pools.hardness_weighted
    breadth: int = 1  # times as many prompts, in as many full-batch updates


EMBEDDED = {**rare_search.EMBEDDED, "group_size": 4, "most": 16, "eval_samples": 16}
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "most": 4, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 16,
}  # fmt: skip
ARMS = {
    "grpo": {"most": 0},
    "naive": {"begin": all_at_once},
    "dars_et": {"wish": pools.equal_treatment},
    "dars_hw": {},
    "breadth": {"most": 0, "breadth": 2},
    "dars_hw_breadth": {"breadth": 2},
}
METHOD = "dars_hw"
METRICS = ("eval/accuracy", "eval/pass@4", "eval/pass@16", "reward/valid_fraction")
CURVES = (*METRICS, "reward/mean", "tokens/generated", "policy/entropy")


def build(settings: Settings) -> experiment.Plan:
    """One online stage: a second draw for hard prompts, centred advantages of the merged group, full-batch passes."""
    found = recipes.bench(settings)
    capacity = settings.most or settings.group_size
    first = settings.begin(settings.group_size, capacity)

    def drawn(right):
        accuracy = jnp.sum(right[:, :first].astype(jnp.float32), axis=1) / first
        more = pools.extra_rollouts(accuracy, rollouts=first, most=capacity, wish=settings.wish)
        return jnp.arange(capacity, dtype=jnp.int32)[None, :] < first + more[:, None]

    def advantages(trajectories, rewards):
        members = rewards.valid.reshape(-1, capacity)
        values = pools.pool_advantages(rewards.value.reshape(-1, capacity), members).reshape(-1)
        return group.per_token(values, trajectories.mask)

    def mixed(trajectories, rewards):
        return group.group_spread(rewards.value, trajectories.group_ids, valid=rewards.valid) > 0

    estimate = builders.make_estimate(
        found.model.policy, advantages, reduction="constant", temperature=settings.temperature, keep=mixed
    )
    loss = builders.make_policy_loss(
        found.model.policy,
        partial(clipped_policy_loss, clip_low=0.2, clip_high=0.2),
        reduction="constant",
        length_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        anchor=builders.sampler_anchor if settings.breadth > 1 else builders.current_anchor,
    )
    rollout = recipes.rollout_of(settings, found, group_size=capacity)
    slots = make_pool_rollout(rollout, found, capacity=capacity, drawn=drawn)
    slots |= {"group_size": capacity, "prompts_per_step": settings.prompts_per_step * settings.breadth}
    slots |= {"estimate": estimate, "loss": loss, "updates_per_rollout": settings.breadth}
    online = curricula.make_single_turn_grpo(settings, found, **slots)
    # as many updates in every arm: each iteration of a broad one has several
    return curricula.make_single_turn_plan(
        settings, found, [experiment.Stage(online, settings.steps // settings.breadth)]
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """DARS raises pass@16 over as many responses to every prompt, breadth raises accuracy, both lose to neither."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/pass@16", "dars_hw", "naive"),
        experiment.greater(results, "eval/pass@16", "dars_hw", "grpo"),  # with three times its rollouts
        experiment.greater(results, "eval/accuracy", "breadth", "grpo"),
        experiment.greater(results, "eval/accuracy", "dars_hw_breadth", "breadth", by=-0.01),
        experiment.greater(results, "eval/pass@16", "dars_hw_breadth", "dars_hw", by=-0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
