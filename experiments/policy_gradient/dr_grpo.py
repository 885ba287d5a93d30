"""GRPO without its length and difficulty biases (Dr. GRPO).

Paper:     Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
Claim:     dividing a response's loss by its length makes long wrong answers cheap, so they grow; dividing by the
           group's standard deviation over-weights prompts nearly solved or nearly hopeless. Without both, accuracy
           holds and wrong answers stay short.
Equations: A_i = r_i - mean(r) (arm no_std: no / std(r));
           J = 1/(B G) sum_i sum_t min(rho A, clip(rho, 1 +- 0.2) A) / C with C = max_new_tokens (arm no_length),
           in place of 1/|o_i| (reduction seq_mean). No KL, no reference model. ppo, ppo_constant: a value head and
           GAE, both losses divided by |o_i| or by C.
Left out:  templates, self-reflection counts, coverage of the questions.
Expect:    eval/wrong_tokens: dr_grpo < grpo and ppo_constant < ppo; eval/accuracy: |dr_grpo - grpo| < 0.03.
Measure:   held-out arithmetic chains whose scratchpad is optional, so that length is free; 8 seeds, equal rollouts.
           The learning rate, 2e-4, is the best of four by training reward for grpo and dr_grpo, which alone were swept
           (results/sweeps/dr_grpo.json; in the record of three); the other arms, ppo and ppo_constant too, take theirs.
           Floor of eval/accuracy: 0.18 for the best constant answer; ceiling 1.
           credit/extreme: how much of all |A| goes to prompts solved at most once or failed at most once.
Run:       python -m experiments.policy_gradient.dr_grpo
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.types import declared


class Compared(NamedTuple):
    """What a response is compared with: its estimate and loss, further slots, and the plan with what they train."""

    estimate: Callable
    make_loss: Callable
    slots: dict[str, Callable]
    finish: Callable[..., experiment.Plan]


def with_group(policy, advantages, token_loss, same) -> Compared:
    """The rewards of its group."""
    estimate = builders.make_estimate(policy, builders.per_response(advantages), **same)
    return Compared(estimate, partial(builders.make_policy_loss, policy, token_loss), {}, lambda bench, plan: plan)


def with_critic(policy, advantages, token_loss, same) -> Compared:
    """The prediction of a value head: PPO."""
    make_loss = partial(actor_critic.make_actor_critic_loss, policy, token_loss=token_loss)
    estimate, finish = actor_critic.make_value_estimate(policy, **same), partial(recipes.with_heads, value=1)
    return Compared(estimate, make_loss, {"actor": recipes.model_of}, finish)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    advantages: Callable[..., Array] = group.group_normalized_advantages
    reduction: str = "seq_mean"  # see reduce.tokens
    clip: float = 0.2
    compare: Callable[..., Compared] = with_group  # or PPO's with_critic, a value head


EMBEDDED = {
    "levels": (3, 4, 5), "steps": 160, "eval_every": 40, "prompts_per_step": 12, "max_new_tokens": 48,
    "learning_rate": 2e-4, "eval_problems": 192,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 2,
}  # fmt: skip
ARMS = {
    "grpo": {},
    "no_length": {"reduction": "constant"},
    "no_std": {"advantages": group.dr_grpo_advantages},
    "dr_grpo": {"reduction": "constant", "advantages": group.dr_grpo_advantages},
    "ppo": {"compare": with_critic},
    "ppo_constant": {"compare": with_critic, "reduction": "constant"},
}
METRICS = ("eval/accuracy", "eval/wrong_tokens", "eval/right_tokens", "eval/tokens", "credit/extreme")
CURVES = (*METRICS, "policy/entropy", "grad/norm")


class Extreme(NamedTuple):
    """Extras of a batch: rows of groups that solve their problem once at most, or all but once at least."""

    extreme: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage: advantages, reduction and what a response is compared with come from the arm."""
    bench = recipes.bench(settings)
    same = {"reduction": settings.reduction, "temperature": settings.temperature}
    token_loss = partial(clipped_policy_loss, clip_low=settings.clip, clip_high=settings.clip)
    compared = settings.compare(bench.model.policy, settings.advantages, token_loss, same)
    plain, loss = compared.estimate, compared.make_loss(length_tokens=settings.max_new_tokens, **same)

    def estimate(params, extras, rows, rewards):
        batch = plain(params, extras, rows, rewards)
        right = group.group_sum(rewards.value, rows.group_ids)
        extreme = (right <= 1) | (right >= settings.group_size - 1)
        return batch._replace(extras=batch.extras | Extreme(extreme)._asdict())

    def figures(batch, metrics):
        size = jnp.abs(jnp.where(batch.mask, batch.advantages, 0.0))
        extreme = jnp.sum(jnp.where(declared(Extreme, batch.extras).extreme[:, None], size, 0.0))
        return {"credit/extreme": extreme / jnp.maximum(jnp.sum(size), 1e-9)}

    slots = {"estimate": estimate, "loss": loss, "figures": figures, "tx": optax.adam(settings.learning_rate)}
    online = recipes.make_online(settings, bench, **compared.slots, **slots)
    return compared.finish(bench, recipes.one_stage(settings, bench, online))


def claim(results: experiment.Results) -> experiment.Claim:
    """Without the length and deviation divisors wrong answers are shorter at the same accuracy, with a critic too."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "eval/wrong_tokens", "dr_grpo", "grpo"),
        experiment.smaller(results, "eval/wrong_tokens", "ppo_constant", "ppo"),
        experiment.close(results, "eval/accuracy", "dr_grpo", "grpo", within=0.03),
    )


if __name__ == "__main__":
    experiment.main(__name__)
