"""Token credit from the tree that a group's responses form, without a critic (TEMPO).

Paper:     Tran et al., "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs", arXiv:2509.18314.
Claim:     the responses of a group share prefixes; the mean reward of those that share one is its value, and adding
           the difference of values at each branch to GRPO's advantage beats GRPO and PPO at the same cost.
Equations: A_it = (r_i - mean + V(s_t+1) - V(s_t)) / std, V(s) the mean reward of the members that begin with s; the
           difference is 0 but where members part. td_only: without r_i - mean; half, double: half and
           twice the difference; ppo: a value head, GAE with lambda 0.95; prefix: (V(s_t+1) - mean) / std, the value
           of the shared prefix in place of the outcome.
Left out:  the KL term; the correlation of the differences with the exact advantage. That needs the value of every
           prefix under the policy of the moment, by enumeration of all texts or by some rollouts from each of a
           response's 14 tokens: several times what training costs, at every look. On small trees the tests enumerate.
Expect:    eval/accuracy: tempo > grpo and tempo > td_only.
Measure:   held-out Countdown, whose short responses branch where they part; equal rollouts and updates.
           tree/branch: share of trained tokens at which members part. Random legal steps are right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.tempo
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from experiments.parts import rare_search
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages.prefix_tree import branch_differences, tempo_advantages
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.types import declared


def token_by_token(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The advantages as they are."""
    return values


def of_prefix(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``A_it = sum_{u <= t} D_iu = (V(s_{t+1}) - mean) / std`` of differences ``D_iu = (V(s_{u+1}) - V(s_u)) / std``.

    A token has the Monte-Carlo value of the prefix it ends, over all members of the group that share it, less the
    group's mean; where no other member shares the prefix that is GRPO's advantage.

    From "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs", arXiv:2509.18314, section 3: the
    value estimate of its prefix tree without the temporal difference.

    >>> import jax.numpy as jnp
    >>> of_prefix(jnp.array([[0.5, 9.0, -1.0]]), jnp.array([[True, False, True]])).tolist()
    [[0.5, 0.0, -0.5]]
    """
    return jnp.where(mask, jnp.cumsum(jnp.where(mask, values, 0.0), axis=1), 0.0)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    outcome: float = 1.0  # weight of the response's own advantage
    branch: float = 1.0  # weight of the differences; 0 is GRPO
    credit: str = "tree"  # tree, or critic: PPO
    spread: Callable[..., Array] = token_by_token  # (advantages, mask) -> those that train


EMBEDDED = rare_search.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"branch": 0.0},
    "tempo": {},
    "td_only": {"outcome": 0.0},
    "half": {"branch": 0.5},
    "double": {"branch": 2.0},
    "ppo": {"credit": "critic"},
    "prefix": {"outcome": 0.0, "spread": of_prefix},
}
METRICS = ("eval/accuracy", "eval/pass@4", "policy/entropy", "tree/branch", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "grad/norm")


class Branched(NamedTuple):
    """Extras of a batch: 1 at tokens where the values of the tree part."""

    branch: Array


def with_critic(settings: Settings, bench: recipes.Bench) -> experiment.Plan:
    """PPO with a value head beside the policy's; its responses are looked at as the tree's are."""
    policy = bench.model.policy

    def branches(params, extras, rows, rewards):
        parted = branch_differences(rows.tokens, rows.mask, rewards.value, rows.group_ids, valid=rewards.valid)
        return Branched((jnp.abs(parted) > 1e-6).astype(jnp.float32))._asdict()

    def branching(params, hidden, batch):
        share = reduce.tokens(declared(Branched, batch.extras).branch, batch.mask)
        return jnp.zeros(()), {"tree/branch": share}

    online = recipes.make_online(
        settings, bench, actor=recipes.model_of,
        estimate=actor_critic.make_value_estimate(policy, temperature=settings.temperature, row_extras=branches),
        loss=actor_critic.make_actor_critic_loss(policy, temperature=settings.temperature, extra_loss=branching),
        tx=optax.adam(settings.learning_rate),
    )  # fmt: skip
    return recipes.with_heads(bench, recipes.one_stage(settings, bench, online), value=1)


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO with an advantage for every token."""
    bench = recipes.bench(settings)
    if settings.credit == "critic":
        return with_critic(settings, bench)
    weights = {"outcome": settings.outcome, "branch": settings.branch}

    def tree(rows, rewards):
        return (rows.tokens, rows.mask, rewards.value, rows.group_ids), {"valid": rewards.valid}

    def advantages(rows, rewards):
        arguments, valid = tree(rows, rewards)
        return settings.spread(tempo_advantages(*arguments, **valid, **weights), rows.mask)

    def branches(extras, rows, rewards):
        arguments, valid = tree(rows, rewards)
        parted = branch_differences(*arguments, **valid)
        return Branched((jnp.abs(parted) > 1e-6).astype(jnp.float32))._asdict()

    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            bench.model.policy, advantages, temperature=settings.temperature, row_extras=branches
        ),
        loss=builders.make_policy_loss(
            bench.model.policy,
            clipped_policy_loss,
            temperature=settings.temperature,
            diagnostics=lambda logp, entropy, batch: {"tree/branch": declared(Branched, batch.extras).branch},
        ),
        tx=optax.adam(settings.learning_rate),
    )
    return recipes.one_stage(settings, bench, online)


def claim(results: experiment.Results) -> experiment.Claim:
    """Adding the branches' differences beats GRPO, and the differences alone."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "tempo", "grpo"),
        experiment.greater(results, "eval/accuracy", "tempo", "td_only"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
