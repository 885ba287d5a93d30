"""The fused loop: rollout, verifier, advantage, loss and optimiser in one ``lax.scan`` under one ``jit``.

Seeds are a ``vmap`` axis of the state: ``run_seeds`` trains all of them in one compiled program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.online import Online, iterate
from jaxrl_llm.types import Metrics, Problems, Rewards, TrainState


def scan_steps(online: Online, state: TrainState, steps: int) -> tuple[TrainState, Metrics]:
    """``steps`` iterations; metrics are stacked ``[steps]``."""
    return jax.lax.scan(lambda s, _: iterate(online, s), state, None, steps)


def make_run(online: Online, steps: int, *, seeds: bool = False) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A compiled function of the state that advances it by ``steps`` iterations; the state is donated.

    Args:
      seeds: the state carries a leading seed axis on every leaf, and so do the metrics.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    body = partial(scan_steps, online, steps=steps)
    return jax.jit(jax.vmap(body) if seeds else body, donate_argnums=0)


def run(online: Online, state: TrainState, steps: int) -> tuple[TrainState, Metrics]:
    """Compiles and runs ``steps`` iterations; the given state is consumed."""
    return make_run(online, steps)(state)


def run_seeds(online: Online, states: TrainState, steps: int) -> tuple[TrainState, Metrics]:
    """Like ``run`` for states stacked over seeds on axis 0."""
    return make_run(online, steps, seeds=True)(states)


def stack_states(states: list[TrainState]) -> TrainState:
    """States of several seeds as one state with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def make_evaluate(
    rollout: Callable[..., Any],
    score: Callable[..., Rewards],
    problems: Problems,
    *,
    samples: int,
    seeds: bool = False,
) -> Callable[[Any, Array], dict[str, Array]]:
    """A compiled ``(params, key) -> {"value", "valid", "length_tokens"}``, each ``[N, samples]``.

    Args:
      rollout: as in ``Online``, with groups of ``samples``.
      problems: the held-out table, all of it in one batch.
      seeds: params and keys carry a leading seed axis.
    """

    def evaluate(params, key):
        ids = jnp.arange(problems.tokens.shape[0], dtype=jnp.int32)
        keys = sample_keys(key, 0, ids, samples)
        trajectories = rollout(params, problems.tokens, problems.valid, keys, ids)
        answers = jax.tree.map(lambda x: x[trajectories.problem_ids], problems.answers)
        rewards = score(answers, trajectories)
        length = jnp.sum(trajectories.mask.astype(jnp.float32), axis=1)
        shape = (problems.tokens.shape[0], samples)
        return {
            "value": rewards.value.reshape(shape),
            "valid": rewards.valid.reshape(shape),
            "length_tokens": length.reshape(shape),
        }

    return jax.jit(jax.vmap(evaluate) if seeds else evaluate)
