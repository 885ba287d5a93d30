"""Policy mirror descent on squared errors, a length reward and sampling of what fails (Kimi k1.5).

Paper:     Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", arXiv:2501.12599.
Claim:     without value model, tree search or process rewards, online mirror descent with negative gradients beats
           imitation of good samples; a length reward shortens responses; sampling prompts in proportion to their
           failures beats uniform draws.
Equations: loss = (r - mean - tau log(pi(y) / pi_old(y)))^2 for each response; length reward lam = 0.5 - (len - min) /
           (max - min), min(0, lam) for wrong answers; prompt drawn with weight 1 - success. positives: wrong responses
           do not train (ReST-like). grpo: clipped surrogate, normalised advantages; reinforce: -rho A, no clip.
           reset: the optimiser begins anew with every rollout, since the reference is another; curriculum: half of the
           steps on the half that the starting model solves most often (of 10 tries), then all, by failures. partial: an
           iteration writes budget tokens of each response; those that have not ended wait, go on under the weights of
           the next one, and train with their group when all have ended (or repeat themselves), older tokens with the
           log-probabilities of their time; partial_fresh: older tokens do not train.
Left out:  vision. long2short: its filters are advantages.selection.shortest_right and
           longer_rejected.
Expect:    eval/accuracy: mirror > positives; length: eval/tokens below mirror's with eval/accuracy not 0.03 below.
Measure:   held-out arithmetic chains with optional scratchpad, two updates for each rollout so that the squared
           log-ratio acts; 8 seeds, equal rollouts and updates.
Run:       python -m experiments.policy_gradient.kimi_k15
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import partial_rollouts
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, sign
from jaxrl_llm.curriculum import balanced
from jaxrl_llm.curriculum.subset import make_subset
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.off_policy import mirror_descent_loss
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Stage, no_extras
from jaxrl_llm.types import Sampler, TokenTerms

TRIES = 10  # samples of the starting model that grade a problem


def kept(tx: optax.GradientTransformation, updates: int) -> optax.GradientTransformation:
    """The optimiser as it is."""
    return tx


def reset_every(tx: optax.GradientTransformation, updates: int) -> optax.GradientTransformation:
    """``tx`` whose state begins anew after every ``updates``: those of one rollout."""

    def update(grads, state, params=None):
        count, inner = state
        fresh = tx.init(grads if params is None else params)
        inner = jax.tree.map(lambda new, old: jnp.where(count % updates == 0, new, old), fresh, inner)
        changes, inner = tx.update(grads, inner, params)
        return changes, (count + 1, inner)

    return optax.GradientTransformation(lambda params: (jnp.zeros((), jnp.int32), tx.init(params)), update)


def at_once(settings, bench: recipes.Bench, online: Online) -> tuple[Stage, ...]:
    return (Stage(online, settings.steps),)


def easy_first(settings, bench: recipes.Bench, online: Online) -> tuple[Stage, ...]:
    """The easier half of the problems for half of the steps, then all by their failures."""
    every = np.arange(bench.train.tokens.shape[0])
    rates = curricula.sample_pass_rates(bench, settings, every, samples=TRIES)
    easy = np.argsort(-rates, kind="stable")[: max(1, every.size // 2)]
    half, later = settings.steps // 2, balanced.make_balanced(weigh=balanced.failure)
    return (
        Stage(online._replace(sampler=make_subset(easy)), half),
        Stage(online._replace(sampler=later), settings.steps - half),
    )


def whole(settings, bench: recipes.Bench) -> tuple[dict, Callable]:
    """Every response is written in one iteration."""
    return {}, no_extras


def in_parts(settings, bench: recipes.Bench) -> tuple[dict, Callable]:
    """An iteration writes ``budget`` tokens of a response; what has not ended goes on in the next."""
    if settings.sampler is not make_uniform or settings.order is not at_once:
        # the outcome of a group that waited would be told to the sampler as that of the prompt drawn in its place
        raise UserError("a rollout in parts needs prompts drawn uniformly and at once; leave sampler and order")
    return partial_rollouts.make_partial_rollout(settings, bench, budget=settings.budget)


def every_token(estimate: Callable) -> Callable:
    """All tokens of a response train, whichever iteration wrote them."""
    return estimate


def newest_tokens(estimate: Callable) -> Callable:
    """Only the tokens of this iteration train."""
    return partial_rollouts.only_fresh(estimate, reduction="seq_mean")


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    updates_per_rollout: int = 4
    loss: Callable[..., TokenTerms] = partial(mirror_descent_loss, tau=0.1)
    advantages: Callable[..., Array] = group.dr_grpo_advantages
    samples: Callable[[Array], Array] | None = None  # sign.right_samples, or all
    length_weight: float = 0.0
    sampler: Callable[[], Sampler] = make_uniform
    optimiser: Callable[..., optax.GradientTransformation] = kept  # (tx, updates of a rollout) -> tx
    order: Callable[..., tuple[Stage, ...]] = at_once
    write: Callable[..., tuple[dict, Callable]] = whole  # slots and extras of the rollout
    train_on: Callable[[Callable], Callable] = every_token
    budget: int = 8192  # tokens of a response in an iteration, where it is written in parts


EMBEDDED = {
    "levels": (2, 3), "steps": 120, "eval_every": 30, "prompts_per_step": 6, "max_new_tokens": 26,
    "learning_rate": 2e-4, "eval_problems": 64, "updates_per_rollout": 2, "train_problems": 1024,
    "budget": 9,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "budget": 3,
}  # fmt: skip
ARMS = {
    "grpo": {"loss": clipped_policy_loss, "advantages": group.group_normalized_advantages},
    "mirror": {},
    "reinforce": {"loss": mixed.ratio_loss},
    "length": {"length_weight": 0.5},
    "prioritised": {"sampler": partial(balanced.make_balanced, weigh=balanced.failure)},
    "positives": {"samples": sign.right_samples},
    "reset": {"optimiser": reset_every},
    "curriculum": {"order": easy_first},
    "partial": {"write": in_parts},
    "partial_fresh": {"write": in_parts, "train_on": newest_tokens},
}
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens", "eval/right_tokens", "policy/entropy")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage; the arm sets loss, length reward, sampler and which responses train."""
    bench = recipes.bench(settings)
    chosen, weight = settings.samples, settings.length_weight

    def advantages(rows, rewards):
        length = jnp.sum(rows.mask.astype(jnp.int32), axis=1)
        extremes = shaping.group_extremes(length.astype(jnp.float32), rows.group_ids, valid=rewards.valid)
        bonus = shaping.length_reward(length, rewards.value > 0.5, *extremes)
        total = rewards._replace(value=rewards.value + weight * bonus)
        return builders.per_response(settings.advantages)(rows, total)

    slots, extras = settings.write(settings, bench)
    estimate = builders.make_estimate(
        bench.model.policy,
        advantages,
        reduction="seq_mean",
        temperature=settings.temperature,
        keep=None if chosen is None else lambda rows, rewards: chosen(rewards.value),
    )
    online = recipes.make_online(
        settings,
        bench,
        sampler=settings.sampler(),
        estimate=settings.train_on(estimate),
        loss=builders.make_policy_loss(
            bench.model.policy,
            settings.loss,
            reduction="seq_mean",
            temperature=settings.temperature,
            anchor=builders.stored_anchor,
        ),
        tx=settings.optimiser(optax.adam(settings.learning_rate), settings.updates_per_rollout),
        updates_per_rollout=settings.updates_per_rollout,
        **slots,
    )
    stages = tuple(stage._replace(extras=extras) for stage in settings.order(settings, bench, online))
    plan = recipes.one_stage(settings, bench, online)
    return plan._replace(stages=stages)


def claim(results: experiment.Results) -> experiment.Claim:
    """Mirror descent beats training on right samples alone; the length reward shortens without losing 0.03."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "mirror", "positives"),
        experiment.smaller(results, "eval/tokens", "length", "mirror"),
        experiment.greater(results, "eval/accuracy", "length", "mirror", by=-0.03),
    )


if __name__ == "__main__":
    experiment.main(__name__)
