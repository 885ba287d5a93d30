"""Parameters from one block of devices to another: which device sends what to whom, and how long it takes."""

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

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


@lru_cache(maxsize=16384)
def seconds(config: ModelConfig, chip: Chip, before: Place, after: Place, itemsize: int = 2) -> Number:
    """Of the slowest device: all that it receives, or all that it sends with a broadcast counted once."""
    if before == after:
        return 0.0
    taken: dict[int, int] = {}
    sent: dict[int, int] = {}
    for transfer in transfers(leaves(config), before, after):
        count = _size(transfer.ranges) * itemsize
        sent[transfer.source] = sent.get(transfer.source, 0) + count
        for target in transfer.targets:
            taken[target] = taken.get(target, 0) + count
    return max((*taken.values(), *sent.values()), default=0) / (chip.link * LINKS)
