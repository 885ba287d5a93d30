"""Ways to choose a place for every call of ``ppo_calls``: by rule, by search."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.systems.parts import metropolis, ppo_calls
from experiments.systems.parts.ppo_calls import GENERATE, MODELS, Tables
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.types import Key

Allowed = Callable[[Tables], Array]


def _seconds(tables: Tables, plan: Array) -> Array:
    return ppo_calls.outcome(tables, plan).penalised


@jax.jit
def _best(tables: Tables, plans: Array) -> Int[Array, " 6"]:
    return metropolis.cheapest(lambda plan: _seconds(tables, plan), plans).plan


def _on_all(options: list[Place]) -> list[int]:
    most = max(place.sizes.chips for place in options)
    return [k for k, place in enumerate(options) if place.sizes.chips == most]


def symmetric_plan(tables: Tables, options: list[Place], key: Key, **unused) -> Int[Array, " 6"]:
    """All calls on all devices in the one layout that is best for them together, as where nothing is moved."""
    runs = np.asarray(jnp.all(ppo_calls.runnable(tables), axis=0))
    plans = [[k] * len(MODELS) for k in _on_all(options) if runs[k]]
    if not plans:
        raise UserError("no layout on all devices serves every call; choose other rows or another topology")
    return _best(tables, jnp.asarray(plans, jnp.int32))


def zero_plan(tables: Tables, options: list[Place], key: Key, **unused) -> Int[Array, " 6"]:
    """All devices: scoring and training with fully sharded weights, generation with as much tensor as there can be."""
    sharded, tensor = ppo_calls.zero_places(options)
    return jnp.full((len(MODELS),), sharded, jnp.int32).at[GENERATE].set(tensor)


def greedy_plan(tables: Tables, options: list[Place], key: Key, **unused) -> Int[Array, " 6"]:
    """Every call where it alone is fastest; the first of equals."""
    return jnp.argmin(tables.seconds, axis=1).astype(jnp.int32)


@lru_cache(maxsize=8)
def _searcher(steps: int, of_models: bool) -> Callable[..., Array]:
    """The compiled search: arms and seeds of equal sizes share it."""
    spread = ppo_calls.together if of_models else lambda plan: plan

    models = np.asarray(MODELS)
    alone = np.eye(max(MODELS) + 1 if of_models else len(MODELS), dtype=bool)
    pairs = [models == k for k in range(max(MODELS) + 1) if np.sum(models == k) > 1]
    groups = jnp.asarray(alone if of_models else np.stack([*alone, *pairs]))

    def search(tables, allowed, starts, key, betas):
        found = metropolis.metropolis(
            lambda plan: _seconds(tables, spread(plan)), starts, allowed, key, betas, groups=groups, steps=steps
        )
        return spread(found.plan)

    return jax.jit(search)


def metropolis_plan(
    tables: Tables, options: list[Place], key: Key, *, allowed: Allowed, betas: tuple[float, ...], steps: int
) -> Int[Array, " 6"]:
    """``metropolis.metropolis`` among the allowed places, from the greedy plan among them and from each other plan.

    Those are the plans of ``symmetric_plan``, ``zero_plan`` and, with this key, ``metropolis_plan_of_models``: the
    plan that is found is never slower than they are.
    """
    may = allowed(tables)
    greedy = jnp.argmin(jnp.where(may, tables.seconds, jnp.inf), axis=1).astype(jnp.int32)
    tied = metropolis_plan_of_models(tables, options, key, betas=betas, steps=steps)
    starts = greedy, symmetric_plan(tables, options, key), zero_plan(tables, options, key), tied
    return _searcher(steps, False)(tables, may, jnp.stack(starts), key, jnp.asarray(betas, jnp.float32))


def metropolis_plan_of_models(
    tables: Tables, options: list[Place], key: Key, *, betas: tuple[float, ...], steps: int, **unused
) -> Int[Array, " 6"]:
    """The same search with one place for all calls of a model, so that no weights ever move: any that can run."""
    own = jnp.asarray(MODELS)[None, :] == jnp.arange(max(MODELS) + 1)[:, None]  # [models, calls]
    may = jnp.all(ppo_calls.runnable(tables)[None] | ~own[:, :, None], axis=1)
    summed = jnp.sum(jnp.where(own[:, :, None], tables.seconds[None], 0.0), axis=1)
    start = jnp.argmin(jnp.where(may, summed, jnp.inf), axis=1).astype(jnp.int32)
    return _searcher(steps, True)(tables, may, start[None], key, jnp.asarray(betas, jnp.float32))
