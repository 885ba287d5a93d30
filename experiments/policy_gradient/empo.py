"""Reasoning improved without any label: agreement among a model's own answers as the reward (EMPO).

Paper:     Zhang et al., "Right Question is Already Half the Answer: Fully Unsupervised LLM Reasoning
           Incentivization", arXiv:2504.05812.
Claim:     minimising the entropy over the meanings of its answers, without labels, raises a base model's accuracy a
           long way towards supervised training.
Equations: answers of a group in clusters of equal meaning, p_c = |c| / G, r_i = p of its cluster, then GRPO; a group of
           all different answers and a missing answer get 0. filtered: only groups with low < -sum p log p < high.
           majority: r_i = 1 in the largest cluster. random: rewards without content, by position in the group.
Left out:  clusters by a verifier model (free text), runs from a start whose majority is wrong.
Expect:    eval/accuracy: empo rises by more than 0.05 over its start, and above random; agreement/entropy falls.
Measure:   held-out arithmetic chains, one whole number an answer, labels hidden from all arms but grpo; 8 seeds,
           equal rollouts and updates.
Run:       python -m experiments.policy_gradient.empo
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import agreement
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards, declared


def random_rewards(clusters, group_ids, answered):
    """1 for every second member: members are exchangeable, so this says nothing about their answers."""
    return (jnp.arange(clusters.shape[0]) % 2).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    rewards: Callable[..., Array] | None = agreement.empo_rewards  # (clusters, group_ids, answered); None: the label
    low: float = -1.0  # nats of semantic entropy that a group must exceed to train
    high: float = 1e9


EMBEDDED = {
    "levels": (3, 4, 5), "steps": 240, "eval_every": 60, "prompts_per_step": 8, "max_new_tokens": 40,
    "learning_rate": 2e-4, "eval_problems": 128,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"rewards": None},
    "empo": {},
    "empo_filtered": {"low": 0.2, "high": 1.6},
    "majority": {"rewards": agreement.majority_rewards},
    "random": {"rewards": random_rewards},
}
METRICS = ("eval/accuracy", "eval/pass@4", "agreement/entropy", "eval/tokens")
CURVES = (*METRICS, "policy/entropy", "group/degenerate_fraction", "grad/norm")


class Agreed(NamedTuple):
    """Extras of a batch: the semantic entropy of each row's group."""

    semantic: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage: GRPO whose reward the arm makes from answers, or from the label."""
    bench = recipes.bench(settings)
    read = recipes.make_answer_reader(bench)

    def clusters_of(trajectories):
        values, answered = read(trajectories)
        same = agreement.same_values(values, answered)
        return agreement.greedy_clusters(same, trajectories.group_ids), trajectories.group_ids, answered

    def unlabelled(trajectories):
        clusters, ids, answered = clusters_of(trajectories)
        keep = agreement.entropy_within(clusters, ids, low=settings.low, high=settings.high)
        return Rewards(settings.rewards(clusters, ids, answered), keep)

    def advantages(trajectories, rewards):
        values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    def row_extras(extras, trajectories, rewards):
        return Agreed(agreement.semantic_entropy(*clusters_of(trajectories)[:2]))._asdict()

    def diagnostics(logp, entropy, batch):
        return {"agreement/entropy": jnp.broadcast_to(declared(Agreed, batch.extras).semantic[:, None], logp.shape)}

    policy, labelled, on_host = bench.model.policy, settings.rewards is None, bench.score is None
    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            policy, advantages, temperature=settings.temperature, row_extras=None if on_host else row_extras
        ),
        loss=builders.make_policy_loss(
            policy, clipped_policy_loss, temperature=settings.temperature, diagnostics=None if on_host else diagnostics
        ),
        tx=optax.adam(settings.learning_rate),
        **({} if labelled or on_host else {"score": lambda answers, trajectories: unlabelled(trajectories)}),
    )
    plan = recipes.one_stage(settings, bench, online)
    return plan if labelled or not on_host else plan._replace(host_score=unlabelled)


def claim(results: experiment.Results) -> experiment.Claim:
    """Without labels EMPO raises accuracy by more than 0.05 and above random rewards, and answers agree more."""
    last = results.arms["empo"].curves["eval/accuracy"]["step"][-1]
    first = results.arms["empo"].curves["agreement/entropy"]["step"][0]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "empo", "empo", by=0.05, step=(last, 0)),
        experiment.greater(results, "eval/accuracy", "empo", "random"),
        experiment.smaller(results, "agreement/entropy", "empo", "empo", step=(last, first)),
    )


if __name__ == "__main__":
    experiment.main(__name__)
