"""Two tricks suffice: group mean with batch deviation, and token-level loss (Lite PPO).

Paper:     Liu et al., "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", arXiv:2508.08221.
Claim:     of the many techniques on offer two are enough: advantages centred by the group and divided by the
           deviation of the whole batch, and a loss averaged over tokens. With plain PPO clipping and no critic they
           beat GRPO and DAPO on base models.
Equations: lite_ppo: A = (r - mean_group) / std_batch, loss = sum over tokens / number of tokens. grpo: std_group and
           the mean of sequence means. dapo: clip-higher (0.28), token mean, groups of equal rewards and truncated
           responses left out of the loss.
           The factorial: advantages over std_group, std_batch, none (no_std) or centred by the batch (batch_mean), with
           sequence and token mean; clip_higher and batch_std_clip_higher: the same two deviations under the higher
           clip; signed: no_std with rewards -1 and 1, whose advantages, twice as large, Adam scales back: a control
           that has to end as no_std does. overlong: truncated responses do not train; tight, tight_overlong: grpo and
           overlong that write at most 0.83 of the tokens (15 of 18). shaped: dapo with its soft penalty of long
           responses, which begins at 15 of 18 tokens, so that it falls on right work too.
           dapo trains on fewer groups, so that rollouts and updates are equal; refilled: as the paper has it, prompts
           are drawn until the batch is full of groups that are kept, in as many updates fewer. refilled lacks the
           penalty and shaped the refill, so that DAPO is nowhere whole in the record; dapo_whole has both.
           grpo_once: grpo with one update a rollout, half of the updates: the stronger baseline where two cost more
           than they bring, which was so in the records of this task.
Left out:  difficulty splits and aligned models (--levels, --model); clip_higher in the other six cells.
Expect:    eval/accuracy: lite_ppo > grpo and lite_ppo > dapo.
Measure:   held-out Countdown, two updates for each rollout so that clipping acts; equal rollouts in every arm, equal
           updates in every arm but refilled, dapo_whole and grpo_once. At the full length fewer than 1 response in 100
           is truncated, so that overlong hardly acts and says nothing of the filter; at 15 tokens it is 28 of the
           base's 100, one in six of them right when it may end: tight_overlong - tight is the filter's effect. Every
           arm is measured at the full length. Random legal steps are right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.tricks_or_traps
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import rare_search
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rewards.shaping import overlong_penalty
from jaxrl_llm.train import refill
from jaxrl_llm.train.methods import builders


def keep_all(trajectories, rewards):
    """Every valid sequence trains."""
    return rewards.valid


def keep_informative(trajectories, rewards):
    """DAPO's two filters: groups whose rewards differ, and responses that ended."""
    useful = group.informative_groups(rewards.value, trajectories.group_ids, low=0.0, high=1.0, valid=rewards.valid)
    return useful & ~trajectories.truncated


def differing_groups(trajectories, rewards):
    """Groups whose rewards differ, whole."""
    return group.informative_groups(rewards.value, trajectories.group_ids, low=0.0, high=1.0, valid=rewards.valid)


def keep_ended(trajectories, rewards):
    """Responses that ended: the overlong filter."""
    return rewards.valid & ~trajectories.truncated


def batch_mean_advantages(rewards: Array, group_ids: Array, *, valid: Array) -> Array:
    """``(r - mean) / std``, both of the whole batch."""
    return group.batch_whitened(rewards, valid=valid)


def as_given(rewards: Array, trajectories, *, limit_tokens: int) -> Array:
    """0 or 1."""
    return rewards


def signed(rewards: Array, trajectories, *, limit_tokens: int) -> Array:
    """-1 or 1."""
    return 2.0 * rewards - 1.0


def punished(rewards: Array, trajectories, *, limit_tokens: int) -> Array:
    """DAPO's soft punishment: from three quarters of the longest response on."""
    length = jnp.sum(trajectories.mask.astype(jnp.int32), axis=1)
    return rewards + overlong_penalty(length, limit_tokens=limit_tokens, buffer_tokens=max(limit_tokens // 4, 1))


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    max_new_tokens: int = 8192
    updates_per_rollout: int = 2
    advantages: Callable[..., Array] = group.group_normalized_advantages
    reduction: str = "seq_mean"  # see reduce.tokens
    clip_high: float = 0.2
    keep: Callable[..., Array] = keep_all
    reward: Callable[..., Array] = as_given  # (rewards, trajectories, *, limit_tokens) -> rewards
    room: float = 1.0  # of max_new_tokens, in training alone
    overflow: Callable | None = None  # refill.dropped: a batch waits until it is full of informative groups


EMBEDDED = rare_search.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {},
    "grpo_once": {"updates_per_rollout": 1},
    "lite_ppo": {"advantages": group.lite_ppo_advantages, "reduction": "token_mean"},
    "batch_std": {"advantages": group.lite_ppo_advantages},
    "token_mean": {"reduction": "token_mean"},
    "dapo": {"reduction": "token_mean", "clip_high": 0.28, "keep": keep_informative},
    "shaped": {"reduction": "token_mean", "clip_high": 0.28, "keep": keep_informative, "reward": punished},
    "no_std": {"advantages": group.dr_grpo_advantages},
    "no_std_token_mean": {"advantages": group.dr_grpo_advantages, "reduction": "token_mean"},
    "batch_mean": {"advantages": batch_mean_advantages},
    "batch_mean_token_mean": {"advantages": batch_mean_advantages, "reduction": "token_mean"},
    "clip_higher": {"clip_high": 0.28},
    "batch_std_clip_higher": {"advantages": group.lite_ppo_advantages, "clip_high": 0.28},
    "overlong": {"keep": keep_ended},
    "tight": {"room": 0.83},
    "tight_overlong": {"room": 0.83, "keep": keep_ended},
    "signed": {"advantages": group.dr_grpo_advantages, "reward": signed},
    "refilled": {"reduction": "token_mean", "clip_high": 0.28, "keep": keep_ended, "overflow": refill.dropped},
    "dapo_whole": {
        "reduction": "token_mean", "clip_high": 0.28, "keep": keep_ended, "overflow": refill.dropped,
        "reward": punished,
    },
}  # fmt: skip
METHOD = "lite_ppo"
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (
    *METRICS, "reward/mean", "policy/entropy", "policy/clip_fraction", "group/degenerate_fraction",
    "length/truncated_fraction", "grad/norm",
)  # fmt: skip


def build(settings: Settings) -> experiment.Plan:
    """One online stage; the arm sets advantages, reduction, upper clip and filter."""
    bench, room = recipes.bench(settings), max(1, round(settings.room * settings.max_new_tokens))

    def advantages(trajectories, rewards):
        paid = settings.reward(rewards.value, trajectories, limit_tokens=room)
        values = settings.advantages(paid, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    estimate = builders.make_estimate(
        bench.model.policy,
        advantages,
        reduction=settings.reduction,
        temperature=settings.temperature,
        keep=settings.keep,
    )
    tx, slots, more = optax.adam(settings.learning_rate), {"estimate": estimate}, {}
    if settings.overflow is not None:
        rows = settings.prompts_per_step * settings.group_size
        width = bench.train.tokens.shape[1] + room
        slots = refill.make_refill(estimate, differing_groups, settings.group_size, overflow=settings.overflow)
        more["extras"] = lambda params, key: {refill.POOL: refill.empty_pool(rows, width)}
        tx = refill.skip_empty(tx)
    online = recipes.make_online(
        dataclasses.replace(settings, max_new_tokens=room),
        bench,
        **slots,
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(clipped_policy_loss, clip_high=settings.clip_high),
            reduction=settings.reduction,
            temperature=settings.temperature,
            anchor=builders.stored_anchor,
        ),
        tx=tx,
        updates_per_rollout=settings.updates_per_rollout,
    )
    return recipes.one_stage(settings, bench, online, **more)


def claim(results: experiment.Results) -> experiment.Claim:
    """Lite PPO is more accurate than GRPO, and than DAPO."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "lite_ppo", "grpo"),
        experiment.greater(results, "eval/accuracy", "lite_ppo", "dapo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
