"""One stage of imitation and reinforcement whose balance is learned by a meta-gradient (AMFT).

Paper:     He et al., "AMFT: Aligning LLM Reasoners by Meta-Learning the Optimal Imitation-Exploration Balance",
           arXiv:2508.06944.
Claim:     a share of imitation that follows the gradient of future reward, regularised by entropy, beats SFT, RL, SFT
           then RL and every fixed schedule, above all out of distribution; it falls from much to little imitation.
Equations: L = (1 - mu) L_GRPO + mu L_SFT; dU/dmu = -eta <grad U(theta'), grad L_SFT - grad L_RL>; mu moves by its
           moving average and by the distance of the entropy from its first value, within [0.05, 0.95]. U: the policy
           gradient of the next batch, whose prompts are new. half: mu = 0.5; linear: 0.9 to 0.05; sft_then_grpo: 1,
           then 0; no_entropy, no_meta: one term of the controller less.
Left out:  a validation batch of its own (all arms have equal rollouts); Adam in the meta-gradient; see balance.moved.
Expect:    ood/accuracy: amft > grpo and amft > half - 0.01; balance/share falls.
Measure:   Countdown with three numbers, and out of distribution with four; 8 seeds, equal rollouts and updates.
Run:       python -m experiments.policy_gradient.amft
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import balance
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Trajectories, declared


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    schedule: Callable[[Array], Array] | None = None  # share of imitation by the fraction of steps done; None: learned
    rate: float = 0.02  # largest move of the share by the meta-gradient
    entropy_rate: float = 0.02
    ood_levels: tuple[int, ...] = ()  # of generated problems; none: not measured
    ood_tokens: int = 0  # of a response to them


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 160, "eval_every": 40,
    "prompts_per_step": 6, "max_new_tokens": 18, "learning_rate": 2e-4, "eval_problems": 64, "ood_levels": (4,),
    "ood_tokens": 27,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"schedule": balance.never}, "amft": {}, "sft": {"schedule": balance.always},
    "sft_then_grpo": {"schedule": balance.at_first}, "half": {"schedule": balance.half},
    "linear": {"schedule": balance.falling}, "no_entropy": {"entropy_rate": 0.0}, "no_meta": {"rate": 0.0},
}  # fmt: skip
METRICS = ("eval/accuracy", "ood/accuracy", "eval/pass@4", "balance/share", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "imitation/loss", "grad/norm")


class Balanced(NamedTuple):
    """Extras of a state: the balance of imitation and reward."""

    balance: balance.Balance


class Mixed(NamedTuple):
    """Extras of a batch: each prompt with its demonstration, and the share of imitation at each row."""

    gold: Trajectories
    share: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage; demonstrations of the drawn prompts travel with the batch, the balance in the extras."""
    bench, fixed = recipes.bench(settings), settings.schedule
    policy, temperature = bench.model.policy, settings.temperature
    tokens, valid = recipes.demonstrations(settings)
    advantages = builders.per_response(group.group_normalized_advantages)
    plain = builders.make_estimate(policy, advantages, temperature=temperature)
    reinforce = builders.make_policy_loss(policy, clipped_policy_loss, temperature=temperature)

    def estimate(params, extras, rows, rewards):
        ids, every = rows.problem_ids, jnp.ones(rows.problem_ids.shape, bool)
        gold = given_responses.with_responses(rows, every, tokens[ids], valid[ids])
        share = jnp.full(every.shape, declared(Balanced, extras).balance.share)
        return plain(params, extras, rows, rewards)._replace(extras=Mixed(gold, share)._asdict())

    def imitate(params, batch):
        (gold, _) = declared(Mixed, batch.extras)
        gold = jax.tree.map(lambda x: x[:: settings.group_size], gold)  # one of each group
        logp, _ = builders.score_tokens(policy, params, gold, temperature=temperature)
        return reduce.tokens(sft_loss(logp, gold.mask).loss, gold.mask)

    def loss(params, batch):
        (own, metrics), theirs = reinforce(params, batch), imitate(params, batch)
        share = declared(Mixed, batch.extras).share[0]
        return (1 - share) * own + share * theirs, metrics | {"balance/share": share, "imitation/loss": theirs}

    def remember(state, batch, rows, rewards):
        (old,) = declared(Balanced, state.extras)
        if fixed is not None:
            done = state.step.astype(jnp.float32) / settings.steps
            return state.extras | Balanced(old._replace(share=fixed(done)))._asdict()
        rates = {"rate": settings.rate, "entropy_rate": settings.entropy_rate, "learning_rate": settings.learning_rate}
        learned = balance.learned(old, reinforce, imitate, state.params, batch, **rates)
        return state.extras | Balanced(learned)._asdict()

    def extras(params, key):
        share = jnp.float32(0.9) if fixed is None else fixed(jnp.zeros((), jnp.float32))
        return Balanced(balance.first_balance(params, share))._asdict()

    slots = {"tx": optax.adam(settings.learning_rate), "whole_batch": "imitation and meta-gradient are means over it"}
    online = recipes.make_online(settings, bench, estimate=estimate, loss=loss, remember=remember, **slots)
    plan = recipes.one_stage(settings, bench, online, extras=extras)
    if not settings.ood_levels:
        return plan
    other = dataclasses.replace(settings, levels=settings.ood_levels, max_new_tokens=settings.ood_tokens)
    return plan._replace(measure=recipes.beside(plan.measure, recipes.make_measure(other), "ood"))


def claim(results: experiment.Results) -> experiment.Claim:
    """A learned balance beats reinforcement and an even mixture out of distribution, and imitates less and less."""
    steps = results.curve("amft", "balance/share")[0]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "ood/accuracy", "amft", "grpo"),
        experiment.greater(results, "ood/accuracy", "amft", "half", by=-0.01),
        experiment.smaller(results, "balance/share", "amft", "amft", step=(int(steps[-1]), int(steps[0]))),
    )


if __name__ == "__main__":
    experiment.main(__name__)
