"""Parts of experiments on learned constraints: walks among words, a constraint from demonstrations, CAPO."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import strings
from experiments.preference.parts import zones as toy
from jaxrl_llm import reduce
from jaxrl_llm.advantages import constrained, group
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses import preference
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Metrics, Params, Rewards

WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, layers=2, heads=4
)
DEMONSTRATIONS = 1024


def draw_demonstrations(key: Key) -> tuple[Array, Array, Array]:
    """``(prompts, walks, violating)``: shortest walks in worlds with the old words, some of them through danger."""
    prompts, walks = toy.draw_walks(key, DEMONSTRATIONS)
    return prompts, walks, toy.violates(prompts, walks)


def chances(weights: Params, features: Array) -> Array:
    """``c(s)``: a logistic function of what is known of each place, ``[N, M]``."""
    return jax.nn.sigmoid(features @ weights["direction"] + weights["bias"])


def fit_constraint(features: Callable[..., Array], key: Key, *, steps: int) -> Params:
    """CLIRL: a constraint from demonstrations that violate and others that do not."""
    prompts, walks, bad = draw_demonstrations(key)
    seen, (_, going) = features(prompts, walks), toy.words_met(prompts, walks)
    first = {"direction": jnp.zeros((seen.shape[2],), jnp.float32), "bias": jnp.asarray(-2.0)}

    def loss(params, extras, batch):
        x, going, bad = batch
        return reduce.scalars(constrained.constraint_loss(chances(params, x), bad, going).loss), {}

    method = Offline(lambda extras: extras["rows"], make_uniform(), 128, loss, optax.adam(0.05))
    state = offline.init_state(method, first, jax.random.fold_in(key, 1), extras={"rows": (seen, going, bad)})
    return offline.scan_steps(method, state, steps)[0].params


def of_words(prompts: Array, responses: Array) -> Array:
    """The words' meaning."""
    return toy.word_features(toy.words_met(prompts, responses)[0])


@lru_cache(maxsize=4)
def make_start(*, base_steps: int, constraint_steps: int) -> Callable[[Key], dict[str, Params]]:
    """The ``init`` of a plan: a policy that walks blindly, its copy, and constraints by words and by coordinates."""
    base = strings.make_base(WORLD, toy.draw_walks, steps=base_steps, table=4096, learning_rate=3e-3)

    def init(key):
        policy = base(key)
        return {
            "policy": policy,
            "reference": jax.tree.map(jnp.copy, policy),
            "words": fit_constraint(of_words, jax.random.fold_in(key, 1), steps=constraint_steps),
            "cells": fit_constraint(toy.cell_features, jax.random.fold_in(key, 1), steps=constraint_steps),
        }

    return init


# --- the cost of walks ``(params, prompts, walks) -> [N]`` as an arm believes it


def no_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """Danger is no matter."""
    return jnp.zeros(prompts.shape[:1], jnp.float32)


def listed_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """1 for a walk over a word of the list of the demonstrations' dangers: it does not know the new ones."""
    words, going = toy.words_met(prompts, walks)
    return jnp.any(going & (words >= toy.DANGER) & (words < toy.NEW), axis=1).astype(jnp.float32)


def _learned(params: Params, features: Array, prompts: Array, walks: Array) -> Array:
    return constrained.violation(chances(jax.lax.stop_gradient(params), features), toy.words_met(prompts, walks)[1])


def word_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """The constraint learned from words."""
    return _learned(params["words"], of_words(prompts, walks), prompts, walks)


def cell_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """The constraint learned from coordinates."""
    return _learned(params["cells"], toy.cell_features(prompts, walks), prompts, walks)


def online_stage(
    cost: Callable[..., Array], *, shifted: bool, penalty: float | None, steps: int, prompts_per_step: int,
    group_size: int, learning_rate: float, rate: float,
) -> Stage:  # fmt: skip
    """Policy gradient on arrival under a cost: CAPO, or with a fixed ``penalty`` in the reward.

    The multiplier starts at 0 and is raised by ``rate`` times the mean cost of each batch.
    """
    base = builders.make_estimate(WORLD.policy, builders.per_response(lambda rewards, ids, valid: rewards))
    loss = builders.make_policy_loss(WORLD.policy, clipped_policy_loss)

    def estimate(params, extras, rows, rewards):
        spent = cost(params, *strings.responses_of(WORLD, rows))
        normal = group.group_normalized_advantages
        if penalty is None:
            parts = [normal(x, rows.group_ids, valid=rewards.valid) for x in (rewards.value, spent)]
            value = constrained.lagrangian_advantages(*parts, extras["multiplier"])
        else:
            value = normal(rewards.value - penalty * spent, rows.group_ids, valid=rewards.valid)
        batch = base(params["policy"], extras, rows, Rewards(value, rewards.valid))
        return batch._replace(extras={"cost": spent})

    def remember(state: Any, batch: Any, rows: Any, rewards: Any) -> dict[str, Any]:
        raised = constrained.dual_ascent(state.extras["multiplier"], reduce.scalars(batch.extras["cost"]), rate=rate)
        return state.extras | {"multiplier": raised}

    online = strings.make_online(
        WORLD, toy.draw_prompts(jax.random.key(3), 1024, shifted=shifted), strings.score_of(WORLD, toy.arrived),
        estimate=estimate, loss=lambda params, batch: loss(params["policy"], batch), tx=optax.adam(learning_rate),
        prompts_per_step=prompts_per_step, group_size=group_size, actor=lambda state: state.params["policy"],
        remember=remember,
    )  # fmt: skip
    return Stage(online, steps, _multiplier)


def _multiplier(params: Params, key: Key) -> dict[str, Array]:
    return {"multiplier": jnp.zeros((), jnp.float32)}


def _pairs(params: Params, key: Key) -> tuple[Array, ...]:
    """Two demonstrations in each world, of which only the chosen one is safe; the others do not count."""
    keys = jax.random.split(key, 2)
    prompts, first = toy.draw_walks(keys[0], DEMONSTRATIONS)
    second = _again(keys[1], prompts, first)
    bad = [toy.violates(prompts, x) for x in (first, second)]
    chosen, rejected = (jnp.where(bad[0][:, None], *x) for x in ((second, first), (first, second)))
    ref = [strings.sum_logp(WORLD, params["reference"], prompts, x) for x in (chosen, rejected)]
    return prompts, chosen, rejected, *ref, bad[0] != bad[1]


def _again(key: Key, prompts: Array, walks: Array) -> Array:
    """The same moves in another order."""
    real = walks != toy.END
    order = jnp.argsort(jnp.where(real, jax.random.uniform(key, walks.shape), 2.0), axis=1)
    return jnp.take_along_axis(walks, order, axis=1)


def pair_stage(*, steps: int, rows_per_step: int, learning_rate: float, beta: float = 0.1) -> Stage:
    """DPO on demonstrations, safe over violating."""

    def loss(params, extras, batch):
        prompts, *both, won, lost, kept = batch
        logp = strings.sum_logp(WORLD, params["policy"], jnp.tile(prompts, (2, 1)), jnp.concatenate(both))
        terms = preference.dpo_loss(*jnp.split(logp, 2), won, lost, beta=beta)
        trained = jnp.sum(kept.astype(jnp.float32)) * 2.0 * toy.RESPONSE_TOKENS
        return reduce.scalars(terms.loss, kept), {"tokens/trained": trained}

    return strings.table_stage(_pairs, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def measure(params: dict[str, Params], key: Key) -> Metrics:
    """Arrivals and violations in worlds with the old words and with the new ones."""
    found = {}
    for k, (name, shifted) in enumerate((("known", False), ("shifted", True))):
        prompts = toy.draw_prompts(jax.random.fold_in(key, 2 * k), 256, shifted=shifted)
        walks = strings.sample(WORLD, params["policy"], prompts, jax.random.fold_in(key, 2 * k + 1))
        found |= {
            f"{name}/arrived": reduce.scalars(toy.arrived(prompts, walks).astype(jnp.float32)),
            f"{name}/violations": reduce.scalars(toy.violates(prompts, walks).astype(jnp.float32)),
        }
    return found
