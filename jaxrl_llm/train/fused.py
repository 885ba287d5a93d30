"""The fused loop: rollout, verifier, advantage, loss and optimiser in one ``lax.scan`` under one ``jit``.

Seeds are an axis of the state: ``run_seeds`` trains all of them in one compiled program (``seeds.over_seeds``). So are
hyper-parameters that the state holds: ``optax.inject_hyperparams`` keeps a learning rate in ``opt_state``, and numbers
in ``state.extras`` reach the loss through ``make_estimate(row_extras=...)``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.online import Online, iterate
from jaxrl_llm.train.seed_axis import over_seeds
from jaxrl_llm.types import Key, Metrics, Problems, Rewards, TrainState


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
    return jax.jit(over_seeds(body) if seeds else body, donate_argnums=0, compiler_options=options_of())


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

    return jax.jit(over_seeds(evaluate) if seeds else evaluate)


def pass_at_1(scores: dict[str, Array]) -> Array:
    """Mean over problems of the share of right samples (``value > 0.5``) among the valid ones, jittable.

    A problem without a valid sample is left out.

    Args:
      scores: what ``make_evaluate`` returns.
    """
    valid = scores["valid"]
    count = jnp.sum(valid.astype(jnp.float32), axis=1)
    right = jnp.sum((valid & (scores["value"] > 0.5)).astype(jnp.float32), axis=1)
    return reduce.scalars(right / jnp.maximum(count, 1.0), count > 0)


def make_evaluated_run(
    online: Online,
    evaluate: Callable[[Any, Key], dict[str, Array]],
    key: Key,
    steps: int,
    *,
    eval_every: int,
    seeds: bool = False,
) -> Callable[[TrainState], tuple[TrainState, Metrics, Metrics]]:
    """Like ``make_run`` with an evaluation after every ``eval_every`` steps, in the same compiled program.

    Returns ``(state, metrics [steps], {"eval/pass_at_1", "eval/mean_tokens"} [steps / eval_every])``. Training is that
    of ``make_run``: an evaluation draws with ``key`` alone, the same one each time.

    Args:
      evaluate: from ``make_evaluate`` without ``seeds``.

    Raises:
      ValueError: when ``eval_every`` does not divide ``steps``.
    """
    if eval_every < 1 or steps < 1 or steps % eval_every:
        raise ValueError(f"eval_every={eval_every} must divide steps={steps}, both at least 1")

    # a nested scan, not a condition on the step: under vmap a condition would evaluate at every step
    def block(state, _):
        state, metrics = scan_steps(online, state, eval_every)
        scores = evaluate(state.params, key)
        figures = {"eval/pass_at_1": pass_at_1(scores), "eval/mean_tokens": jnp.mean(scores["length_tokens"])}
        return state, (metrics, figures)

    def body(state):
        state, (metrics, figures) = jax.lax.scan(block, state, None, steps // eval_every)
        return state, jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), metrics), figures

    return jax.jit(over_seeds(body) if seeds else body, donate_argnums=0, compiler_options=options_of())
