"""Tokens of a mixture to the devices that have their experts, and back: each goes once to each such device.

Collecting all tokens along ``expert`` moves each to every device. Of ``per_token`` choices among the experts of
``parts`` devices, alike in probability, a token needs ``parts (1 - (1 - 1 / parts)**per_token)`` of them: 6.5 of 16 for
eight choices. Here only these rows travel, by ``jax.lax.ragged_all_to_all``, and what comes back is one sum a device.
Nothing is dropped: a device has room for all tokens of all, which is why sending costs computing, too. By the schedule
of the TPU compiler eight choices over 16 devices are slower sent than collected (four layers of Qwen3-30B-A3B, prefill
on 16 chips of v5p: 7 ms more computing, links as long), hence ``MOST_LOAD``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_LOAD = 0.5  # of the links, against collecting; see ``load``
Exchange = Callable[..., Array]  # as jax.lax.ragged_all_to_all


def visited(per_token: int, parts: int) -> float:
    """The share of the devices that a token goes to, if all experts are as likely: ``1 - (1 - 1 / parts)**per_token``.

    >>> round(visited(8, 16), 3), visited(1, 4)
    (0.403, 0.25)
    """
    return 1.0 - (1.0 - 1.0 / parts) ** per_token


def load(per_token: int, parts: int) -> float:
    """What the busiest link carries, as a share of what it carries where all tokens are collected.

    On a torus of two dimensions of ``sqrt(parts)`` devices a row travels ``sqrt(parts) / 2`` links on average, each for
    itself, while what is collected goes over every link once.

    >>> [round(load(8, parts), 2) for parts in (2, 4, 8, 16, 64)], round(load(2, 4), 2)
    ([1.0, 0.9, 0.93, 0.81, 0.47], 0.44)
    """
    return visited(per_token, parts) * max(1.0, math.sqrt(parts) / 2)


def pays(platform: str, kind: str, devices: int, parts: int, per_token: int) -> bool:
    """Whether tokens should go to their experts: there is a program for it, and the links gain enough.

    A CPU has none, that of GPUs was not tried. That of v5e is for slices of at most 16 chips ("not supported in limited
    ICI routing settings").

    Args:
      platform, kind: of a device, as JAX says them.
      devices: of the whole mesh; ``parts`` of them share the experts.

    >>> pays("tpu", "TPU v5", 64, 64, 8), pays("tpu", "TPU v5", 16, 16, 8), pays("cpu", "cpu", 64, 64, 8)
    (True, False, False)
    """
    there = platform == "tpu" and not (kind == "TPU v5 lite" and devices > 16)
    return there and load(per_token, parts) <= MOST_LOAD


class Routes(NamedTuple):
    """Which rows go where: of one device, for the ``P`` devices along the axis; ``M`` rows leave it at most."""

    token: Int[Array, " M"]  # of every row that leaves, those of one destination beside each other
    place: Int[Array, "N K"]  # of every choice: its row among them
    first: Array  # [N, K] bool: no earlier choice of this token goes to the same device
    begin: Int[Array, " P"]  # where the rows of a destination begin
    count: Int[Array, " P"]
    received: Int[Array, " P"]  # rows that come from each
    remote: Int[Array, " P"]  # where, at each of them, its rows for this device begin


def routes(chosen: Int[Array, "N K"], here: int, parts: int, axis: str) -> Routes:
    """The rows of the tokens of this device, for experts in blocks of ``here`` along ``axis``."""
    n, k = chosen.shape
    device = chosen // here
    goes = jnp.any(jax.nn.one_hot(device, parts, dtype=bool), axis=1)
    count = jnp.sum(goes, axis=0, dtype=jnp.int32)
    begin = jnp.cumsum(count) - count
    destination = jnp.where(goes, jnp.arange(parts, dtype=jnp.int32)[None, :], parts)
    order = jnp.argsort(destination.reshape(-1), stable=True)
    place = jnp.argsort(order, stable=True).reshape(n, parts)
    earlier = jnp.tril(jnp.ones((k, k), bool), -1)
    first = ~jnp.any((device[:, :, None] == device[:, None, :]) & earlier[None], axis=2)
    received, remote = (jax.lax.all_to_all(a, axis, 0, 0, tiled=True) for a in (count, begin))
    token = order[: n * min(k, parts)] // parts
    return Routes(token, jnp.take_along_axis(place, device, axis=1), first, begin, count, received, remote)


def sent(rows: Float[Array, "N D"], way: Routes, exchange: Exchange, axis: str) -> Float[Array, "R D"]:
    """The rows that come to this device, ``R = P N``: those of source ``s`` from ``s N`` on; the others are zero."""
    n, parts = rows.shape[0], way.count.shape[0]
    room = jnp.zeros((parts * n, rows.shape[1]), rows.dtype)
    mine = jnp.full((parts,), jax.lax.axis_index(axis) * n, jnp.int32)
    return exchange(rows[way.token], room, way.begin, way.count, mine, way.received, axis_name=axis)


def returned(sums: Float[Array, "R D"], way: Routes, exchange: Exchange, axis: str) -> Float[Array, "N D"]:
    """What the devices computed of this one's tokens, added up; ``sums`` lie as ``sent`` laid the rows."""
    parts = way.count.shape[0]
    room = jnp.zeros((way.token.shape[0], sums.shape[1]), sums.dtype)
    begin = jnp.arange(parts, dtype=jnp.int32) * (sums.shape[0] // parts)
    back = exchange(sums, room, begin, way.received, way.remote, way.count, axis_name=axis)
    return jnp.sum(jnp.where(way.first[:, :, None], back[way.place], 0), axis=1)


def collected(
    rows: Array, room: Array, begin: Array, size: Array, place: Array, received: Array, *, axis_name: str
) -> Array:
    """``jax.lax.ragged_all_to_all`` by collecting all rows, where it has no program (a CPU)."""
    del received  # it is what the others say they send
    me = jax.lax.axis_index(axis_name)
    every = jax.lax.all_gather(rows, axis_name)
    begin, size, place = (jax.lax.all_gather(a, axis_name)[:, me, None] for a in (begin, size, place))
    offset = jnp.arange(room.shape[0], dtype=jnp.int32)[None, :] - place
    inside = (offset >= 0) & (offset < size)
    source = jnp.argmax(inside, axis=0)
    row = jnp.take_along_axis(begin + offset, source[None], axis=0)[0]
    found = every[source, jnp.clip(row, 0, rows.shape[0] - 1)]
    return jnp.where(jnp.any(inside, axis=0)[:, None], found, room)
