"""One optimiser step: micro-batches summed, clipped once after accumulation, then applied."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_llm.distributed import offload
from jaxrl_llm.train import parity
from jaxrl_llm.train.packing import LAYOUT
from jaxrl_llm.train.skipped import SKIPPED
from jaxrl_llm.types import Batch, Metrics, Params, TrainState, declared

BASE = "base"  # of an adapted policy: the weights that do not train
COUNTS = "tokens/"  # how names of metrics begin that count
LossFn = Callable[[Params, Batch], tuple[Float[Array, ""], Metrics]]


def split_rows(tree: Any, parts: int) -> Any:
    """Every row array as ``[parts, B / parts, ...]``; scalars are repeated: they belong to the step."""
    rows = next((x.shape[0] for x in jax.tree.leaves(tree) if x.ndim), 0)
    if rows % parts:
        raise ValueError(f"microbatches={parts} does not divide the batch of {rows} sequences")

    def split(x: Array) -> Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (parts,))
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])  # a layout has rows of its own

    return jax.tree.map(split, tree)


def numbered(ids: Array) -> Array:
    """The groups of a part of a batch numbered anew: ids lie below the number of its rows."""
    return jnp.unique(ids, return_inverse=True, size=ids.shape[0])[1].astype(ids.dtype)


def split_batch(batch: Batch, parts: int) -> Batch:
    """``split_rows`` with groups ``numbered`` anew in each part."""
    split = split_rows(batch, parts)
    return split._replace(group_ids=jax.vmap(numbered)(split.group_ids))


def trained_first(batch: Batch) -> Batch:
    """The same rows with the groups that train before those without a single masked token; groups stay whole.

    >>> import numpy as np
    >>> from jaxrl_llm.types import Batch
    >>> rows = {f: jnp.zeros((4, 1)) for f in Batch._fields} | {"total": jnp.ones(()), "extras": {}}
    >>> batch = Batch(**rows)._replace(mask=jnp.array([[0], [0], [0], [1]]) > 0, group_ids=jnp.array([0, 0, 1, 1]))
    >>> trained_first(batch).group_ids.tolist()
    [1, 1, 0, 0]
    """
    rows = batch.mask.shape[0]
    trains = jax.ops.segment_max(jnp.any(batch.mask, axis=1).astype(jnp.int32), batch.group_ids, num_segments=rows)
    order = jnp.argsort(-trains[batch.group_ids], stable=True)
    return jax.tree.map(lambda x: x if x.ndim == 0 else x[order], batch)


def _add(left, right):
    right = jax.tree.map(_as_wide, right[0], left[0]), *right[1:]
    grads, loss, metrics = jax.tree.map(jnp.add, left, right)
    largest = {k: jnp.maximum(left[2][k], right[2][k]) for k in metrics if k.endswith("_max")}
    return grads, loss, metrics | largest


def _as_wide(x: Array, like: Array) -> Array:
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def accumulate(loss_fn: LossFn, params: Params, batch: Any, microbatches: int) -> tuple[Params, Array, Metrics]:
    """Gradient, loss and metrics of the whole batch, ``microbatches`` parts in turn.

    Because the loss divides by ``batch.total`` of the whole step, parts *add up*; nothing is averaged twice. Groups
    that train come first, and a part without a masked token costs nothing.
    Metrics are per part means weighted by the part's share of masked tokens; names ending in ``_max`` keep the largest,
    and counts, whose names begin with ``tokens/``, are added up.
    Of another tree of rows than a ``Batch`` the parts' metrics are added up as the losses are.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if isinstance(batch, Batch) and LAYOUT in batch.extras:
        return _laid_out(grad_fn, params, batch)
    if microbatches == 1:
        (loss, metrics), grads = grad_fn(params, batch)
        return grads, loss, parity.finished(metrics)
    if not isinstance(batch, Batch):
        return _added(grad_fn, params, split_rows(batch, microbatches))
    return _in_turn(grad_fn, params, batch, split_batch(trained_first(batch), microbatches))


def _in_turn(grad_fn: Callable[..., Any], params: Params, batch: Batch, parts: Any, cut: Any = lambda part: part):
    """The parts one after another; ``cut`` makes a part of the batch of one of ``parts``, just before it is used."""
    whole = jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32)), 1.0)

    def one(carry, part):
        (loss, metrics), grads = grad_fn(params, part)
        share = jnp.sum(part.mask.astype(jnp.float32)) / whole
        metrics = {k: x if k.endswith("_max") or k.startswith(COUNTS) else x * share for k, x in metrics.items()}
        return _add(carry, (grads, loss, metrics))

    def body(carry, part):
        part = cut(part)
        return jax.lax.cond(jnp.any(part.mask), one, lambda carry, part: carry, carry, part), None

    nothing = _nothing(grad_fn, params, jax.eval_shape(lambda x: cut(jax.tree.map(lambda leaf: leaf[0], x)), parts))
    (grads, loss, metrics), _ = jax.lax.scan(body, nothing, parts)
    return jax.tree.map(_as_wide, grads, params), loss, parity.finished(metrics)


def _laid_out(grad_fn: Callable[..., Any], params: Params, batch: Batch) -> tuple[Params, Array, Metrics]:
    """A batch whose rows the host has arranged: of each part of the arrangement the rows that are in it.

    A part is the whole batch with the mask of its rows: what is computed for ``[B, T]`` beside the model is small.
    """
    layout = batch.extras[LAYOUT]
    parts, targets = layout.source.shape[0], layout.target.shape[1] * layout.target.shape[2]
    at = jnp.maximum(jnp.max(layout.place, axis=1), 0) // targets

    def cut(item: tuple[Array, Any]) -> Batch:
        index, arrays = item
        mine = at == index
        place = jnp.where((layout.place >= 0) & mine[:, None], layout.place - index * targets, -1)
        extras = batch.extras | {LAYOUT: layout._replace(**arrays, place=place)}
        return batch._replace(mask=batch.mask & mine[:, None], extras=extras)

    items = (
        jnp.arange(parts, dtype=jnp.int32),
        {k: x for k, x in layout._asdict().items() if k != "place" and x is not None},
    )
    if parts == 1:
        (loss, metrics), grads = grad_fn(params, cut(jax.tree.map(lambda x: x[0], items)))
        return grads, loss, parity.finished(metrics)
    return _in_turn(grad_fn, params, batch, items, cut)


def _nothing(grad_fn: Callable[..., Any], params: Params, part: Any) -> tuple[Params, Array, Metrics]:
    """Gradient, loss and metrics of no part at all; the gradient of weights in few bits is added up in float32."""
    (loss, metrics), grads = jax.eval_shape(grad_fn, params, part)
    grads = jax.tree.map(lambda s: s.update(dtype=jnp.float32) if s.dtype.itemsize < 4 else s, grads)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (grads, loss, metrics))


def _added(grad_fn: Callable[..., Any], params: Params, parts: Any) -> tuple[Params, Array, Metrics]:
    def body(carry, part):
        (loss, metrics), grads = grad_fn(params, part)
        return _add(carry, (grads, loss, metrics)), None

    first = jax.tree.map(lambda x: x[0], parts)
    grads, loss, metrics = jax.lax.scan(body, _nothing(grad_fn, params, first), parts)[0]
    return jax.tree.map(_as_wide, grads, params), loss, metrics


class Averaged(NamedTuple):
    """Extras of a state: the moving average of the parameters."""

    ema: Params


def chosen(finite: Array, new: Any, old: Any) -> Any:
    """Every leaf of ``new`` where ``finite``, else that of ``old``: nothing of a bad update is left behind.

    Arrays that wait in host memory come to the devices for it: there a choice would be computed by the host.
    """

    def one(x: Array, y: Array) -> Array:
        if jax.typeof(x).memory_space != jax.memory.Space.Host:
            return jnp.where(finite, x, y)
        return offload.parked(jnp.where(finite, offload.fetched(x), offload.fetched(y)))

    return jax.tree.map(one, new, old)


def trained_part(params: Params, trained: str) -> Params:
    """What the optimiser sees: all of ``params``, but of every ``{trained: ..., ...}`` only ``trained``.

    Heads beside an adapted policy train as they are.

    >>> trained_part({"model": {"base": 1, "lora": 2}, "value": 3}, "lora")
    {'model': {'lora': 2}, 'value': 3}
    >>> trained_part({"model": {"embed": 1}, "codes": 2, "policy": 3}, "policy")
    {'policy': 3}
    >>> trained_part({"base": 1, "lora": 2}, "")
    {'base': 1, 'lora': 2}
    """
    if not trained or not isinstance(params, dict):
        return params
    if trained in params:
        return {trained: params[trained]}
    return {name: trained_part(part, trained) for name, part in params.items()}


def with_trained(params: Params, part: Params, trained: str) -> Params:
    """``params`` with what ``trained_part`` took of it replaced by ``part``."""
    if not trained or not isinstance(params, dict):
        return part
    if trained in params:
        return params | part
    return {name: with_trained(params[name], part[name], trained) for name in params}


def make_update(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    max_grad_norm: float | None = 1.0,
    ema_decay: float | None = None,
    trained: str = "",
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds ``(state, batch) -> (state, metrics)``; jit it with the state donated.

    The step counter is left alone: it counts iterations, the loop advances it. An update whose gradient is not finite
    changes nothing, neither parameters nor optimiser nor average, and is counted in ``update/skipped``;
    ``train.skipped`` ends a run that has too many of them in a row. Of the loss alone nothing is asked: one that is not
    finite with a gradient that is changes the parameters as any other does.

    Args:
      loss_fn: ``(params, batch) -> (scalar, metrics)``, the scalar already divided by ``batch.total``. The batch may
        be any tree of rows whose losses are sums over rows.
      max_grad_norm: global-norm bound, applied after accumulation; None for no bound.
      ema_decay: where given, ``Averaged`` follows the parameters: ``ema = d ema + (1 - d) params``.
      trained: the key of what trains, the adapter (``lora``) of an adapted policy or one part of several: what is
        beside it is an input without gradient; the optimiser's state is that of what trains, see ``trained_part``.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")

    def update(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        old = trained_part(state.params, trained)

        def whole(part: Params) -> Params:
            return with_trained(state.params, part, trained)

        grads, loss, metrics = accumulate(lambda part, rows: loss_fn(whole(part), rows), old, batch, microbatches)
        with jax.numpy_dtype_promotion("standard"):  # leaves may differ in precision
            norm = optax.global_norm(grads)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        # optax mixes weak integers and floats, which a user's strict promotion would refuse
        waits = isinstance(tx, offload.Parked)
        before = offload.fetched(state.opt_state) if waits else state.opt_state
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = (tx.inner if waits else tx).update(grads, before, old)
            new = optax.apply_updates(old, updates)
        finite = jnp.isfinite(norm)  # not the loss: a term without a gradient must not change an update
        params, opt_state = whole(chosen(finite, new, old)), chosen(finite, opt_state, before)
        opt_state = offload.parked(opt_state) if waits else opt_state
        extras = dict(state.extras)
        if ema_decay is not None:
            average = declared(Averaged, extras).ema
            after = chosen(finite, optax.incremental_update(params, average, 1 - ema_decay), average)
            extras |= Averaged(after)._asdict()
        metrics = dict(metrics) | {"loss/total": loss, "grad/norm": norm, SKIPPED: 1.0 - finite.astype(jnp.float32)}
        return state._replace(params=params, opt_state=opt_state, extras=extras), metrics

    return update
