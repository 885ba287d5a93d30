"""From the layout of training to that of sampling in one program, a layer at a time: no second copy on the way."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def make_reshard(
    shardings: Any,
    dtype: Any,
    *,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    before: Any = None,
) -> Callable[[Any], Any]:
    """A function for ``jit`` that casts the decoder's parameters to ``dtype`` and lays them out by ``shardings``.

    The layers go through a scan: beside what comes in and what goes out there is one layer, where the compiler would
    collect all of them at once.

    Args:
      shardings: a tree of ``NamedSharding`` like the prepared parameters, on a mesh of the same devices in the same
        order.
      prepare: in the place of the cast, what the arrays of one layer, and those of no layer, become before they move:
        few bits, for example, are fewer bytes on the way.
      before: where the prepared arrays lie before they move, a tree like ``shardings``. Given, nothing moves before it
        is prepared, and devices exchange parts and collect their own alone, as in ``_between``; else the compiler may
        send the wider numbers, or collect a whole layer on every device and cut it there.
    """

    def cast(tree: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    made = prepare or cast

    def inner(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    def rest(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in tree.items() if name != "layers"}

    def put(tree: dict[str, Any], to: Any, old: Any) -> Any:
        tree = made(tree)
        if old is not None:
            tree = jax.lax.with_sharding_constraint(tree, old)
            between = jax.tree.map(lambda x, *layouts: _between(x.shape, *layouts), tree, old, to)
            tree = jax.lax.with_sharding_constraint(tree, between)
        return jax.lax.with_sharding_constraint(tree, to)

    def reshard(params: Any) -> Any:
        to, old = (None if tree is None else jax.tree.map(inner, tree["layers"]) for tree in (shardings, before))
        _, layers = jax.lax.scan(lambda _, layer: (None, put(layer, to, old)), None, params["layers"])
        top = put(rest(params), rest(shardings), None if before is None else rest(before))
        return top | {"layers": jax.lax.with_sharding_constraint(layers, shardings["layers"])}

    return reshard


def _between(shape: tuple[int, ...], old: NamedSharding, new: NamedSharding) -> NamedSharding:
    """The new layout, cut further where the old one was by the axes of its mesh that it leaves free.

    With it the way of a matrix is an exchange of parts and then a gather of the device's own part; without it the
    compiler gathers all of the matrix on every device.
    """

    def cuts(sharding: NamedSharding) -> list[int]:
        return [n // m for n, m in zip(shape, sharding.shard_shape(shape), strict=True)]

    used = {name for names in new.spec for name in ((names,) if isinstance(names, str) else names or ())}
    free = tuple(name for name, size in new.mesh.shape.items() if size > 1 and name not in used)
    parts = math.prod(new.mesh.shape[name] for name in free)
    whole = [axis for axis, (a, b) in enumerate(zip(cuts(old), cuts(new), strict=True)) if a > b == 1]
    if not free or not whole or math.prod(cuts(new)) == 1 or shape[whole[0]] % parts:
        return new
    spec = [*new.spec, *[None] * (len(shape) - len(new.spec))]
    spec[whole[0]] = free
    return NamedSharding(new.mesh, P(*spec))


def moved_bytes(shapes: Any, before: Any, after: Any, itemsize: int) -> int:
    """Bytes that the devices receive together when a tree changes its layout, what a device already has left out.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    >>> one = NamedSharding(mesh, P())
    >>> moved_bytes(jax.ShapeDtypeStruct((4, 4), np.float32), one, one, 2)
    0
    """

    def of(leaf: Any, old: NamedSharding, new: NamedSharding) -> int:
        shape = tuple(leaf.shape)
        had, wanted = (s.devices_indices_map(shape) for s in (old, new))
        return sum(_size(wanted[d], shape) - _overlap(wanted[d], had[d], shape) for d in wanted) * itemsize

    leaves = zip(*(jax.tree.leaves(tree) for tree in (shapes, before, after)), strict=True)
    return sum(of(*leaf) for leaf in leaves)


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]


def _size(index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    return math.prod(b - a for a, b in _ranges(index, shape))


def _overlap(left: tuple[slice, ...], right: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    pairs = zip(_ranges(left, shape), _ranges(right, shape), strict=True)
    return math.prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in pairs)
