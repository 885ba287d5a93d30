"""A second, short phase of RL on a few solvable problems shortens responses (concise reasoning).

Paper:     Fatemi et al., "Concise Reasoning via Reinforcement Learning", arXiv:2504.05185.
Claim:     PPO with lambda < 1 makes responses longer where rewards are negative and shorter where they are positive, so
           a second phase on a handful of solvable problems cuts length without losing accuracy, and one on unsolvable
           problems lengthens. With lambda = 1 there is no such pressure.
Equations: r = +1 right, -0.5 wrong, -1 no answer; A_t = lambda^(T-1-t) r (GAE of a reward at the end, V = 0);
           token-mean clipped loss, so that the loss of one response is -r (1 - lambda^T) / (T (1 - lambda)). grpo: A =
           (r - mean) / std, which is 0 once the few problems are solved. Both phases have the arm's lambda. critic: V
           learned in both phases, beside the policy, and A is GAE over it, whitened (the paper's analysis takes V near
           0).
Left out:  AIME-size problems, the MMLU transfer study, the optimiser of the first phase (the second begins a new one).
Expect:    eval/tokens ppo < phase1 by a fifth, eval/accuracy no more than 0.03 lower; eval/tokens unsolvable > phase1
           and ppo < ppo_lambda1.
Measure:   held-out chains of 2 to 4 operations; the base model has learned from chains of 2 to write its work twice, so
           that there is something to cut and accuracy to gain; the few problems are solved in some of 8 samples by such
           a model; equal rollouts in every arm. A constant answer is right for 0.16, ceiling 1.
Run:       python -m experiments.efficiency.concise_rl
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.parts import long_winded
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.types import Key, Params


def as_judged(value):
    """What the task says."""
    return value


def all_wrong(value):
    """Every answer is labelled wrong."""
    return jnp.minimum(value, -0.5)


def by_token(value, valid, trajectories, lam):
    """PPO's returns without a critic."""
    return returns.terminal_advantages(value, trajectories.mask, lam=lam)


def by_group(value, valid, trajectories, lam):
    """GRPO's."""
    values = group.group_normalized_advantages(value, trajectories.group_ids, valid=valid)
    return group.per_token(values, trajectories.mask)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 40  # of the second phase
    first_steps: int = 100
    warm_steps: int = 0  # supervised steps on work that is written twice
    hard_level: int = 4  # problems of at least this level train in the first phase
    few: int = 8  # problems of the second phase
    lam: float = 0.95
    second: str = "easy"  # easy: the few solvable problems; hard: the first phase goes on
    label: Callable[[Array], Array] = as_judged  # of the second phase's answers
    credit: Callable[..., Array] = by_token  # in the second phase
    values: str = "none"  # none: V = 0; critic: learned


EMBEDDED = {
    "levels": (2, 3, 4), "hard_level": 4, "steps": 64, "first_steps": 48, "eval_every": 16, "warm_steps": 80,
    "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 64, "learning_rate": 2e-4, "train_problems": 512,
    "eval_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "first_steps": 2, "eval_every": 2, "warm_steps": 2, "prompts_per_step": 2, "group_size": 2,
    "max_new_tokens": 24, "train_problems": 32, "eval_problems": 8, "eval_samples": 2, "few": 2,
}  # fmt: skip
ARMS = {
    "phase1": {"second": "hard"},
    "ppo": {},
    "ppo_lambda1": {"lam": 1.0},
    "unsolvable": {"label": all_wrong},
    "grpo": {"credit": by_group},
    "critic": {"values": "critic"},
}
SAMPLES = 8  # that say whether a problem is solvable
BED = experiment.Bed(chance=0.16)
METRICS = ("eval/accuracy", "eval/tokens", "eval/right_tokens", "eval/wrong_tokens")
CURVES = (*METRICS, "reward/mean", "policy/entropy", "group/degenerate_fraction")


def build(settings: Settings) -> experiment.Plan:
    """Two online stages: hard problems, then the arm's few; a new optimiser in each, no length in the reward."""
    found = recipes.bench(settings)
    read = recipes.make_answer_reader(found)

    def judged(rewards, trajectories):
        value = shaping.answered_rewards(rewards.value > 0.5, read(trajectories)[1])
        return rewards._replace(value=value)

    def make(rows, lam, label, credit):
        def advantages(trajectories, rewards):
            return credit(label(rewards.value), rewards.valid, trajectories, lam)

        slots = {"sampler": curricula.make_chosen(rows, f"of level {settings.hard_level} or more, or easy and solved,")}
        if found.score is not None:
            slots["score"] = lambda answers, trajectories: judged(found.score(answers, trajectories), trajectories)
        if settings.values == "critic":
            return curricula.make_single_turn_grpo(settings, found, **with_critic(settings, found, lam, label), **slots)
        estimate = builders.make_estimate(found.model.policy, advantages, temperature=settings.temperature)
        return curricula.make_single_turn_grpo(settings, found, estimate=estimate, **slots)

    level = np.asarray(found.train.level)
    hard = level >= settings.hard_level
    first = experiment.Stage(make(np.flatnonzero(hard), settings.lam, as_judged, by_token), settings.first_steps)
    rows = np.flatnonzero(hard)
    if settings.second == "easy":  # where all are hard: those of them that are solved, of more that are tried
        rows = solvable(settings, rows, tries=64) if hard.all() else solvable(settings, np.flatnonzero(~hard))
    second = experiment.Stage(make(rows, settings.lam, settings.label, settings.credit), settings.steps)
    host_score = None if found.score else lambda trajectories: judged(found.host_score(trajectories), trajectories)
    plan = curricula.make_single_turn_plan(settings, found, (first, second), host_score=host_score)
    if settings.warm_steps and settings.data == "chain":  # a model for rows of one's own is long-winded already
        plan = plan._replace(init=taught(settings, settings.warm_steps))
    return recipes.with_heads(found, plan, value=1) if settings.values == "critic" else plan


def taught(settings: recipes.OnlineSettings, steps: int) -> Callable[[Key], Params]:
    """The ``init`` of a plan: the model after ``steps`` on the shortest chains with their work written twice."""
    shortest = recipes.solved_problems(dataclasses.replace(settings, levels=settings.levels[:1]))
    return long_winded.warm_base(recipes.bench(settings), shortest, steps=steps)


@recipes.cached_by_task
def taught_rates(settings: recipes.OnlineSettings, rows: tuple[int, ...], warm_steps: int) -> np.ndarray:
    """Share of right answers to training problems by a model that is as the first phase finds it; computed once."""
    found = recipes.bench(settings)
    by = found.model
    if warm_steps and settings.data == "chain":
        by = by._replace(params=taught(settings, warm_steps)(jax.random.key(0)))
    return curricula.pass_rates(
        found, by, np.asarray(rows, int), samples=SAMPLES, max_new_tokens=settings.max_new_tokens
    )


def solvable(settings: Settings, easier: np.ndarray, *, tries: int = 8) -> np.ndarray:
    """The first ``few`` of the easier rows that are solved at least sometimes.

    Args:
      tries: so many times ``few`` rows are tried.

    Raises:
      UserError: where too few are.
    """
    tried = easier[: tries * settings.few]
    if tried.size:
        tried = tried[taught_rates(settings, tuple(tried.tolist()), settings.warm_steps) > 0]
    if tried.size < settings.few:
        raise UserError(
            f"--few {settings.few}: of the first {tries * settings.few} problems below --hard-level "
            f"{settings.hard_level} the model solves {tried.size} in {SAMPLES} samples; give fewer, easier --levels or "
            "more --train-problems"
        )
    return tried[: settings.few]


def with_critic(settings: Settings, found: recipes.Bench, lam: float, label: Callable[[Array], Array]):
    """Slots of PPO with a value head beside the policy's."""

    def paid(params, extras, trajectories, rewards):
        return returns.at_last_token(label(rewards.value), trajectories.mask & rewards.valid[:, None])

    return {
        "estimate": actor_critic.make_value_estimate(
            found.model.policy, token_rewards=paid, lam=lam, temperature=settings.temperature
        ),
        "loss": actor_critic.make_actor_critic_loss(found.model.policy, temperature=settings.temperature),
        "actor": recipes.model_of,
    }


def claim(results: experiment.Results) -> experiment.Claim:
    """PPO with lambda 0.95 on 8 solvable problems cuts length by a fifth at no loss; unsolvable ones lengthen."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller_than_share(results, "eval/tokens", "ppo", "phase1", share=0.8),
        experiment.greater(results, "eval/accuracy", "ppo", "phase1", by=-0.03),
        experiment.smaller(results, "eval/tokens", "ppo", "ppo_lambda1"),
        experiment.greater(results, "eval/tokens", "unsolvable", "phase1"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
