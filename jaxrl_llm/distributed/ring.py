"""Attention along ``context`` by a ring: keys and values of a device travel past the queries of all others.

A device holds the keys and values of its own columns and those that are passing by, never a whole row: what a row of
``C`` columns needs on each of ``n`` devices falls with ``n``, forward and backward. Values and gradients are those of
attention to all keys at once: parts are put together by the logarithms of their sums.

From "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889, algorithm 1. Differs from
the paper in what a device does with keys that its queries do not see: a kernel passes over them, so that of causal rows
the last device has the most to do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.models.attention import Seen

AXIS = "context"


class Parts(NamedTuple):
    """How one device attends to some of the keys, and the gradients of that.

    With the arguments of ``models.attention.attend_part`` and ``models.attention.part_gradients``.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


def make_ring(parts: Parts, devices: int) -> Callable[..., Array]:
    """An ``attend`` of the columns of one device inside ``shard_map``; ``mask`` has all columns of keys."""

    def attend(q: Array, k: Array, v: Array, mask: Array | Seen, **settings: Any) -> Array:
        return _ring(parts, devices, tuple(sorted(settings.items())), q, k, v, mask)

    return attend


def _columns(mask: Array | Seen, source: Array, size: int) -> Array | Seen:
    """Of the keys that lie on device ``source``."""
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=source * size, slice_size=size)
    if isinstance(mask, Seen):
        return mask._replace(key_positions=cut(mask.key_positions, axis=1), key_segments=cut(mask.key_segments, axis=1))
    return cut(mask, axis=2)


def _passed(tree: Any, devices: int) -> Any:
    """What the device before had."""
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % devices) for i in range(devices)])


def _forward(parts: Parts, devices: int, settings: tuple, q: Array, k: Array, v: Array, mask: Array | Seen):
    here, size = jax.lax.axis_index(AXIS), k.shape[2]

    def seen(step: Array | int, k: Array, v: Array) -> tuple[Array, Array]:
        return parts.forward(q, k, v, _columns(mask, (here - step) % devices, size), **dict(settings))

    def turn(carry, step):
        (k, v), out, lse = carry
        k, v = _passed((k, v), devices)
        more, added = seen(step, k, v)
        total = jnp.logaddexp(lse, added)
        old, new = (jnp.swapaxes(jnp.exp(x - total), 1, 2)[..., None] for x in (lse, added))
        return ((k, v), old * out + new * more, total), None

    first = seen(0, k, v)
    (_, out, lse), _ = jax.lax.scan(turn, ((k, v), *first), jnp.arange(1, devices, dtype=jnp.int32))
    return out.astype(q.dtype), lse


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ring(parts: Parts, devices: int, settings: tuple, q: Array, k: Array, v: Array, mask: Array | Seen) -> Array:
    return _forward(parts, devices, settings, q, k, v, mask)[0]


def _ring_forward(parts, devices, settings, q, k, v, mask):
    out, lse = _forward(parts, devices, settings, q, k, v, mask)
    return out, (q, k, v, mask, out, lse)


def _ring_backward(parts, devices, settings, kept, grad):
    q, k, v, mask, out, lse = kept
    here, size = jax.lax.axis_index(AXIS), k.shape[2]
    delta = jnp.swapaxes(jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)

    def turn(carry, step):
        (k, v, dk, dv), dq = carry
        part = _columns(mask, (here - step) % devices, size)
        more = parts.backward(q, k, v, part, lse, delta, grad, **dict(settings))
        dq, dk, dv = (x + y for x, y in zip((dq, dk, dv), more, strict=True))
        return (_passed((k, v, dk, dv), devices), dq), None  # after the last turn they are home

    nothing = (jnp.zeros(x.shape, jnp.float32) for x in (k, v, q))
    dk, dv, dq = nothing
    ((_, _, dk, dv), dq), _ = jax.lax.scan(turn, ((k, v, dk, dv), dq), jnp.arange(devices, dtype=jnp.int32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)
