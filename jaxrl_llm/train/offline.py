"""The offline loop: a fixed table of rows (documents, preference pairs), minibatches, updates; fused like the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.train.seed_axis import over_seeds
from jaxrl_llm.train.step import make_update, trained_part
from jaxrl_llm.types import Key, Metrics, Params, Sampler, TrainState


class Offline(NamedTuple):
    """The slots of an offline method; every one is a function or a number that the experiment chose."""

    rows: Callable[[dict[str, Any]], Any]  # extras -> the table: a tree whose leaves are [N, ...]
    sampler: Sampler  # over the N rows
    rows_per_step: int
    loss: Callable[..., tuple[Array, Metrics]]  # (params, extras, minibatch of the table), and what ``whole`` says
    tx: optax.GradientTransformation
    max_grad_norm: float | None = 1.0
    trained: str = ""  # the part of the parameters that trains, see ``train.step.make_update``
    # minibatch -> what its loss divides by, for example its tokens: the losses and metrics of parts then add up
    whole: Callable[[Any], Any] | None = None
    microbatches: int = 1  # more than one needs ``whole``


def init_state(offline: Offline, params: Params, key: Key, *, extras: dict[str, Any] | None = None) -> TrainState:
    """The state before the first update; ``extras`` hold what the loss needs beside the policy (reference, table)."""
    extras = dict(extras or {})
    count = jax.tree.leaves(offline.rows(extras))[0].shape[0]
    return TrainState(
        params=params,
        opt_state=offline.tx.init(trained_part(params, offline.trained)),
        step=jnp.zeros((), jnp.int32),
        key=key,
        sampler=offline.sampler.init(count),
        extras=extras,
    )


def iterate(offline: Offline, state: TrainState) -> tuple[TrainState, Metrics]:
    """Draws a minibatch and updates once.

    Raises:
      ValueError: for parts of a minibatch whose losses do not add up.
    """
    if offline.microbatches > 1 and offline.whole is None:
        raise ValueError(f"microbatches={offline.microbatches} needs whole=, what the loss divides by")
    ids, sampler = offline.sampler.draw(state.sampler, jax.random.fold_in(state.key, state.step), offline.rows_per_step)
    batch = jax.tree.map(lambda x: x[ids], offline.rows(state.extras))
    total = () if offline.whole is None else (offline.whole(batch),)
    update = make_update(
        lambda params, rows: offline.loss(params, state.extras, rows, *total),
        offline.tx,
        microbatches=offline.microbatches,
        max_grad_norm=offline.max_grad_norm,
        trained=offline.trained,
    )
    state, metrics = update(state, batch)
    return state._replace(step=state.step + 1, sampler=sampler), metrics


def scan_steps(offline: Offline, state: TrainState, steps: int) -> tuple[TrainState, Metrics]:
    """``steps`` updates; metrics are stacked ``[steps]``."""
    return jax.lax.scan(lambda s, _: iterate(offline, s), state, None, steps)


def make_run(
    offline: Offline,
    steps: int,
    *,
    seeds: bool = False,
    place: Callable[[TrainState], TrainState] | None = None,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A compiled function that advances a state by ``steps`` updates; the state is donated.

    Args:
      seeds: every leaf of the state has a leading seed axis, and so have the metrics.
      place: inside ``jit``, keeps the new state where it was, see ``host.make_host_loop``.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")

    def body(state: TrainState) -> tuple[TrainState, Metrics]:
        state, metrics = scan_steps(offline, state, steps)
        return (state if place is None else place(state)), metrics

    return jax.jit(over_seeds(body) if seeds else body, donate_argnums=0, compiler_options=options_of())
