"""Parameters from one block of devices to another: which device sends what to whom, and how long it takes."""

import itertools
import math
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.mesh import AXES
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.cost import LINKS
from jaxrl_llm.planning.parallel_layout import Number, Sizes, leaves

Ranges = tuple[tuple[int, int], ...]  # of every dimension of a leaf: from, to


class Place(NamedTuple):
    """A block of devices, numbered from ``first``, and how a model lies on it."""

    first: int
    sizes: Sizes

    @property
    def devices(self) -> range:
        """In the order of the mesh."""
        return range(self.first, self.first + self.sizes.chips)


class Transfer(NamedTuple):
    """A piece of one leaf goes from a device that has it to all of ``targets`` at once."""

    leaf: tuple[Any, ...]
    ranges: Ranges
    source: int
    targets: tuple[int, ...]


def pieces(path: tuple[Any, ...], shape: tuple[int, ...], place: Place) -> dict[int, Ranges]:
    """Device -> the part of a leaf that lies on it by ``distributed.rules``."""
    spec = tuple(rules.spec_of(path, shape, place.sizes.mesh()))
    spec += (None,) * (len(shape) - len(spec))
    coordinates = itertools.product(*(range(getattr(place.sizes, a)) for a in AXES))
    found = {}
    for device, where in zip(place.devices, coordinates, strict=True):
        at = dict(zip(AXES, where, strict=True))
        parts = ((1, 0) if a is None else (getattr(place.sizes, a), at[a]) for a in spec)
        found[device] = tuple((n // k * i, n // k * (i + 1)) for n, (k, i) in zip(shape, parts, strict=True))
    return found


def _common(left: Ranges, right: Ranges) -> Ranges:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))


def _size(ranges: Ranges) -> int:
    return math.prod(max(0, b - a) for a, b in ranges)


def transfers(shapes: dict[tuple[Any, ...], tuple[int, ...]], before: Place, after: Place) -> list[Transfer]:
    """Every piece that a device of ``after`` lacks, from the nearest device of ``before`` that has it.

    Targets that take the same piece from the same source share one broadcast; what a device has already stays.
    From "ReaL", arXiv:2406.14088, section 6 (broadcasts of intersections). Differs from the paper in that the layouts
    are those of this library's rules, which have no pipeline stages, and that near means near in number.

    Args:
      shapes: path -> shape of every leaf, see ``parallel_layout.leaves``.
    """
    found: dict[tuple[tuple[Any, ...], Ranges, int], list[int]] = {}
    for path, shape in shapes.items():
        holders: dict[Ranges, list[int]] = {}
        had = pieces(path, shape, before)
        for device, ranges in had.items():
            holders.setdefault(ranges, []).append(device)
        for target, wanted in pieces(path, shape, after).items():
            for ranges, sources in holders.items():
                common = _common(wanted, ranges)
                if _size(common) and target not in sources:
                    nearest = min(sources, key=lambda device, target=target: abs(device - target))
                    found.setdefault((path, common, nearest), []).append(target)
    return [Transfer(*key, tuple(targets)) for key, targets in found.items()]


@lru_cache(maxsize=4096)
def received(config: ModelConfig, before: Sizes, after: Sizes, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes that every device of a mesh receives when its layout changes; what lies there already is left out."""
    found = [0] * after.chips
    for path, shape in leaves(config).items():
        had = pieces(path, shape, Place(0, before))
        for device, wanted in pieces(path, shape, Place(0, after)).items():
            found[device] += (_size(wanted) - _size(_common(wanted, had[device]))) * itemsize
    return tuple(found)


@lru_cache(maxsize=4096)
def _laid_out(config: ModelConfig, sizes: Sizes) -> tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]:
    """Shape and mesh axes of every leaf."""
    mesh, found = sizes.mesh(), []
    for path, shape in leaves(config).items():
        spec = tuple(rules.spec_of(path, shape, mesh))
        found.append((shape, spec + (None,) * (len(shape) - len(spec))))
    return tuple(found)


@lru_cache(maxsize=65536)
def _parts(shape: tuple[int, ...], spec: tuple[Any, ...], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """The different parts of a leaf ``[P, dims, 2]``, and which of them each device of the mesh has."""
    coordinates = np.indices([getattr(sizes, a) for a in AXES]).reshape(len(AXES), -1)
    ranges = np.zeros((sizes.chips, len(shape), 2), np.int64)
    for dim, (size, axis) in enumerate(zip(shape, spec, strict=True)):
        step = size // (1 if axis is None else getattr(sizes, axis))
        at = 0 if axis is None else coordinates[AXES.index(axis)]
        ranges[:, dim] = np.stack(np.broadcast_arrays(step * at, step * (at + np.ones(sizes.chips, np.int64))), -1)
    parts, which = np.unique(ranges, axis=0, return_inverse=True)
    return parts, which.reshape(-1)


def _moved(before: Place, after: Place, had: Any, wants: Any) -> tuple[np.ndarray, np.ndarray]:
    """Elements of a leaf that each device of ``after`` takes, and that each of ``before`` sends: see ``transfers``."""
    (held, holds), (needed, needs) = had, wants
    low, high = (
        f(needed[:, None, :, k], held[None, :, :, k]) for k, f in enumerate((np.maximum, np.minimum))
    )  # [N, H, dims]
    common = np.prod(np.maximum(high - low, 0), axis=-1)
    sources, targets = np.asarray(before.devices), np.asarray(after.devices)
    apart = np.abs(targets[:, None] - sources[None])  # [T, S]
    other = np.iinfo(apart.dtype).max
    of_part = holds[None, :] == np.arange(len(held))[:, None]  # [H, S]
    distance = np.where(of_part[None], apart[:, None], other)  # [T, H, S]
    nearest, lacks = distance.argmin(-1), distance.min(-1) > 0  # [T, H]
    counts = np.where(lacks, common[needs], 0)
    target, part = np.nonzero(counts)
    calls = np.unique(np.stack([needs[target], part, nearest[target, part]]), axis=1)  # each a broadcast
    return counts.sum(1), np.bincount(calls[2], common[calls[0], calls[1]], len(sources))


@lru_cache(maxsize=262144)
def seconds(config: ModelConfig, chip: Chip, before: Place, after: Place, itemsize: int = 2) -> Number:
    """Of the slowest device: all that it receives, or all that it sends with a broadcast counted once.

    What ``transfers`` lists, counted in arrays: a search asks for thousands of pairs of places.
    """
    if before == after:
        return 0.0
    if first := min(before.first, after.first):  # only the distance counts
        here, there = (place._replace(first=place.first - first) for place in (before, after))
        return seconds(config, chip, here, there, itemsize)
    kinds = Counter(zip(_laid_out(config, before.sizes), _laid_out(config, after.sizes), strict=True))
    taken, sent = np.zeros(len(after.devices)), np.zeros(len(before.devices))
    for (had, wants), count in kinds.items():
        received_here, sent_here = _moved(before, after, _parts(*had, before.sizes), _parts(*wants, after.sizes))
        taken, sent = taken + count * received_here, sent + count * sent_here
    return float(max(taken.max(), sent.max())) * itemsize / (chip.link * LINKS)
