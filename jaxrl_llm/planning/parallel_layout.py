"""A choice of mesh, parts and recomputation, and what of a model lies on one chip under it."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.mesh import AXES
from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.quantised import KEPT
from jaxrl_llm.models.spec import matrix_shapes, parameter_shapes

Number = float | int  # bytes and seconds: checks at run time take neither for the other


class Sizes(NamedTuple):
    """Sizes of the mesh axes that a plan chooses."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1  # parts of a long row, in training alone: see ``distributed.ring``

    @property
    def rows(self) -> int:
        """How many ways the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def chips(self) -> int:
        """Of the whole mesh."""
        return self.rows * self.tensor * self.context

    @property
    def spec(self) -> str:
        """As ``--mesh`` takes it."""
        return ",".join(f"{name}={size}" for name, size in self._asdict().items() if size > 1) or "data=1"

    def mesh(self, devices: Any = None) -> Mesh | AbstractMesh:
        """On the devices, or on none for counting."""
        sizes = tuple(self._asdict().get(name, 1) for name in AXES)
        if devices is None:
            return AbstractMesh(sizes, AXES)
        return Mesh(np.asarray(devices).reshape(sizes), AXES)


def leaves(config: ModelConfig) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Path of every parameter -> its shape."""
    found = jax.tree_util.tree_flatten_with_path(parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))[0]
    return dict(found)


@lru_cache(maxsize=4096)
def held(config: ModelConfig, sizes: Sizes) -> int:
    """Parameters on the fullest chip: what does not divide is whole on every chip."""
    mesh = sizes.mesh()
    return sum(_size(path, shape, sizes, mesh) for path, shape in leaves(config).items())


def _size(path: tuple[Any, ...], shape: tuple[int, ...], sizes: Sizes, mesh: Any) -> int:
    axes = [axis for axis in rules.spec_of(path, shape, mesh) if axis is not None]
    return math.prod(shape) // math.prod(getattr(sizes, axis) for axis in axes)


@lru_cache(maxsize=4096)
def held_layers(config: ModelConfig, sizes: Sizes) -> int:
    """``held`` without embedding, head and the last norm."""
    mesh = sizes.mesh()
    return sum(_size(path, shape, sizes, mesh) for path, shape in leaves(config).items() if path[0].key == "layers")


@lru_cache(maxsize=4096)
def held_matrices(config: ModelConfig, sizes: Sizes) -> int:
    """``held`` of what ``models.quantised`` keeps in few bits: the matrices of the layers, routers left out."""
    mesh, few = sizes.mesh(), set(matrix_shapes(config)) - set(KEPT)
    return sum(
        _size(path, shape, sizes, mesh)
        for path, shape in leaves(config).items()
        if path[0].key == "layers" and path[-1].key in few
    )


@lru_cache(maxsize=4096)
def held_adapter(config: ModelConfig, sizes: Sizes, rank: int) -> int:
    """Numbers of an adapter (``models.lora``) on the fullest chip."""
    spec, mesh = lora.Lora(rank, targets=lora.targets_of(config)), sizes.mesh()
    arrays = jax.eval_shape(lambda key: lora.init(config, spec, key), jax.random.key(0))
    found = jax.tree_util.tree_flatten_with_path(arrays)[0]
    return sum(_size(path, x.shape, sizes, mesh) for path, x in found)


@lru_cache(maxsize=4096)
def gathered(config: ModelConfig, sizes: Sizes) -> int:
    """Parameters of a layer when its parts over fsdp have been collected, those over tensor and expert not."""
    mesh = sizes.mesh()
    total = 0
    for path, shape in leaves(config).items():
        if path[0].key != "layers":
            continue
        spec = tuple(rules.spec_of(path, shape, mesh))
        parts = math.prod(getattr(sizes, axis) for axis in ("tensor", "expert") if axis in spec)
        total += math.prod(shape[1:]) // parts
    return total


def share(number: int, parts: int) -> int:
    """``number / parts``, or all of it where it does not divide."""
    return number // parts if number % parts == 0 else number
