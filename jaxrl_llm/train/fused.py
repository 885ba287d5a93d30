"""The fused loop: rollout, verifier, advantage, loss and optimiser in one ``lax.scan`` under one ``jit``.

Seeds are an axis of the state: ``make_run(seeds=True)`` trains all of them in one compiled program
(``seed_axis.over_seeds``). So are hyper-parameters that the state holds: ``optax.inject_hyperparams`` keeps a learning
rate in ``opt_state``, and numbers in ``state.extras`` reach the loss through ``make_estimate(row_extras=...)``.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.train.online import Online, iterate
from jaxrl_llm.train.seed_axis import over_seeds
from jaxrl_llm.types import Metrics, TrainState


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
    return jax.jit(over_seeds(body) if seeds else body, donate_argnums=0, compiler_options=options_of(samples=True))


def run(online: Online, state: TrainState, steps: int) -> tuple[TrainState, Metrics]:
    """Compiles and runs ``steps`` iterations; the given state is consumed."""
    return make_run(online, steps)(state)


def stack_states(states: list[TrainState]) -> TrainState:
    """States of several seeds as one state with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
