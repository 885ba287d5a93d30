"""Prompts of medium difficulty chosen by a value model (Prompt Curriculum Learning).

Paper:     Gao et al., "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135.
Claim:     a value model trained along with the policy finds prompts of success 1/2 far faster than rollouts do, and
           with them training is at least as accurate for fewer tokens.
Equations: of k m random prompts take the m with the least |V(x) - tau|; G responses each, p = mean r; A = r - mean, one
           on-policy step; then one step on sum (V(x) - p)^2 over the m prompts. V = sigmoid of a linear head on the
           base model's hidden state at the end of the prompt. tau_hard: tau = 0.3; frozen: V stays at 1/2, so any
           prompt will do: random prompts; prefilter: prompts whose base pass rate lies in [0.25,
           0.75]; dictionary: past success of each prompt, drawn by p (1 - p); tau_easy: tau = 0.7. Four times the
           rollouts: oracle, of k m prompts rolled out those m whose p is nearest to tau train; dynamic, the first m
           with both outcomes. value_model: V is a copy of the policy with a head, all of which trains, in the place of
           the head alone.
Left out:  the study of the best batch size.
Expect:    group/degenerate_fraction pcl < frozen; eval/accuracy pcl > frozen and no worse than prefilter.
Measure:   held-out Countdown with 2 to 4 numbers; 8 seeds, equal rollouts but for the two controls. If oracle does not
           win, the bed cannot show what better prompts are worth. value/spearman: rank correlation of V, as it was when
           the prompts were drawn, with their p. What V has chosen lies near tau in V and says little of it: over
           random prompts (--candidates 1) it is 0.38.
Run:       python -m experiments.curriculum.pcl
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from experiments.curriculum.parts.prompt_value import (
    head_values,
    make_value_sampler,
    model_values,
    nearest_prompts,
    prompt_features,
    started_head,
    started_model,
)
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.balanced import make_balanced
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.types import Params, TrainState, Trajectories, declared


def nearest_groups(rates: Array, *, count: int, target: float) -> Array:
    """The groups whose success rate is nearest to the target, as a mask: what a perfect value model would have taken.

    >>> nearest_groups(jnp.array([0.0, 0.5, 1.0, 0.4]), count=2, target=0.5).tolist()
    [False, True, False, True]
    """
    taken = nearest_prompts(rates, target=target, count=count)
    return jnp.zeros(rates.shape, bool).at[taken].set(True)


def first_mixed(rates: Array, *, count: int, target: float) -> Array:
    """The first groups with both outcomes: dynamic sampling.

    >>> first_mixed(jnp.array([0.0, 0.5, 1.0, 0.4, 0.1]), count=2, target=0.5).tolist()
    [False, True, False, True, False]
    """
    mixed = (rates > 0) & (rates < 1)
    return mixed & (jnp.cumsum(mixed.astype(jnp.int32)) <= count)


def spearman(x: Array, y: Array) -> Array:
    """Correlation of the ranks, ties sharing their mean rank; 0 where one of them is constant.

    >>> x = jnp.array([1.0, 2.0, 3.0])
    >>> [round(float(spearman(x, jnp.array(y))), 4) for y in ([1.0, 4.0, 9.0], [2.0, 1.0, 1.0])]
    [1.0, -0.866]
    """

    def centred(values):
        below = jnp.sum((values[None, :] < values[:, None]).astype(jnp.float32), axis=1)
        same = jnp.sum((values[None, :] == values[:, None]).astype(jnp.float32), axis=1)
        rank = below + 0.5 * same
        return rank - jnp.mean(rank)

    a, b = centred(x), centred(y)
    size = jnp.sqrt(jnp.sum(a**2) * jnp.sum(b**2))
    return jnp.where(size > 0, jnp.sum(a * b) / jnp.maximum(size, 1e-12), 0.0)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    prompts_per_step: int = 512
    group_size: int = 16
    choose: str = "value"  # value, model, prefilter, dictionary, uniform
    candidates: int = 4  # prompts valued for each one taken
    target: float = 0.5
    value_rate: float = 0.03  # step of the value head, or of the whole value model; 0 freezes it
    take: Callable[..., Array] | None = None  # which groups train of `candidates` times as many that are rolled out


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 120, "eval_every": 40, "prompts_per_step": 8, "group_size": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 1024,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 64, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 14,
}  # fmt: skip
ARMS = {
    "frozen": {"value_rate": 0.0},
    "prefilter": {"choose": "prefilter"},
    "dictionary": {"choose": "dictionary"},
    "pcl": {},
    "tau_hard": {"target": 0.3},
    "tau_easy": {"target": 0.7},
    "oracle": {"choose": "uniform", "take": nearest_groups},
    "dynamic": {"choose": "uniform", "take": first_mixed},
    "value_model": {"choose": "model", "value_rate": 3e-4},
}
BED = experiment.Bed(positive="oracle")
METRICS = ("eval/accuracy", "eval/accuracy_4", "eval/pass@8", "reward/mean", "group/degenerate_fraction")
CURVES = ("eval/accuracy", "eval/pass@8", "reward/mean", "group/degenerate_fraction", "value/spearman")


def build(settings: Settings) -> experiment.Plan:
    """One online stage of centred advantages; the arm chooses how prompts are drawn."""
    found = recipes.bench(settings)
    slots = {}
    aim = {"candidates": settings.candidates, "target": settings.target}
    if settings.choose in ("value", "model"):
        if settings.choose == "value":
            features = prompt_features(settings)
            values, start = head_values(features), partial(started_head, features.shape[1])
        else:
            values = model_values(found.model.policy, found.train.tokens, found.train.valid)
            start = partial(started_model, found.model.params, found.model.config.hidden_size)
        prompts, tx = found.train.tokens.shape[0], optax.adam(settings.value_rate)
        sampler = make_value_sampler(values, start, prompts, tx, **aim)
        slots = watched(settings, recipes.rollout_of(settings, found), values)
    elif settings.choose == "prefilter":
        every = np.arange(found.train.tokens.shape[0])
        rates = curricula.sample_pass_rates(found, settings, every, samples=8)
        sampler = curricula.make_chosen((rates >= 0.25) & (rates <= 0.75), "solved in 25 to 75 % of its samples")
    else:
        sampler = make_balanced() if settings.choose == "dictionary" else make_uniform()
    if settings.take is not None:
        slots = {"prompts_per_step": settings.candidates * settings.prompts_per_step, "keep": taken(settings)}
    online = curricula.make_single_turn_grpo(
        settings, found, sampler=sampler, advantages=group.dr_grpo_advantages, **slots
    )
    stages = [experiment.Stage(online, settings.steps)]
    return curricula.make_single_turn_plan(settings, found, stages, more=curricula.by_level)


def taken(settings: Settings):
    """``keep`` of an estimate: rows of the groups that train."""

    def keep(trajectories, rewards):
        right = (rewards.valid & (rewards.value > 0.5)).astype(jnp.float32).reshape(-1, settings.group_size)
        rates = jnp.sum(right, axis=1) / settings.group_size
        groups = settings.take(rates, count=settings.prompts_per_step, target=settings.target)
        return jnp.repeat(groups, settings.group_size)

    return keep


class Valued(NamedTuple):
    """Extras of rows: what the value model that drew them says of their prompt."""

    value: Array


class Judged(NamedTuple):
    """Extras of a batch: whether the response is right."""

    right: Array


def acting(state: TrainState) -> tuple[Params, Params]:
    """The ``actor`` slot: the policy, and the value model that draws."""
    return state.params, state.sampler.params


def watched(settings: Settings, rollout: Callable[..., Trajectories], values: Callable) -> dict[str, Callable]:
    """Slots that say how the value model ranks the prompts that it has drawn, before it learns from them."""

    def valued(actor, tokens, valid, keys, ids):
        params, drawing = actor
        rows = rollout(params, tokens, valid, keys, ids)
        value = Valued(jnp.repeat(values(drawing, ids), settings.group_size))
        return rows._replace(extras=rows.extras | value._asdict())

    def row_extras(extras, trajectories, rewards):
        right = Judged((rewards.valid & (rewards.value > 0.5)).astype(jnp.float32))
        return declared(Valued, trajectories.extras)._asdict() | right._asdict()

    def figures(batch, metrics):
        one_of_each = declared(Valued, batch.extras).value[:: settings.group_size]
        right = declared(Judged, batch.extras).right.reshape(-1, settings.group_size)
        return {"value/spearman": spearman(one_of_each, jnp.sum(right, axis=1))}

    return {"rollout": valued, "actor": acting, "row_extras": row_extras, "figures": figures}


def claim(results: experiment.Results) -> experiment.Claim:
    """A trained value model finds prompts with both outcomes and ends higher than random prompts, for no rollout."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "pcl", "frozen"),
        experiment.smaller(results, "group/degenerate_fraction", "pcl", "frozen"),
        experiment.greater(results, "eval/accuracy", "pcl", "prefilter", by=-0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
