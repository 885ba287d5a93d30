"""A progress estimator for the episodes of an arena: a decoder with a scalar head at the end of every action.

The parameters of a run are ``{"model": policy, "value": head of PPO, "progress": {"model": tree, "head": head}}``;
``progress`` is fitted to returns of the base's episodes first, then the policy trains on what it says.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from experiments.agents.parts import arena as arenas
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses.reward import return_sum_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage, tabled
from jaxrl_llm.types import Key, Params, Trajectories


def with_estimator(params: Params, key: Key) -> Params:
    """The policy, a value head that says 0, an estimator that starts from the policy."""
    start = episode_methods.with_value(params, key)
    estimator = {"model": jax.tree.map(jnp.copy, start["model"]), "head": jax.tree.map(jnp.copy, start["value"])}
    return start | {"progress": estimator}


def contributions(
    arena: arenas.Arena | episode_methods.HostTasks, params: Params, rows: Trajectories
) -> Float[Array, "B K"]:
    """What the estimator says at the last token of each turn's action; 0 where no action was taken.

    Args:
      params: ``{"model", "head"}`` of the estimator.
    """
    hidden = arena.policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    turns = multi_turn.turns_of(rows)
    said = jnp.take_along_axis(heads.token_values(params["head"], hidden), turns.end, axis=1)
    return jnp.where(turns.taken, said, 0.0)


def fit_stage(
    arena: arenas.Arena | episode_methods.HostTasks,
    *,
    steps: int,
    table: int = 512,
    rows_per_step: int = 32,
    learning_rate: float = 1e-3,
    rollout: Callable[..., Trajectories] | None = None,
) -> Stage:
    """Fits the estimator to ``table`` episodes of the policy of then: its contributions shall sum to the return.

    Args:
      rollout: of single episodes; None: the arena's.
    """
    if rollout is None:
        rollout = arenas.arena_episodes(arena, arena.train, group_size=1)

    def explore(params, key):
        ids = jax.random.randint(key, (table,), 0, arena.train.tokens.shape[0], jnp.int32)
        # tasks repeat, so that each row has a key of its own instead of its task's
        keys = sample_keys(jax.random.fold_in(key, 1), 0, jnp.arange(table, dtype=jnp.int32), 1)
        return {"rows": rollout(params["model"], arena.train.tokens[ids], arena.train.valid[ids], keys, ids)}

    def loss(params, extras, rows):
        rewards, turns = multi_turn.episode_rewards({}, rows), multi_turn.turns_of(rows)
        terms = return_sum_loss(contributions(arena, params["progress"], rows), rewards.value, turns.taken)
        value = reduce.scalars(terms.loss, rewards.valid)
        return value, {"fit/error": value, "tokens/trained": jnp.sum(rows.mask.astype(jnp.float32))}

    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(learning_rate))
    return Stage(method, steps, explore)


@lru_cache(maxsize=16)
def make_start(arena: arenas.Arena, *, base_steps: int, fit: Callable[..., Stage]) -> Callable[[Key], Params]:
    """The ``init`` of a plan: ``with_estimator`` of the base, the estimator fitted to the base's own episodes.

    Args:
      fit: ``fit_stage`` with its sizes bound; the same object for all arms, so that they share the program.
    """
    base, stage = arenas.make_base(arena, steps=base_steps), fit(arena)

    def init(key):
        start, played, run = with_estimator(base(key), key), jax.random.fold_in(key, 9), jax.random.fold_in(key, 10)
        state = offline.init_state(stage.method, start, run, extras=stage.extras(start, played))
        return offline.scan_steps(stage.method, state, stage.steps)[0].params

    return init
