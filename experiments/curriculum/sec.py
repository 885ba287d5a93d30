"""A bandit over difficulties that follows the absolute advantage (Self-Evolving Curriculum).

Paper:     Chen et al., "Self-Evolving Curriculum for LLM Reasoning", arXiv:2505.14970.
Claim:     drawing categories by what they teach now, measured by the mean absolute advantage, beats random draws and an
           order from easy to hard, above all on harder problems than those trained on.
Equations: category c ~ softmax(Q / tau), prompt uniform inside; r_c = mean |A| of its rollouts, which for 0/1 rewards
           and GRPO is 2 sqrt(p (1 - p) (G - 1) / G); Q_c <- alpha r_c + (1 - alpha) Q_c, r_c = 0 where c was not drawn
           (no_decay: Q_c stays). easy_to_hard, hard_to_easy: one category after another in equal shares of the run.
           progress: r_c = |mean reward - that of its last draw|. sec_rloo: A = r - mean of the others, r_c its mean
           |A|. Categories have two dimensions: how many numbers, and how large a target. sec_2d, uniform_2d: SEC-2D,
           one bandit over domains and difficulties, these categories and chains of 3, 4 and 5 operations, at half the
           temperature (0.2, the paper's there).
Left out:  draws without replacement, PPO. Of Countdown no level is new to the base, which was pre-trained on 2, 3 and
           4 numbers; of chains it has read five operations.
Expect:    eval/accuracy and eval/accuracy_4 (not trained on by RL): sec > uniform and sec > easy_to_hard. Of SEC-2D
           nothing is claimed.
Measure:   Countdown: trained on 2 numbers with small and large targets and 3 numbers with small and large targets (four
           categories, equal numbers of rollouts in all arms), held out 2, 3 and 4 numbers; 8 seeds.
           drawn/<k>: share of the responses that went to category k, easy first. The arms of SEC-2D, with room for
           longer responses, measure held-out chains too: chain/accuracy, and unseen/accuracy on 6 to 8 operations,
           which neither the base nor training has read.
Run:       python -m experiments.curriculum.sec
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.curriculum.parts import bandit, domains
from experiments.curriculum.parts.bandit import Arms
from experiments.curriculum.parts.categories import spending, target_categories
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.subset import on_rows
from jaxrl_llm.experiment import curricula, recipes


def mean_reward(rewards: Array, group_size: int) -> Array:
    """What ``make_progress`` follows."""
    return rewards


def leave_one_out_advantage(rewards: Array, group_size: int) -> Array:
    """Mean ``|A|`` of binary rewards, each compared with the mean of the others: ``2 p (1 - p) G / (G - 1)``.

    >>> [round(float(x), 4) for x in leave_one_out_advantage(jnp.array([0.0, 0.5, 1.0]), 8)]
    [0.0, 0.5714, 0.0]
    """
    p = jnp.clip(rewards.astype(jnp.float32), 0.0, 1.0)
    return 2.0 * p * (1.0 - p) * group_size / max(group_size - 1, 1)


def make_keeping(*, rate: float, temperature: float) -> Arms:
    """The bandit of the paper's text: a category without a draw keeps its worth."""
    return bandit.make_td(rate=rate, temperature=temperature, decay_unsampled=False)


def make_progress(*, rate: float, temperature: float) -> Arms:
    """The bandit of ``make_td`` on ``|m_c - m_c'|``, the change of a category's mean reward since it was last drawn.

    A category that is drawn for the first time counts from 0.
    """
    inner = bandit.make_td(rate=rate, temperature=temperature)

    def init(count):
        return inner.init(count), jnp.zeros((count,), jnp.float32)

    def learn(state, category, signal, weight):
        worth, last = state
        used = weight.astype(jnp.float32)
        count = jax.ops.segment_sum(used, category, num_segments=last.shape[0])
        total = jax.ops.segment_sum(jnp.where(used > 0, used * signal, 0.0), category, num_segments=last.shape[0])
        mean = jnp.where(count > 0, total / jnp.maximum(count, 1e-9), last)
        change = jnp.abs(mean - last)
        return inner.learn(worth, category, change[category], weight), mean

    return Arms(init, lambda state: inner.probs(state[0]), learn)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 240
    prompts_per_step: int = 256
    order: str = "learnt"  # learnt, uniform, easy_to_hard, hard_to_easy
    rate: float = 0.5
    bandit_temperature: float = 1.0
    learn: Callable[..., Arms] = bandit.make_td
    signal: Callable[..., Array] = bandit.mean_absolute_advantage  # (mean reward, group size) -> [n]
    advantages: Callable[..., Array] = group.group_normalized_advantages
    train_levels: int = 3  # the hardest level that trains; the ones above are only measured
    chain_levels: tuple[int, ...] = ()  # of chains, a second domain in the same bandit; empty: there is none
    unseen_levels: tuple[int, ...] = (6, 7, 8)  # of chains that are only measured, where there are any


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 120, "eval_every": 40, "prompts_per_step": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 512,
    "bandit_temperature": 0.4,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 48, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 10,
}  # fmt: skip
CHAINS = {"chain_levels": (3, 4, 5), "max_new_tokens": experiment.Times(2.25)}  # 63: eight operations
ARMS = {
    "uniform": {"order": "uniform"},
    "easy_to_hard": {"order": "easy_to_hard"},
    "hard_to_easy": {"order": "hard_to_easy"},
    "sec": {},
    "sec_no_decay": {"learn": make_keeping},
    "progress": {"learn": make_progress, "signal": mean_reward},
    "sec_rloo": {"signal": leave_one_out_advantage, "advantages": group.rloo_advantages},
    "uniform_2d": {**CHAINS, "order": "uniform"},
    "sec_2d": {**CHAINS, "bandit_temperature": experiment.Times(0.5)},
}
METRICS = ("eval/accuracy", "eval/accuracy_2", "eval/accuracy_3", "eval/accuracy_4", "eval/pass@8")
# what the arms of SEC-2D alone measure joins these with their first record: the figure of this one has nothing of it
CURVES = ("eval/accuracy", "eval/accuracy_3", "eval/accuracy_4", "reward/mean", "group/degenerate_fraction",
          *(f"drawn/{k}" for k in range(4)))  # fmt: skip


def make_arms(settings: Settings) -> Arms:
    """The bandit of an arm, or its fixed order."""
    if settings.order == "learnt":
        return settings.learn(rate=settings.rate, temperature=settings.bandit_temperature)
    if settings.order == "uniform":
        return bandit.make_schedule(bandit.uniform_weights)
    return bandit.make_schedule(bandit.make_ordered_weights(settings.steps, backwards=settings.order == "hard_to_easy"))


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO over the trained levels, each cut in two at its median target."""
    found = recipes.bench(settings)
    level = np.asarray(found.train.level)
    rows = np.flatnonzero(level <= settings.train_levels)
    categories = target_categories(found, rows)
    if settings.chain_levels:
        return with_chains(settings, rows, categories)
    return curricula.make_single_turn_plan(
        settings, found, [stage_of(settings, found, rows, categories)], more=curricula.by_level
    )


def stage_of(settings: Settings, found: recipes.Bench, rows: np.ndarray, categories: np.ndarray) -> experiment.Stage:
    """GRPO on these rows of a bench, drawn by the arm's bandit over their categories."""
    arms = make_arms(settings)
    signal = partial(settings.signal, group_size=settings.group_size)
    sampler = on_rows(bandit.make_categories(categories, arms, signal=signal), rows)
    spent = spending(categories, rows)
    online = curricula.make_single_turn_grpo(settings, found, sampler=sampler, advantages=settings.advantages, **spent)
    return experiment.Stage(online, settings.steps)


def with_chains(settings: Settings, rows: np.ndarray, categories: np.ndarray) -> experiment.Plan:
    """SEC-2D: levels of chains are further categories of the same bandit, in one table."""
    trained, unseen = (
        domains.code_settings(settings, "chain", "plain", levels)
        for levels in (settings.chain_levels, settings.unseen_levels)
    )
    found = domains.open_domains(settings, trained)
    curricula.device_score(found.joint)
    first, level = found.maths.train.tokens.shape[0], np.asarray(found.code.train.level)
    further = categories.max() + 1 + np.unique(level, return_inverse=True)[1]
    both = np.r_[rows, first + np.arange(level.size)], np.r_[categories, further]
    plan = curricula.make_single_turn_plan(
        settings, found.maths, [stage_of(settings, found.joint, *both)], more=curricula.by_level
    )
    measure = recipes.beside(plan.measure, recipes.make_measure(trained), "chain")
    return plan._replace(measure=recipes.beside(measure, recipes.make_measure(unseen), "unseen"))


def claim(results: experiment.Results) -> experiment.Claim:
    """The learnt curriculum beats random draws and the order from easy to hard, on all levels and on one without RL."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(
            experiment.greater(results, metric, "sec", arm)
            for metric in ("eval/accuracy", "eval/accuracy_4")
            for arm in ("uniform", "easy_to_hard")
        ),
    )


if __name__ == "__main__":
    experiment.main(__name__)
