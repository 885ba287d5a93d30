"""From the layout of training to that of sampling in one program, a layer at a time: no second copy on the way."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def make_reshard(shardings: Any, dtype: Any) -> Callable[[Any], Any]:
    """A function for ``jit`` that casts the decoder's parameters to ``dtype`` and lays them out by ``shardings``.

    The layers go through a scan: beside what comes in and what goes out there is one layer, where the compiler would
    collect all of them at once.

    Args:
      shardings: a tree of ``NamedSharding`` like the parameters, on a mesh of the same devices in the same order.
    """

    def inner(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    def put(tree: Any, to: Any) -> Any:
        # the barrier: the compiler would send what arrives in float32, twice the bytes, and cast it there
        narrow = jax.lax.optimization_barrier(jax.tree.map(lambda x: x.astype(dtype), tree))
        return jax.lax.with_sharding_constraint(narrow, to)

    def reshard(params: Any) -> Any:
        wanted = jax.tree.map(inner, shardings["layers"])
        _, layers = jax.lax.scan(lambda _, layer: (None, put(layer, wanted)), None, params["layers"])
        top = {name: put(params[name], shardings[name]) for name in params if name != "layers"}
        return top | {"layers": jax.lax.with_sharding_constraint(layers, shardings["layers"])}

    return reshard


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
