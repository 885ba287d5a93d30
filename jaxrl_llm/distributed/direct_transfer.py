"""Arrays from the devices of one mesh to those of another, piece by piece from device to device: nothing on the host.

``jax.device_put`` between two meshes copies shards directly where both cut an array alike; where they do not, it
collects the array on the host and cuts it there. Here every device of the new mesh gets, of every part that it needs,
the piece of one device that has it. All of it is dispatched, nothing is waited for.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]  # begin and end of each axis


class Piece(NamedTuple):
    """What travels: a box of an array, from a device of the old mesh to one of the new."""

    source: int  # number of the device in the old sharding
    target: int  # in the new one
    box: Box


def _boxes(shape: tuple[int, ...], sharding: Sharding) -> list[tuple[jax.Device, Box]]:
    """Every device of a sharding, in the order of their numbers, and the box that it holds."""
    found = sharding.devices_indices_map(shape).items()
    held = ((d, tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))) for d, index in found)
    return sorted(held, key=lambda one: one[0].id)


def _overlap(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(begin < end for begin, end in box) else None


def plan(shape: tuple[int, ...], before: Sharding, after: Sharding) -> tuple[Piece, ...]:
    """The pieces that fill every box of the new sharding once; which of several holders sends goes around them.

    From "LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient Large-scale LLM Training",
    arXiv:2505.24034 (DDMA, distributed direct memory access: a shard of the trainer goes straight to the shards of the
    generator that need it).

    >>> import numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    >>> plan((4, 2), NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec()))
    (Piece(source=0, target=0, box=((0, 4), (0, 2))),)
    """
    holders: dict[Box, list[int]] = defaultdict(list)
    for number, (_, box) in enumerate(_boxes(shape, before)):
        holders[box].append(number)
    turns = {box: itertools.cycle(numbers) for box, numbers in holders.items()}
    pieces = []
    for target, (_, wanted) in enumerate(_boxes(shape, after)):
        for box in holders:
            common = _overlap(box, wanted)
            if common is not None:
                pieces.append(Piece(next(turns[box]), target, common))
    return tuple(pieces)


def sent_bytes(shapes: Any, before: Any, after: Any) -> int:
    """Bytes that travel when a tree goes to other devices, copies counted.

    Args:
      shapes: arrays or their shapes.
      before: a tree of ``Sharding`` like it.
      after: another, of the new mesh.
    """

    def of(leaf: Any, old: Sharding, new: Sharding) -> int:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        pieces = plan(tuple(leaf.shape), old, new)
        return sum(math.prod(b - a for a, b in p.box) for p in pieces) * jax.dtypes.itemsize_bits(leaf.dtype) // 8

    return sum(jax.tree.leaves(jax.tree.map(of, shapes, before, after)))


def _bits(x: jax.Array) -> jax.Array:
    """As whole numbers of the same width: some compilers write not-a-numbers of few bits in other bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{jax.dtypes.itemsize_bits(x.dtype)}"))


@partial(jax.jit, static_argnums=1)
def _cut(shard: jax.Array, box: Box) -> jax.Array:
    begins, ends = zip(*box, strict=True)
    return jax.lax.bitcast_convert_type(jax.lax.slice(_bits(shard), begins, ends), shard.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _joined(pieces: Sequence[jax.Array], boxes: tuple[Box, ...], shape: tuple[int, ...]) -> jax.Array:
    whole = jnp.zeros(shape, _bits(pieces[0]).dtype)
    for piece, box in zip(pieces, boxes, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, _bits(piece), [begin for begin, _ in box])
    return jax.lax.bitcast_convert_type(whole, pieces[0].dtype)


@lru_cache(maxsize=4096)
def _routes(shape: tuple[int, ...], before: Sharding, after: Sharding) -> Any:
    """``plan`` as it is carried out: for every device of the new mesh its shape, and by piece source and both boxes."""
    sources, targets = _boxes(shape, before), _boxes(shape, after)
    routes: list[list[tuple[jax.Device, Box, Box]]] = [[] for _ in targets]

    def within(box: Box, outer: Box) -> Box:
        return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))

    for piece in plan(shape, before, after):
        device, held = sources[piece.source]
        wanted = targets[piece.target][1]
        routes[piece.target].append((device, within(piece.box, held), within(piece.box, wanted)))
    return [
        (device, tuple(b - a for a, b in box), tuple(route))
        for (device, box), route in zip(targets, routes, strict=True)
    ]


def _send_array(array: jax.Array, after: Sharding) -> jax.Array:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(array)
        bare = jax.random.key_data(array)
        return jax.random.wrap_key_data(_send_array(bare, after), impl=kind)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    parts = []
    for target, shape, route in _routes(array.shape, array.sharding, after):
        pieces = []
        for source, box, _ in route:
            data = shards[source]
            whole = tuple(b - a for a, b in box) == data.shape
            pieces.append(jax.device_put(data if whole else _cut(data, box), target))
        alone = len(pieces) == 1
        parts.append(pieces[0] if alone else _joined(pieces, tuple(box for *_, box in route), shape))
    return jax.make_array_from_single_device_arrays(array.shape, after, parts)


def send(tree: Any, shardings: Any) -> Any:
    """A tree of arrays on other devices in another layout, bit for bit; returns before anything has travelled.

    Arrays may be donated right after: what reads them is in the queues of their devices. On a device that both meshes
    have nothing travels, and what is sent may be the array itself: see ``make_send``.

    Args:
      shardings: a tree of ``Sharding`` like ``tree``. All devices of both belong to this process.

    Raises:
      ValueError: for devices of other processes.
    """

    def of(array: Any, after: Sharding) -> jax.Array:
        if not isinstance(array, jax.Array):  # it is on the host
            return jax.device_put(array, after)
        if not (array.is_fully_addressable and after.is_fully_addressable):
            raise ValueError("send is within one process; between processes weights go by weight_transfer")
        return _send_array(array, after)

    return jax.tree.map(of, tree, shardings)


def make_send(shardings: Callable[[Any], Any], prepare: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Weights as they are now, sent while the next update changes them: a copy is made, and ``send`` sends that.

    Args:
      shardings: of the copy, a tree like it.
      prepare: what travels in the place of the parameters, on the devices that have them: numbers of fewer bits for
        example.
    """

    def copied(tree: Any) -> Any:
        return jax.tree.map(jnp.copy, tree if prepare is None else prepare(tree))

    snapshot = jax.jit(copied)

    def sent(tree: Any) -> Any:
        now = snapshot(tree)
        return send(now, shardings(now))

    return sent
