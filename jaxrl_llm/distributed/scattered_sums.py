"""Gradients of weights that are cut along ``fsdp``, summed over the devices while they are computed.

The TPU compiler computes a device's gradient of a whole matrix and then sums it with those of the others, each keeping
its part; nothing is computed meanwhile. Here each part is a product of its own that is added to what a neighbour has
sent, and goes on to the next: while it travels the next part is computed. Half of the devices send one way round, half
the other. A part is a whole product along the tokens, so that nothing is computed twice; it is added up in float32, and
travels in the dtype of the activations.

From "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(ASPLOS 2023, doi:10.1145/3567955.3567959), section 5.1 (a product and the scattered sum behind it, both ways round).
Differs from the paper in that the steps are no loop: the compiler orders them among everything else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.mesh import BATCH, batch_parts
from jaxrl_llm.models.layers import ProductFn, plain_product

AXIS = "fsdp"
# Rows of a part, and numbers in it: a product of fewer rows leaves a TPU's matrix unit idle, and the sum of a small
# matrix is over before what it costs to take it apart: with queries and outputs of 2,048 x 2,048 in rings, too, a layer
# of Qwen3-1.7B takes 0.4 ms longer on v5e:2x4.
LEAST = (256, 2**20)


def _around(rows: int, columns: int) -> list[tuple[int, int]]:
    """A way around a grid with an even number of rows, over each place once."""
    there = [(r, c) for r in range(rows) for c in (range(1, columns) if r % 2 == 0 else range(columns - 1, 0, -1))]
    return there + [(r, 0) for r in reversed(range(rows))]


def ring_order(places: Sequence[tuple[int, ...]]) -> list[int]:
    """The devices at these places of a grid in an order in which each is a neighbour of the next, and the last of the
    first; as they are where they fill no grid that has such an order.

    >>> ring_order([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)])
    [2, 4, 5, 3, 1, 0]
    """
    first = [min(axis) for axis in zip(*places, strict=True)]
    sides = [max(axis) - low + 1 for axis, low in zip(zip(*places, strict=True), first, strict=True)]
    axes = [axis for axis, side in enumerate(sides) if side > 1]
    number = {tuple(place[a] - first[a] for a in axes): i for i, place in enumerate(places)}
    as_they_are = list(range(len(places)))
    if len(axes) < 2 or len(number) != len(places) or len(places) != int(np.prod([sides[a] for a in axes])):
        return as_they_are
    path: list[tuple[int, ...]] = [()]  # over all axes but the last, there and back: neighbours all the way
    for axis in axes[:-1]:
        side = range(sides[axis])
        path = [(*before, i) for n, before in enumerate(path) for i in (side if n % 2 == 0 else reversed(side))]
    last = sides[axes[-1]]
    if len(path) % 2 == 0:
        found = [(*path[r], c) for r, c in _around(len(path), last)]
    elif last % 2 == 0:
        found = [(*path[r], c) for c, r in _around(last, len(path))]
    else:
        return as_they_are
    return [number[place] for place in found]


def _order(mesh: Mesh) -> list[int]:
    """``ring_order`` along the axis, by the first of its lines; devices without places as they are."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0).reshape(mesh.shape[AXIS], -1)[:, 0]
    places = [getattr(device, "coords", None) for device in line]
    if None in places:
        return list(range(len(line)))
    return ring_order([tuple(place) for place in places])  # JAX gives lists, too


def scattered_sum(
    x: Float[Array, "N I"], slopes: Float[Array, "N O"], order: Sequence[int], cut: int
) -> Float[Array, "..."]:
    """Inside ``shard_map``: the device's part of ``x^T slopes``, added up over the devices along ``AXIS``, in float32.

    A part goes to the device that keeps it from both sides, over half of the others each; it is sent on as soon as
    what has come is added, and what is not needed for that is computed meanwhile.

    Args:
      order: of the devices around the ring.
      cut: which axis of the product is cut over the devices, 0 or 1.
    """
    devices, half = len(order), len(order) // 2
    place, size = np.argsort(order), (x, slopes)[cut].shape[1] // devices

    def product(ahead: int, *came: Array) -> Array:
        """The part of the device so many places ahead, and what has come of it."""
        kept_by = np.asarray([order[(place[i] + ahead) % devices] for i in range(devices)], np.int32)
        start = jnp.asarray(kept_by)[jax.lax.axis_index(AXIS)] * size
        both = [x, slopes]
        both[cut] = jax.lax.dynamic_slice_in_dim(both[cut], start, size, axis=1)
        if came:  # not before: so the sum is formed with the product, which else would be written and read once more
            both, came = jax.lax.optimization_barrier((both, came))
        new = jax.lax.dot_general(*both, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return sum((one.astype(jnp.float32) for one in came), start=new)

    onward = [(int(order[i]), int(order[(i + 1) % devices])) for i in range(devices)]
    ways = {1: onward, -1: [(b, a) for a, b in onward]}
    came: dict[int, tuple[Array, ...]] = {1: (), -1: ()}
    for step in range(half):
        for way, distance in ((1, half - step), (-1, half - 1 - step)):
            if distance:
                sent = product(way * distance, *came[way]).astype(x.dtype)
                came[way] = (jax.lax.ppermute(sent, AXIS, ways[way]),)
    return product(0, *came[1], *came[-1])


def make_product(mesh: Mesh, least: tuple[int, int] = LEAST) -> ProductFn:
    """The ``product_fn`` of ``models.decoder.make_policy``: ``x W`` whose gradient by ``W`` is a ``scattered_sum``.

    Value and gradient by ``x`` are those of the plain product, which is all there is where shapes do not divide.

    Args:
      least: rows, or columns, of a device's part of a matrix, and numbers in it; of fewer the plain product is taken.
    """
    devices, order = mesh.shape[AXIS], _order(mesh)
    rows, columns = (tuple(a for a in axes if mesh.shape[a] > 1) for axes in (BATCH, ("context",)))
    others = tuple(a for a in (*rows, *columns) if a != AXIS)

    def product(x: Array, weight: Array, name: str) -> Array:
        inner, outer = rules.RULES[name][1:]
        cut = (inner, outer).index(AXIS)
        tensor = mesh.shape["tensor"]
        other = "tensor" if tensor > 1 and weight.shape[1 - cut] % tensor == 0 else None
        rows_fit = x.ndim == 3 and x.shape[0] % batch_parts(mesh) == 0 and x.shape[1] % mesh.shape["context"] == 0
        part, rest = divmod(weight.shape[cut], devices)
        numbers = part * weight.shape[1 - cut] // (tensor if other else 1)
        if devices % 2 or rest or part < least[0] or numbers < least[1] or not rows_fit:
            return plain_product(x, weight, name)
        left, right = ((P(rows, columns or None, None if axis == cut else other)) for axis in (0, 1))

        def local(x: Array, slopes: Array) -> Array:
            found = scattered_sum(x.reshape(-1, x.shape[2]), slopes.reshape(-1, slopes.shape[2]), order, cut)
            return jax.lax.psum(found.astype(x.dtype), others) if others else found

        kept = P(AXIS, other) if cut == 0 else P(other, AXIS)
        summed = jax.shard_map(local, mesh=mesh, in_specs=(left, right), out_specs=kept)
        return _product(summed, x, weight)

    return product


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(summed: Callable[[Array, Array], Array], x: Array, weight: Array) -> Array:
    return plain_product(x, weight, "")


def _forward(summed: Any, x: Array, weight: Array) -> tuple[Array, Any]:
    narrow = weight.astype(x.dtype)
    return plain_product(x, narrow, ""), (x, narrow, jnp.zeros((), weight.dtype))


def _backward(summed: Any, kept: Any, slopes: Array) -> tuple[Array, Array]:
    x, weight, wide = kept
    return plain_product(slopes, weight.T, ""), summed(x, slopes).astype(wide.dtype)


_product.defvjp(_forward, _backward)
