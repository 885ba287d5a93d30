"""One stage of imitation and reinforcement whose balance is learned by a meta-gradient (AMFT).

Paper:     He et al., "AMFT: Aligning LLM Reasoners by Meta-Learning the Optimal Imitation-Exploration Balance",
           arXiv:2508.06944.
Claim:     a share of imitation that follows the gradient of future reward, regularised by entropy, beats SFT, RL, SFT
           then RL and every fixed schedule, above all out of distribution; it falls from much to little imitation.
Equations: L = (1 - mu) L_GRPO + mu L_SFT; dU/dmu = -eta <grad U(theta'), grad L_SFT - grad L_RL>; mu moves by its
           moving average and by the distance of the entropy from its first value, within [0.05, 0.95]. U: the policy
           gradient of the next batch, whose prompts are new. half: mu = 0.5; linear: 0.9 to 0.05; sft_then_grpo: 1,
           then 0; no_entropy, no_meta: one term of the controller less; slow, fast: steps of mu by the meta-gradient of
           at most 0.005 and 0.08, where others have 0.02.
Left out:  a validation batch of its own (all arms have equal rollouts); Adam in the meta-gradient; see balance.moved.
Expect:    ood/accuracy: amft > grpo and amft > half; balance/share falls.
Measure:   Countdown with three numbers up to 12, and out of distribution with one of them from 13 to 25, which neither
           the demonstrations nor the base's pre-training had and of which the base solves half as many; 8 seeds, equal
           rollouts and updates. Random legal steps are right for 0.12, out of distribution for 0.20; ceiling 1. The bed
           is invalid unless imitation carries over: sft gains 0.01 of accuracy there (ood/gain) on the base. The pilot
           has -0.005, so that these demonstrations, of small numbers alone, cannot show the claim as they stand.
Run:       python -m experiments.policy_gradient.amft
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import start_rates
from experiments.policy_gradient.parts import balance, large_numbers
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.data import problems as tables
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards, Trajectories, declared


def with_large_numbers(settings: recipes.OnlineSettings) -> recipes.Bench:
    """The bench of the settings with held-out problems of as many numbers, one of them larger."""
    found, levels = recipes.bench(settings), settings.levels or None
    held = tables.make_split(large_numbers, split="heldout", n=settings.eval_problems, seed=0, levels=levels)
    table = tables.encode_problems(found.model.tokenizer, held, answers=tables.countdown_answers)
    return found._replace(heldout=table)


def with_gain(found: recipes.Bench, answers: Any, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``recipes.summary``, and ``eval/gain``: the accuracy less that of the base model."""
    rates = start_rates.start_rates(found, found.model.params, rows)
    return recipes.of_samples(found, answers, rows, rewards) | {"eval/gain": start_rates.gain(rewards, rates)}


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    schedule: Callable[[Array], Array] | None = None  # share of imitation by the fraction of steps done; None: learned
    rate: float = 0.02  # largest move of the share by the meta-gradient
    entropy_rate: float = 0.02
    # held-out problems of Countdown that are out of distribution; None: not measured
    elsewhere: Callable[[recipes.OnlineSettings], recipes.Bench] | None = None


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 160, "eval_every": 16,
    "prompts_per_step": 6, "max_new_tokens": 18, "learning_rate": 4e-4, "eval_problems": 192,
    "elsewhere": with_large_numbers,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"schedule": balance.never}, "amft": {}, "sft": {"schedule": balance.always},
    "sft_then_grpo": {"schedule": balance.at_first}, "half": {"schedule": balance.half},
    "linear": {"schedule": balance.falling}, "no_entropy": {"entropy_rate": 0.0}, "no_meta": {"rate": 0.0},
    "slow": {"rate": 0.005}, "fast": {"rate": 0.08},
}  # fmt: skip
BED = experiment.Bed(chance=0.12, judges=(("sft", "ood/gain", 0.01),))
METRICS = ("eval/accuracy", "ood/accuracy", "ood/gain", "eval/pass@4", "balance/share", "policy/entropy", "eval/tokens")
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
    if settings.elsewhere is None or settings.data != "countdown":
        return plan
    other = recipes.make_measure(settings, settings.elsewhere, with_gain)
    return plan._replace(measure=recipes.beside(plan.measure, other, "ood"))


def claim(results: experiment.Results) -> experiment.Claim:
    """A learned balance beats reinforcement and an even mixture out of distribution, and imitates less and less."""
    steps = results.curve("amft", "balance/share")[0]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "ood/accuracy", "amft", "grpo"),
        experiment.greater(results, "ood/accuracy", "amft", "half"),
        experiment.smaller(results, "balance/share", "amft", "amft", step=(int(steps[-1]), int(steps[0]))),
    )


if __name__ == "__main__":
    experiment.main(__name__)
