"""The offline loop: a fixed table of rows (documents, preference pairs), minibatches, updates; fused like the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.train import packing
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
    # seed -> a fresh iterator of minibatches on the host (``data.stream``), for tables larger than the device: ``rows``
    # is then one of them, for its shapes
    stream: Callable[[int], Any] | None = None


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


def draw(offline: Offline, state: TrainState) -> tuple[Array, Any]:
    """The rows of a minibatch, and the curriculum after the draw."""
    return offline.sampler.draw(state.sampler, jax.random.fold_in(state.key, state.step), offline.rows_per_step)


def iterate(offline: Offline, state: TrainState, layouts: Any = None) -> tuple[TrainState, Metrics]:
    """Draws a minibatch and updates once.

    Args:
      layouts: of ``packing.with_layouts`` for the rows that are drawn; None: they are computed as they stand.

    Raises:
      ValueError: for parts of a minibatch whose losses do not add up.
    """
    if offline.microbatches > 1 and offline.whole is None:
        raise ValueError(f"microbatches={offline.microbatches} needs whole=, what the loss divides by")
    ids, sampler = draw(offline, state)
    batch = jax.tree.map(lambda x: x[ids], offline.rows(state.extras))
    if layouts is not None:
        batch = packing.put(batch, layouts)
    return update_on(offline, state, batch, sampler)


def update_on(offline: Offline, state: TrainState, batch: Any, sampler: Any) -> tuple[TrainState, Metrics]:
    """One update on a given minibatch; ``sampler`` is that behind its draw."""
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
    planner: packing.Planner | None = None,
    shards: int = 1,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A compiled function that advances a state by ``steps`` updates; the state is donated.

    Args:
      seeds: every leaf of the state has a leading seed axis, and so have the metrics.
      place: inside ``jit``, keeps the new state where it was, see ``host.make_host_loop``.
      planner, shards: as there, for rows that have a place for a layout; of one seed.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if planner is not None:
        return _in_layouts(offline, steps, place, planner, shards)

    def body(state: TrainState) -> tuple[TrainState, Metrics]:
        state, metrics = scan_steps(offline, state, steps)
        return (state if place is None else place(state)), metrics

    return jax.jit(over_seeds(body) if seeds else body, donate_argnums=0, compiler_options=options_of())


def _in_layouts(
    offline: Offline,
    steps: int,
    place: Callable[[TrainState], TrainState] | None,
    planner: packing.Planner,
    shards: int,
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """``make_run`` whose minibatches are drawn ahead, so that the host can arrange their rows."""

    def drawn(state: TrainState) -> Array:
        def one(state: TrainState, _: None) -> tuple[TrainState, Array]:
            ids, sampler = draw(offline, state)
            return state._replace(step=state.step + 1, sampler=sampler), ids

        return jax.lax.scan(one, state._replace(params=(), opt_state=(), extras={}), None, steps)[1]

    def body(state: TrainState, layouts: list[Any]) -> tuple[TrainState, Metrics]:
        # a table whose minibatches have no rows to arrange has no layouts, and as many steps
        state, metrics = jax.lax.scan(lambda s, laid: iterate(offline, s, laid), state, layouts, length=steps)
        return (state if place is None else place(state)), metrics

    ahead, whole = jax.jit(drawn), jax.jit(body, donate_argnums=0, compiler_options=options_of())
    seen, table = [], []  # rows of the last call, and on the host

    def run(state: TrainState) -> tuple[TrainState, Metrics]:
        nodes = [x for x in jax.tree.leaves(offline.rows(state.extras), is_leaf=packing.is_laid) if packing.is_laid(x)]
        if [id(node.tokens) for node in nodes] != [id(node.tokens) for node in seen]:  # those of a seed's own extras
            seen[:], table[:] = nodes, [hosts.gathered(node) for node in nodes]
        ids = hosts.gathered(ahead(state))
        each = [jax.tree.map(lambda x, at=at: x[at], table) for at in ids]
        layouts = packing.of_one_shape(
            [packing.with_layouts(rows, planner, parts=offline.microbatches, shards=shards) for rows in each]
        )
        state, metrics = whole(state, layouts)
        return state, metrics

    run._cache_size = lambda: ahead._cache_size() + whole._cache_size()
    return run
