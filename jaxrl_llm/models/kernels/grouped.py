"""Products of rows with the matrix of their group, the experts of a mixture: JAX's own kernel for TPUs (megablox)."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

GroupedFn = Callable[[Array, Array, Array], Array]
LANES, PART = 128, 64  # what axes of a matrix are multiples of in the kernel: of several tiles, of one tile
FEW, MANY = 128, 512  # rows of a tile: of groups that have a handful, and of groups that have many
WIDEST = 1024  # columns and inputs of a tile


def grouped(rows: Float[Array, "N D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]) -> Float[Array, "N F"]:
    """``rows[i] matrices[e]`` of the group ``e`` that row ``i`` is in, by XLA; groups lie one after another.

    Rows beyond the last group hold anything, and so do their slopes.
    """
    return jax.lax.ragged_dot(rows, matrices, sizes)


def by_kernel(
    rows: Float[Array, "N D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"], *, interpret: bool = False
) -> Float[Array, "N F"]:
    """``grouped`` by the kernel, which reads the matrix of each group that has rows once for a tile of rows.

    A TPU's compiler writes XLA's as loops whose turns depend on the sizes, of which no plan can say how long they take.
    Axes that it cannot cut are left to it.
    """
    (n, d), (groups, _, f) = rows.shape, matrices.shape
    if any(width % (LANES if width > WIDEST else PART) for width in (d, f)):
        return grouped(rows, matrices, sizes)
    tile = MANY if n >= MANY * groups // 2 else FEW
    padded = jnp.pad(rows, ((0, -n % tile), (0, 0)))
    return _product(padded, matrices, sizes, tile, interpret)[:n]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(rows, matrices, sizes, tile, interpret):
    return _by_group(rows, matrices, sizes, tile, interpret)


def _by_group(rows, matrices, sizes, tile, interpret, turned=False):
    """``turned``: by the transposed matrices."""
    inputs, outputs = matrices.shape[:0:-1] if turned else matrices.shape[1:]
    tiling = (tile, min(inputs, WIDEST), min(outputs, WIDEST))
    with jax.numpy_dtype_promotion("standard"):  # the kernel counts with what a user's strict promotion would refuse
        return _kernels().gmm(rows, matrices, sizes, rows.dtype, tiling, transpose_rhs=turned, interpret=interpret)


def _forward(rows, matrices, sizes, tile, interpret):
    return _by_group(rows, matrices, sizes, tile, interpret), (rows, matrices, sizes)


def _backward(tile, interpret, kept, slopes):
    rows, matrices, sizes = kept
    tiling = (tile, *(min(width, WIDEST) for width in matrices.shape[1:]))
    with jax.numpy_dtype_promotion("standard"):
        of_matrices = _kernels().tgmm(rows.swapaxes(0, 1), slopes, sizes, matrices.dtype, tiling, interpret=interpret)
    return _by_group(slopes, matrices, sizes, tile, interpret, turned=True), of_matrices, None


_product.defvjp(_forward, _backward)


def _kernels() -> ModuleType:
    """Loaded where it is needed, which takes most of a second; the package has a function of the same name."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
