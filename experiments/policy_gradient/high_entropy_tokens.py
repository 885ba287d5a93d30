"""Training the forking tokens alone: the top fifth by entropy (beyond the 80/20 rule).

Paper:     Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning
           for LLM Reasoning", arXiv:2506.01939.
Claim:     the 20 % of tokens with the highest entropy, where the response forks, carry the gain of RL: training on them
           alone is as good as training on all (better for large models), training on the other 80 % is clearly worse.
Equations: loss = -1 / sum |o_i| sum_it 1[H_it >= tau] min(rho A, clip(rho, 0.8, 1.28) A), tau the top-fraction quantile
           of the entropies of the whole batch, denominator all tokens; DAPO's token mean, clip-higher and dropped
           groups of equal rewards.
           all_twice, top_20_twice: two updates a rollout, so that the clip acts.
Left out:  overlong shaping (responses are short), temperatures by entropy, overlap with the base's own top fifth.
Expect:    eval/accuracy: |top_20 - all| < 0.025, a quarter of what training brings here; top_20 above bottom_80 and
           above random_20.
Measure:   held-out Countdown with three numbers; equal rollouts and updates. share/entropy: how much of all entropy the
           trained tokens hold.
Run:       python -m experiments.policy_gradient.high_entropy_tokens
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import rare_search
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.token_choice import top_tokens
from jaxrl_llm.train.methods import builders


def bottom(entropy: Array, mask: Array, *, fraction: float) -> Array:
    """All but the top ``1 - fraction``."""
    return mask & ~top_tokens(entropy, mask, fraction=1 - fraction)


def random(entropy: Array, mask: Array, *, fraction: float) -> Array:
    """As many tokens, drawn by lot; the batch itself is the seed of the draw."""
    seed = jax.lax.bitcast_convert_type(jnp.sum(jnp.where(mask, entropy, 0.0)), jnp.int32)
    draw = jax.random.uniform(jax.random.fold_in(jax.random.key(0), seed), mask.shape)
    return top_tokens(draw, mask, fraction=fraction)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    prompts_per_step: int = 512
    group_size: int = 16
    max_new_tokens: int = 20480
    tokens: Callable[..., Array] = top_tokens  # with a fraction of 1 all tokens: DAPO
    fraction: float = 0.2
    updates: int = 1  # for each rollout


EMBEDDED = rare_search.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "all": {"fraction": 1.0},
    "top_20": {},
    "top_50": {"fraction": 0.5},
    "top_10": {"fraction": 0.1},
    "bottom_80": {"tokens": bottom, "fraction": 0.8},
    "random_20": {"tokens": random},
    "all_twice": {"fraction": 1.0, "updates": 2},
    "top_20_twice": {"updates": 2},
}
METRICS = ("eval/accuracy", "eval/pass@4", "policy/entropy", "share/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage of DAPO; the arm chooses the tokens that train."""
    bench = recipes.bench(settings)

    def weights(logp, entropy, batch):
        return settings.tokens(entropy, batch.mask, fraction=settings.fraction).astype(jnp.float32)

    def shares(logp, entropy, batch):
        held = jnp.where(weights(logp, entropy, batch) > 0, entropy, 0.0)
        return {"share/entropy": held / jnp.maximum(reduce.tokens(entropy, batch.mask), 1e-6)}

    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            bench.model.policy,
            builders.per_response(group.group_normalized_advantages),
            temperature=settings.temperature,
            keep=lambda rows, rewards: group.group_spread(rewards.value, rows.group_ids, valid=rewards.valid) > 0,
        ),
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(clipped_policy_loss, clip_high=0.28),
            temperature=settings.temperature,
            token_weights=weights,
            diagnostics=shares,
            anchor=builders.stored_anchor if settings.updates > 1 else builders.current_anchor,
        ),
        tx=optax.adam(settings.learning_rate),
        updates_per_rollout=settings.updates,
        whole_batch="its tokens are ranked over the batch" if settings.fraction < 1 else "",
    )
    return recipes.one_stage(settings, bench, online)


def claim(results: experiment.Results) -> experiment.Claim:
    """The top fifth by entropy trains as well as all tokens; the other four fifths and a random fifth are worse."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.close(results, "eval/accuracy", "top_20", "all", within=0.025),
        experiment.greater(results, "eval/accuracy", "top_20", "bottom_80"),
        experiment.greater(results, "eval/accuracy", "top_20", "random_20"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
