"""Trajectory balance on a replay buffer of stale samples (TBA).

Paper:     Bartoldson et al., "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning for Fast,
           Scalable LLM Post-Training", arXiv:2503.18929.
Claim:     searchers with old weights fill a buffer from which the trainer draws; trajectory balance learns from such
           samples as well as an on-policy method from fresh ones, where the policy gradient does worse, and keeps more
           diverse answers.
Equations: tba: mean (log Z + log pi - log ref - r / beta)^2 with log Z the group's mean (VarGrad); a group is fresh
           with probability 0.5, else one of the newest 64 (tba_on: 0.95, tba_off: 0.25; tba_reward: drawn by softmax of
           5 times its mean reward); async: RLOO with the same draws; sync: RLOO on fresh samples.
Left out:  the fall of beta; several searchers; draws of single responses (here a prompt's whole group); red teaming.
Expect:    eval/accuracy: tba > async, and tba > sync - 0.03; eval/pass@4 tba > async.
Measure:   held-out Countdown, reference = start, sampler renewed every 8 updates; 8 seeds, equal rollouts and updates.
Run:       python -m experiments.systems.tba
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from experiments.systems.parts.replay import REPLAY, empty_replay, make_replay
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.off_policy import trajectory_balance_loss
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import TokenTerms


def balance(logp, batch, beta):
    """Trajectory balance, times beta so that its scale does not change as beta falls."""
    rows = batch.extras["rewards"], batch.group_ids, batch.mask
    terms = trajectory_balance_loss(logp, batch.ref_logp, *rows, beta=beta)
    return terms._replace(loss=beta * terms.loss)


def rloo(logp, batch, beta):
    """The policy gradient as if the samples were the policy's own, and a KL term on them."""
    terms = reinforce_loss(logp, batch.advantages, batch.mask)
    pull = kl.weighted_kl_gradient_terms(logp, batch.sampler_logp, batch.ref_logp, batch.mask)
    return terms._replace(loss=terms.loss + beta * pull)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values for GSM8K; see EMBEDDED for the small model."""

    steps: int = 500
    group_size: int = 20
    loss: Callable[..., TokenTerms] = balance  # (logp, batch, beta)
    beta: float = 0.004
    on_policy: float = 0.95  # share of fresh groups
    inverse_temperature: float = 0.0  # above 0 stored groups of high reward are drawn more often
    capacity: int = 64  # stored groups
    sync_every: int = 2  # updates between renewals of the sampler's weights


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 120, "eval_every": 30,
    "prompts_per_step": 6, "group_size": 8, "max_new_tokens": 18, "learning_rate": 3e-4, "eval_problems": 64,
    "beta": 0.02, "on_policy": 0.5, "sync_every": 8,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "capacity": 4,
}  # fmt: skip
ARMS = {
    "sync": {"loss": rloo, "on_policy": 1.0, "sync_every": 1}, "async": {"loss": rloo}, "tba": {},
    "tba_on": {"on_policy": 0.95}, "tba_off": {"on_policy": 0.25}, "tba_reward": {"inverse_temperature": 5.0},
}  # fmt: skip
METRICS = ("eval/accuracy", "eval/pass@4", "policy/entropy", "kl/ref")
CURVES = (*METRICS, "reward/mean", "kl/sampler_mean", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage with a stale sampler and a ring of its newest groups."""
    bench, size = recipes.bench(settings), settings.group_size
    policy, same = bench.model.policy, {"reduction": "seq_mean", "temperature": settings.temperature}
    width, stale = bench.train.tokens.shape[1] + settings.max_new_tokens, recipes.stale_actor(settings.sync_every)

    def extras(params, key):
        ring = {REPLAY: empty_replay(settings.capacity, size, width, key)} if settings.on_policy < 1 else {}
        return recipes.behaviour_extras(params, key) | ring | {"reference": jax.tree.map(jnp.copy, params)}

    slots = {"estimate": builders.make_estimate(
        policy, builders.per_response(group.rloo_advantages), reference=lambda extras: extras["reference"],
        row_extras=lambda extras, rows, rewards: {"rewards": rewards.value}, **same,
    )}  # fmt: skip
    if settings.on_policy < 1:
        share = {"on_policy": settings.on_policy, "inverse_temperature": settings.inverse_temperature}
        slots = make_replay(slots["estimate"], size, **share)

    def remember(state, batch, rows, rewards):
        state = state._replace(extras=stale["remember"](state, batch, rows, rewards))
        return slots["remember"](state, batch, rows, rewards) if "remember" in slots else state.extras

    loss = builders.make_batch_loss(
        policy, lambda logp, entropy, batch: settings.loss(logp, batch, settings.beta),
        diagnostics=builders.reference_kl, **same,
    )  # fmt: skip
    slots = slots | {"loss": loss, "tx": optax.adam(settings.learning_rate), "actor": stale["actor"]}
    online = recipes.make_online(settings, bench, **slots | {"remember": remember})
    return recipes.one_stage(settings, bench, online, extras=extras)


def claim(results: experiment.Results) -> experiment.Claim:
    """On stale stored samples trajectory balance beats RLOO in accuracy and pass@4 and keeps up with fresh RLOO."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "tba", "async"),
        experiment.greater(results, "eval/accuracy", "tba", "sync", by=-0.03),
        experiment.greater(results, "eval/pass@4", "tba", "async"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
