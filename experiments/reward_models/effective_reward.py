"""Process rewards that cannot be earned by talking on: Clip and Delta.

Paper:     Gao et al., "On Designing Effective RL Reward at Training Time for LLM Reasoning", arXiv:2410.15115.
Claim:     adding the scores of a process reward model to the success reward makes RL repeat easy steps; bounding the
           sum of the rewards, by Clip and Delta, makes them help; a learned outcome reward adds nothing.
Equations: at the end of step k: naive alpha s_k; clip alpha min(s_k - eta, 0); delta alpha (s_k - s_{k+1}), last step
           alpha s_k; clip_delta: delta of the clipped scores; orm: alpha min_k s_k at the end; learned_orm: alpha
           P(right), of a head on the last state fitted to outcomes of the taught model's samples; length: - alpha of
           the share of the tokens used, at the end. In all arms 1 for a right answer at the end. PPO with a value head,
           gamma = lambda = 1. s_k is 1 for a step that the reference has, also when it was said before (the weakness
           that is exploited), else 0; learned, learned_naive: clip_delta and naive with s_k of a process reward model,
           a head on the base model's hidden states fitted to such labels of the taught model's samples.
Left out:  embedded, KL; a process reward model of its own backbone; alpha is 0.2, for short solutions, in place of
           0.02.
Expect:    eval/repeated_steps and eval/steps naive > success; eval/accuracy clip_delta >= success and > naive; as
           secondary figures the same of the learned arms; success no worse than learned_orm by more than 0.02.
Measure:   held-out chains of 4 and 5 operations; the model is first taught to repeat its last step 0 to 2 times;
           8 seeds, equal rollouts.
Run:       python -m experiments.reward_models.effective_reward
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.reward_models.parts import progress_verifier, step_labels
from experiments.reward_models.parts import steps as reader
from jaxrl_llm import experiment
from jaxrl_llm.advantages import process, returns
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.types import declared


def nothing(scores, valid):
    return jnp.zeros_like(scores)


def clip_delta(scores, valid):
    return process.delta_steps(process.clipped_steps(scores, valid), valid)


def weakest(scores, valid):
    """The score of the weakest step as the score of the solution."""
    return jnp.min(jnp.where(valid, scores, 1.0), axis=1) * jnp.any(valid, axis=1).astype(float)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where they are known; see EMBEDDED for the small model."""

    steps: int = 200
    shape: Callable = clip_delta  # scores of the steps to rewards of the steps
    alpha: float = 0.02
    orm: float = 0.0  # weight of an outcome score
    length: float = 0.0  # weight of an explicit price of length
    warm_steps: int = 0
    learned_from: int = 0  # prompts whose labelled samples teach a process reward model; 0: the labels themselves
    outcome_from: int = 0  # prompts whose samples teach an outcome reward model; 0: the weakest step is its score
    kl_weight: float = 0.01  # of the KL to the policy at the start, in the reward of every token; 0: no reference


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 64,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96, "alpha": 0.2, "warm_steps": 36,
    "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "warm_steps": 2,
}  # fmt: skip
ARMS = {
    "success": {"shape": nothing},
    "clip_delta": {},
    "naive": {"shape": process.plain_steps},
    "clip": {"shape": process.clipped_steps},
    "delta": {"shape": process.delta_steps},
    "orm": {"shape": nothing, "orm": 0.2},
    "learned_orm": {"shape": nothing, "orm": 0.2, "outcome_from": 256},
    "length": {"shape": nothing, "length": 0.2},
    "learned": {"learned_from": 256},
    "learned_naive": {"shape": process.plain_steps, "learned_from": 256},
}
METRICS = ("eval/accuracy", "eval/steps", "eval/repeated_steps", "eval/right_steps", "eval/tokens")
CURVES = ("eval/accuracy", "eval/steps", "eval/repeated_steps", "eval/tokens", "reward/mean")


class Judged(NamedTuple):
    """Extras of a state: the learned process reward model."""

    step_model: Any


class Graded(NamedTuple):
    """Extras of a state: the learned outcome reward model."""

    outcome_model: Any


def beside(stage: experiment.Stage, more: Callable[..., dict[str, Any]]) -> experiment.Stage:
    """The stage with more in the extras of its state."""
    before = stage.extras
    return stage._replace(extras=lambda params, key: before(params, key) | more(params, key))


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage, then PPO on success and the arm's rewards of steps."""
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    most = settings.max_new_tokens // 4

    def token_rewards(params, extras, rows, rewards):
        steps, scores, valid = step_labels.step_scores(stepped, rows, most=most)
        if settings.learned_from:
            model = declared(Judged, extras).step_model
            scores, _, valid = progress_verifier.step_success(found, model, rows, steps, most=most)
        used = jnp.sum(rows.mask.astype(jnp.float32), axis=1) / settings.max_new_tokens
        if settings.outcome_from:
            outcome = progress_verifier.outcome_success(found, declared(Graded, extras).outcome_model, rows)
        else:
            outcome = weakest(scores, valid)
        end = rewards.value + settings.orm * outcome - settings.length * used
        paid = returns.at_last_token(end, rows.mask & rewards.valid[:, None])
        return paid + settings.alpha * reader.at_ends(settings.shape(scores, valid), steps)

    online = step_labels.make_ppo(settings, found, token_rewards, kl_weight=settings.kl_weight)
    kept = episode_methods.model_for(settings.kl_weight)
    warm = step_labels.warm_stage(settings, found, recipes.solved_problems(settings), steps=settings.warm_steps)
    train = experiment.Stage(online, settings.steps, kept)
    if settings.learned_from:
        fit = progress_verifier.make_step_model(settings, prompts=settings.learned_from, most=most)
        train = beside(train, lambda params, key: Judged(fit(params["model"], key))._asdict())
    if settings.outcome_from:
        grade = progress_verifier.make_outcome_model(settings, prompts=settings.outcome_from)
        train = beside(train, lambda params, key: Graded(grade(params["model"], key))._asdict())
    stages = [warm._replace(method=step_labels.of_model(warm.method)), train]
    plan = step_labels.make_step_plan(settings, found, stages)
    return recipes.with_heads(found, plan, value=1)


def claim(results: experiment.Results) -> experiment.Claim:
    """Clipped and differenced process rewards add accuracy to outcomes; naive ones are earned by repetition."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "clip_delta", "success"),
        experiment.greater(results, "eval/repeated_steps", "naive", "success"),
        experiment.greater(results, "eval/steps", "naive", "success"),
        experiment.greater(results, "eval/accuracy", "clip_delta", "naive"),
        experiment.greater(results, "eval/accuracy", "success", "learned_orm", by=-0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
