"""The compiled loop of ``rollout.generate``: one token of every row a turn, in a cache and a batch as large as needed.

The cache may grow in stages, so that a token reads the columns there are so far, and the batch may shrink in stages, so
that rows that have ended are not decoded any further.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_llm.models.cache import experts_of
from jaxrl_llm.rollout.next_token import Choice, Reading, choose, unread
from jaxrl_llm.types import Cache, Key, Params, Policy


def stage_ends(new: int, stages: int) -> tuple[int, ...]:
    """The number of tokens in the cache at the end of each stage; the last token of a response is never in it.

    >>> stage_ends(128, 4), stage_ends(2, 8)
    ((32, 64, 96, 127), (1,))

    Raises:
      ValueError: for less than one stage.
    """
    if stages < 1:
        raise ValueError(f"cache_stages={stages} must be at least 1")
    last = new - 1  # the last token needs no forward pass after it
    return tuple(sorted({min(-(-new * k // stages), last) for k in range(1, stages + 1)} - {0})) or (0,)


def batch_sizes(rows: int, stages: int) -> tuple[int, ...]:
    """The sizes of the batch as its rows end, the largest first.

    >>> batch_sizes(32, 4), batch_sizes(3, 8)
    ((32, 24, 16, 8), (3, 2, 1))

    Raises:
      ValueError: for less than one stage.
    """
    if stages < 1:
        raise ValueError(f"row_stages={stages} must be at least 1")
    return tuple(sorted({-(-rows * k // stages) for k in range(1, stages + 1)}, reverse=True))


def step_keys(keys: Key, first: int | Int[Array, " B"], new: int) -> Key:
    """Keys ``[new, B]`` of tokens ``first`` to ``first + new - 1``, made in one pass instead of one a token.

    Args:
      first: of all rows, or of each.
    """
    if not isinstance(first, int):
        own = jnp.arange(new, dtype=jnp.int32)[:, None] + first[None, :]
        return jax.vmap(lambda row: jax.vmap(jax.random.fold_in)(keys, row))(own)
    steps = jnp.arange(first, first + new, dtype=jnp.int32)
    return jax.vmap(lambda t: jax.vmap(lambda key: jax.random.fold_in(key, t))(keys))(steps)


def rows_axis(policy: Policy) -> PyTree:
    """Of every array of the policy's cache: which axis is rows."""
    few, many = (jax.eval_shape(partial(policy.init_cache, rows, 5)) for rows in (2, 3))

    def differs(a, b) -> int:
        found = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
        if len(found) != 1:
            raise ValueError(f"an array {a.shape} of the cache has no axis for rows: they cannot be told apart")
        return found[0]

    return jax.tree.map(differs, few, many)


def take_rows(policy: Policy, cache: Cache, rows: Int[Array, " S"]) -> Cache:
    """The cache of some of its rows."""
    return jax.tree.map(lambda x, axis: jnp.take(x, rows, axis=axis), cache, rows_axis(policy))


class Written(NamedTuple):
    """What the sampler has recorded."""

    tokens: Int[Array, "B N"]
    logp: Float[Array, "B N"]
    mask: Bool[Array, "B N"]
    experts: Int[Array, "B N E"] | None = None  # of a mixture: those that computed each token; -1: it was not read


class _Batch(NamedTuple):
    """Rows that are decoded together. Of those that have ended only what is written counts."""

    cache: Cache
    logits: Float[Array, "B V"]  # of the next token
    row: Int[Array, " B"]  # which of all rows it is
    alive: Bool[Array, " B"]
    reading: Reading
    written: Written


def unrecorded(experts: Array | None, rows: int, columns: int) -> Array | None:
    """Room for the experts of so many columns, as wide as those of a cache; None of a model without."""
    return None if experts is None else jnp.full((rows, columns, experts.shape[2]), -1, experts.dtype)


class Job(NamedTuple):
    """What stays the same while rows are decoded."""

    policy: Policy
    params: Params
    how: Choice
    keys: Key  # [N, B], see ``step_keys``
    following: Int[Array, " B"]  # position of a row's first new token
    width: int  # columns before it in the cache
    new: int  # N


def _drawn(job: Job, t: Array | int, batch: _Batch, everyone: bool) -> tuple[Array, _Batch]:
    """Draws column ``t`` of every live row and writes token, log-probability and mask in the same place."""
    how, keys = job.how, job.keys[t]
    if not everyone:
        own = {name: getattr(how, name) for name in ("temperature", "top_p")}
        how = how._replace(**{name: x[batch.row] for name, x in own.items() if x is not None and jnp.ndim(x) == 1})
        keys = keys[batch.row]
    token, logp, ended, reading = choose(how, keys, batch.logits, batch.alive, batch.reading)

    def put(array: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(array, value, t, 1)

    drawn = {"tokens": token, "logp": logp, "mask": batch.alive}
    written = batch.written._replace(**{name: put(getattr(batch.written, name), x) for name, x in drawn.items()})
    return token, batch._replace(alive=batch.alive & ~ended, reading=reading, written=written)


def _step(job: Job, t: Array, batch: _Batch, everyone: bool) -> _Batch:
    """Column ``t`` of every live row, and the logits of the next."""
    live = batch.alive
    token, batch = _drawn(job, t, batch, everyone)
    following = job.following if everyone else job.following[batch.row]
    hidden, cache = job.policy.extend(
        job.params, batch.cache, token[:, None], (following + t)[:, None], live.astype(jnp.int32)[:, None],
        job.width + t,
    )  # fmt: skip
    if batch.written.experts is not None:
        new = jax.lax.dynamic_slice_in_dim(experts_of(cache), job.width + t, 1, axis=1)
        kept = jax.lax.dynamic_update_slice_in_dim(batch.written.experts, new, t, axis=1)
        batch = batch._replace(written=batch.written._replace(experts=kept))
    return batch._replace(cache=cache, logits=job.policy.unembed(job.params, hidden[:, 0]))


def _until(job: Job, t: Array, batch: _Batch, end: int, fewest: int, everyone: bool) -> tuple[Array, _Batch]:
    """Decodes up to column ``end``, or until no more than ``fewest`` rows are alive."""
    return jax.lax.while_loop(
        lambda c: (c[0] < end) & (jnp.sum(c[1].alive, dtype=jnp.int32) > fewest),
        lambda c: (c[0] + 1, _step(job, c[0], c[1], everyone)),
        (t, batch),
    )


def _shrinking(job: Job, sizes: tuple[int, ...], t: Array, batch: _Batch, end: int) -> tuple[Array, _Batch]:
    """The same in a batch no larger than the rows that are alive need: they come first, and so many are decoded."""
    axes = rows_axis(job.policy)

    def some(size: int, fewest: int, t: Array, batch: _Batch, order: Array) -> tuple[Array, _Batch]:
        few = jax.tree.map(lambda x: x[:size], batch._replace(cache=()))
        few = few._replace(cache=take_rows(job.policy, batch.cache, order[:size]), logits=batch.logits[order[:size]])
        t, few = _until(job, t, few, end, fewest, everyone=False)

        def back(large: Array, x: Array, axis: int = 0) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(large, x, 0, axis)

        cache = jax.tree.map(back, batch.cache, few.cache, axes)
        rest = jax.tree.map(back, batch._replace(cache=()), few._replace(cache=()))
        return t, rest._replace(cache=cache)

    branches = [partial(some, size, fewest) for size, fewest in zip(sizes, (*sizes[1:], 0), strict=True)]

    def turn(carry: tuple[Array, _Batch]) -> tuple[Array, _Batch]:
        t, batch = carry
        live = jnp.sum(batch.alive, dtype=jnp.int32)
        order = jnp.argsort(~batch.alive, stable=True)
        # cache and logits are put into this order by the branch, which needs no more than its own rows of them
        sorted_ = jax.tree.map(lambda x: x[order], batch._replace(cache=(), logits=()))
        batch = sorted_._replace(cache=batch.cache, logits=batch.logits)
        fits = sum((live <= size).astype(jnp.int32) for size in sizes) - 1
        return jax.lax.switch(fits, branches, t, batch, order)

    return jax.lax.while_loop(lambda c: (c[0] < end) & jnp.any(c[1].alive), turn, (t, batch))


def _grown(policy: Policy, cache: Cache, rows: int, length: int) -> Cache:
    """The same cache with room for ``length`` columns."""
    empty = policy.init_cache(rows, length)
    return jax.tree.map(lambda large, x: jax.lax.dynamic_update_slice(large, x, (0,) * x.ndim), empty, cache)


def decode(
    job: Job,
    cache: Cache,
    logits: Float[Array, "B V"],
    alive: Bool[Array, " B"],
    *,
    ends: Sequence[int],
    sizes: tuple[int, ...] = (),
    early_exit: bool = True,
) -> tuple[Written, Bool[Array, " B"]]:
    """What is drawn for every row, and which rows never ended.

    Args:
      cache: with room for the first of ``ends`` beyond ``job.width``.
      alive: the rows to decode.
      ends: the columns at which the cache grows, see ``stage_ends``.
      sizes: of the batch, see ``batch_sizes``; none, or one: always all rows.
      early_exit: leave the loops when all rows have ended.
    """
    rows = alive.shape[0]
    written = Written(
        jnp.full((rows, job.new), job.how.pad_id, jnp.int32),
        jnp.zeros((rows, job.new), jnp.float32),
        jnp.zeros((rows, job.new), bool),
        unrecorded(experts_of(cache), rows, job.new),
    )
    batch = _Batch(cache, logits, jnp.arange(rows, dtype=jnp.int32), alive, unread(rows), written)
    everyone, t = len(sizes) < 2, jnp.int32(0)
    for start, end in zip((0, *ends), ends, strict=False):
        if start:
            batch = batch._replace(cache=_grown(job.policy, batch.cache, rows, job.width + end))
        if not early_exit:
            columns = jnp.arange(start, end, dtype=jnp.int32)
            batch, _ = jax.lax.scan(lambda b, t: (_step(job, t, b, everyone=True), None), batch, columns)
        elif everyone:
            t, batch = _until(job, t, batch, end, 0, everyone=True)
        else:
            t, batch = _shrinking(job, sizes, t, batch, end)
    _, batch = _drawn(job, job.new - 1, batch, everyone)
    if everyone:
        return batch.written, batch.alive
    place = jnp.argsort(batch.row)
    return jax.tree.map(lambda x: x[place], (batch.written, batch.alive))
