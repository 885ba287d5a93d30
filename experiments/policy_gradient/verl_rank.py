"""Advantages shaped by the effective rank of hidden states and its growth (VERL).

Paper:     Huang et al., "Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in
           RLVR", arXiv:2509.23808.
Claim:     in hidden states exploration (effective rank, ER) and exploitation (its velocity, ERV) are almost
           uncorrelated, so both can be raised at once; a bonus that its acceleration (ERA) steers between them improves
           GRPO and PPO, pass@1 and pass@k alike.
Equations: d_X = clip((X - EMA_X) / |EMA_X|, +-5); b = sigmoid(gain d_ERA); phi = b tanh(d_ER) + (1 - b) tanh(d_ERV);
           A' = A + min(max(phi, 0), |A| / 2). half: b = 0.5; rank, velocity: b = 1 and 0; scrambled: phi of another
           response of the batch.
           hidden/rank_with_velocity and hidden/rank_with_length: correlations over the responses of a batch; the method
           rests on the first being small, which it is not here: in the record it is 0.73 in the first and 0.71 in the
           last updates of verl, and the second is 0.95, in responses of 14.3 to 14.5 tokens: rank counts
           tokens.
           fading: phi times 1 - (s + 1) / 2, s the moving average of scores 2 r - 1, 0 at first: the better the policy,
           the smaller; last_token: the bonus on the last token alone (both are switches of the released code).
           ppo, ppo_verl: the same on GAE with a value head.
Left out:  large models; nothing of the method.
Expect:    eval/accuracy and eval/pass@8: verl > grpo.
Measure:   held-out Countdown, prefixes 4 tokens apart; 8 seeds, equal rollouts and updates. Random legal steps are
           right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.verl_rank
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import effective_rank as ranks
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.types import declared


def correlation(x: Array, y: Array) -> Array:
    """Pearson's, 0 where one of both does not vary.

    >>> round(float(correlation(jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 5.0]))), 3)
    0.982
    """
    x, y = (z - reduce.scalars(z) for z in (x, y))
    spread = jnp.sqrt(jnp.sum(x**2) * jnp.sum(y**2))
    return jnp.where(spread > 1e-9, jnp.sum(x * y) / jnp.maximum(spread, 1e-9), 0.0)


class Scored(NamedTuple):
    """Extras of a state: the moving average of scores in [-1, 1]."""

    score: Array


def steady(score: Array) -> Array:
    return jnp.ones(())


def everywhere(shaped: Array, plain: Array, mask: Array) -> Array:
    return shaped


def fading(score: Array) -> Array:
    """What is left of the bonus at a mean score in [-1, 1]: ``1 - (score + 1) / 2``.

    >>> float(fading(jnp.float32(0.0))), float(fading(jnp.float32(0.5)))
    (0.5, 0.25)
    """
    return 1.0 - (score + 1.0) / 2.0


def followed(score: Array, rewards: Array, valid: Array, *, rate: float) -> Array:
    """``(1 - rate) score + rate mean(2 r - 1)`` over valid rewards; without any the score stays.

    >>> round(float(followed(jnp.float32(0.0), jnp.array([1.0, 1.0, 0.0, 9.0]), jnp.arange(4) < 3, rate=0.3)), 4)
    0.1
    """
    new = (1.0 - rate) * score + rate * reduce.scalars(2.0 * rewards.astype(jnp.float32) - 1.0, valid)
    return jnp.where(jnp.any(valid), new, score)


def at_the_end(shaped: Array, plain: Array, mask: Array) -> Array:
    """``shaped`` at the last masked token of each row, ``plain`` at the others.

    >>> at_the_end(jnp.array([[3.0, 3.0, 3.0]]), jnp.ones((1, 3)), jnp.array([[True, True, False]])).tolist()
    [[1.0, 3.0, 1.0]]
    """
    later = jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
    return jnp.where(mask & (later == 1), shaped, plain)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 300
    stride: int = 40  # tokens between prefixes
    most_states: int = 512  # of a prefix that its rank is read from, the latest
    rank_rows: int = 16  # responses whose ranks are computed at once
    weight: float = 1.0  # of the bonus; 0 is GRPO
    gain: float = 2.0
    explore: float | None = None  # a fixed b
    shift: int = 0  # rows between a response and the one whose bonus it gets
    kappa: float = 2.0
    rate: float = 0.3  # of the moving averages
    values: str = "none"  # none: GRPO; critic: PPO
    left: Callable[[Array], Array] = steady  # of the bonus, at a mean score
    placed: Callable[[Array, Array, Array], Array] = everywhere  # (shaped, plain, mask): which tokens are shaped


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 120, "eval_every": 30,
    "prompts_per_step": 6, "max_new_tokens": 18, "learning_rate": 2e-4, "eval_problems": 64, "eval_samples": 8,
    "stride": 4,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 8,
}  # fmt: skip
ARMS = {
    "grpo": {"weight": 0.0},
    "verl": {},
    "half": {"explore": 0.5},
    "rank": {"explore": 1.0},
    "velocity": {"explore": 0.0},
    "scrambled": {"shift": 5},
    "fading": {"left": fading},
    "last_token": {"placed": at_the_end},
    "ppo": {"values": "critic", "weight": 0.0},
    "ppo_verl": {"values": "critic"},
}
BED = experiment.Bed(chance=0.12)
METRICS = ("eval/accuracy", "eval/pass@4", "eval/pass@8", "policy/entropy", "hidden/rank", "hidden/velocity")
CURVES = (*METRICS, "reward/mean", "hidden/rank_with_velocity", "hidden/rank_with_length", "grad/norm")


class Averages(NamedTuple):
    """Extras of a state: moving averages of the figures of hidden states."""

    averages: Array


class Hidden(NamedTuple):
    """Extras of a batch: rank, velocity and acceleration of the hidden states of each row, ``[B, 3]``."""

    figures: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO; moving averages of the three figures live in the state's extras."""
    bench = recipes.bench(settings)
    policy, new = bench.model.policy, settings.max_new_tokens
    advantages = builders.per_response(group.group_normalized_advantages)
    plain = builders.make_estimate(policy, advantages, temperature=settings.temperature)
    critic = settings.values == "critic"
    if critic:
        plain = actor_critic.make_value_estimate(policy, temperature=settings.temperature)

    def estimate(params, extras, rows, rewards):
        batch = plain(params, extras, rows, rewards)
        hidden = policy.hidden(params["model"] if critic else params, rows.tokens, rows.positions, rows.segment_ids)
        figures = builders.in_row_parts(
            lambda some: ranks.rank_figures(*some, stride=settings.stride, most=settings.most_states),
            (hidden[:, -new:], rows.mask[:, -new:]),
            at_once=settings.rank_rows,
        )
        deviation = ranks.deviations(figures, declared(Averages, extras).averages)
        bonus = ranks.rank_bonus(
            deviation, gain=settings.gain, explore=settings.explore, weight=settings.weight
        )  # fmt: skip
        bonus = jnp.roll(bonus, settings.shift)
        bonus = settings.left(declared(Scored, extras).score) * bonus
        shaped = ranks.shaped_advantages(batch.advantages, bonus, kappa=settings.kappa)
        shaped = settings.placed(shaped, batch.advantages, batch.mask)
        return batch._replace(advantages=shaped, extras=batch.extras | Hidden(figures)._asdict())

    def remember(state, batch, rows, rewards):
        before, figures = declared(Averages, state.extras).averages, declared(Hidden, batch.extras).figures
        averages = ranks.updated_averages(before, figures, rate=settings.rate)
        score = followed(declared(Scored, state.extras).score, rewards.value, rewards.valid, rate=settings.rate)
        return state.extras | Averages(averages)._asdict() | Scored(score)._asdict()

    def first(params, key):
        return Averages(ranks.no_averages())._asdict() | Scored(jnp.zeros(()))._asdict()

    def together(batch, metrics):
        """How the figures go with each other and with the length, over the responses of the batch."""
        rank, velocity, _ = declared(Hidden, batch.extras).figures.T
        length = jnp.sum(batch.mask.astype(jnp.float32), axis=1)
        return {
            "hidden/rank_with_velocity": correlation(rank, velocity),
            "hidden/rank_with_length": correlation(rank, length),
        }

    def figures(logp, entropy, batch):
        wide = {"hidden/rank": 0, "hidden/velocity": 1, "hidden/acceleration": 2}
        each = declared(Hidden, batch.extras).figures
        return {k: jnp.broadcast_to(each[:, i, None], logp.shape) for k, i in wide.items()}

    def figures_of_batch(params, hidden, batch):
        each = declared(Hidden, batch.extras).figures
        mean = jnp.sum(each, axis=0) / each.shape[0]
        return 0.0, dict(zip(("hidden/rank", "hidden/velocity", "hidden/acceleration"), mean, strict=True))

    heat = {"temperature": settings.temperature}
    if critic:
        loss = actor_critic.make_actor_critic_loss(policy, extra_loss=figures_of_batch, **heat)
        slots = {"loss": loss, "actor": recipes.model_of}
    else:
        slots = {"loss": builders.make_policy_loss(policy, clipped_policy_loss, diagnostics=figures, **heat)}
    online = recipes.make_online(
        settings, bench, estimate=estimate, tx=optax.adam(settings.learning_rate), remember=remember, figures=together,
        **slots,
    )  # fmt: skip
    plan = recipes.one_stage(settings, bench, online, extras=first)
    return recipes.with_heads(bench, plan, value=1) if critic else plan


def claim(results: experiment.Results) -> experiment.Claim:
    """VERL is more accurate than GRPO and solves more with eight samples."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "verl", "grpo"),
        experiment.greater(results, "eval/pass@8", "verl", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
