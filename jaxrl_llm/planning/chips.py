"""Peak rates of TPU generations, and topologies by name: ``v5e:4x4`` is sixteen chips."""

import math
from typing import NamedTuple

from jaxrl_llm.errors import UserError


class Chip(NamedTuple):
    """Of one chip: ``hbm`` bytes a program may use, the rest in bytes or operations a second.

    ``link``: one direction of one link to a neighbour. ``meeting``: seconds of any collective beside its bytes, where
    they were measured; the table has none.
    """

    hbm: float
    bandwidth: float
    flops: float  # bfloat16
    link: float
    meeting: float = 0.0
    clock: float = 1.5e9  # cycles a second, of the compiler's estimates


# From "How to scale your model" (the TPU chapter's table); a program gets a little less memory than the chip has.
CHIPS: dict[str, Chip] = {
    "v4": Chip(30.75 * 2**30, 1.2e12, 2.75e14, 4.5e10, clock=1.05e9),
    "v5e": Chip(15.75 * 2**30, 8.1e11, 1.97e14, 4.5e10),
    "v5p": Chip(95.0 * 2**30, 2.8e12, 4.59e14, 9e10, clock=1.75e9),
    "v6e": Chip(31.25 * 2**30, 1.6e12, 9.2e14, 9e10, clock=1.75e9),
}


_CUBIC = ("v4", "v5p")
# slices that exist, the smallest first: of chips in a plane, and in a cube
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


class Topology(NamedTuple):
    """A slice of chips."""

    name: str  # as libtpu knows it
    kind: str
    chip: Chip
    chips: int


def parse(name: str) -> Topology:
    """``v5e:4x4`` as a topology.

    >>> parse("v5e:4x4").chips
    16

    Raises:
      UserError: for an unknown generation or a shape that is no product of numbers.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise UserError(f"--topology {name}: unknown generation {kind!r}; known are {', '.join(CHIPS)}")
    sides = shape.split("x")
    wanted = 3 if kind in _CUBIC else 2
    if len(sides) != wanted or not all(side.isdigit() and int(side) for side in sides):
        example = "2x2x2" if wanted == 3 else "4x4"
        raise UserError(f"--topology {name}: {shape!r} is no shape of {wanted} sides, as in {kind}:{example}")
    return Topology(name, kind, CHIPS[kind], math.prod(int(side) for side in sides))


def slices(kind: str) -> list[Topology]:
    """Of a generation, the smallest first.

    >>> slices("v5p")[1].name
    'v5p:2x2x2'
    """
    return [parse(f"{kind}:{shape}") for shape in (_CUBES if kind in _CUBIC else _PLANES)]
