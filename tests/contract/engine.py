"""One engine for all contract tables: inputs are drawn from a function's own annotations, columns follow from them.

A function tells by its signature what it must satisfy. An argument that is a mask (``mask``, ``valid``, ...)
promises that what it leaves out does not matter; an axis ``B`` (or ``P``) promises rows; ``segment_ids`` promises
packing. A ``Row`` adds only what a signature cannot say.
"""

import functools
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import PairTerms, TokenTerms

# rows, columns and their padded lengths are no other axis's size: results show by their shape which axis is which
SIZES = {
    "B": 8,
    "P": 8,
    "T": 6,
    "C": 12,
    "J": 12,
    "R": 3,
    "K": 5,
    "V": 7,
    "W": 13,
    "M": 3,
    "D": 4,
    "E": 2,
    "L": 2,
    "H": 3,
    "leaves": 27,
}
PADDED = {8: 10, 6: 9, 12: 15, 5: 11}
ROW_AXES, MASKS = ("B", "P"), ("mask", "valid", "members", "labelled")
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
# the machine code is thrown away after a few calls
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Row(NamedTuple):
    """What the signature of a function does not say."""

    settings: dict[str, Any] = {}  # arguments that are no arrays
    inputs: dict[str, Any] = {}  # arrays drawn otherwise than by name: a value, or a function of the generator
    gradient: tuple[str, ...] | None = None  # the only arguments that get a gradient; None: nothing is promised
    rows: str = ""  # a row's result depends on: "each" itself, "group" its group, "batch" all; default from group_ids
    packed: bool = False  # each token by itself, or by segment_ids: rows may be joined
    zero_outside: bool = True  # results outside the mask are 0
    optional: tuple[str, ...] = ("valid",)  # arrays that may be left out, given here
    leaves_out: dict[str, str] = {}  # column: why it does not apply
    through: Callable | None = None  # calls the function with plain arrays in place of its records


class Case(NamedTuple):
    """A function with one draw of its arguments."""

    call: Callable
    arrays: dict[str, Any]
    axes: dict[str, tuple[str, ...]]
    row: Row

    def masks(self) -> dict[str, Any]:
        return {k: v for k, v in self.arrays.items() if k in MASKS}

    def run(self, **changes):
        return self.call(**(self.arrays | changes))


def _axes(annotation) -> tuple[tuple[str, ...], str] | None:
    """The named axes and the kind of an array annotation, None for anything else."""
    for part in (annotation, *typing.get_args(annotation)):
        if hasattr(part, "dim_str"):
            kind = "b" if "bool" in part.dtypes else "i" if any("int" in str(d) for d in part.dtypes) else "f"
            return tuple(a for a in part.dim_str.split() if a != "..."), kind
    return None


def _by_name(name: str, shape: tuple[int, ...], kind: str, rng):  # noqa: PLR0911 - a table
    if name == "mask":
        mask = rng.random(shape) < 0.7
        mask[..., 0], mask[..., 1], mask[0] = False, True, [False, True, True, False, True, True]
        return mask
    if name in ("valid", "members", "labelled"):
        out = np.ones(shape, bool)
        if len(shape) == 1:
            out[[1, 6]] = False
        else:
            out[:, -2:], out[1::2, 1] = False, False  # a tail, and a hole in every other row
        return out
    if name == "group_ids":
        return np.asarray(GROUPS[: shape[0]], np.int32)
    if name == "segment_ids":
        return np.ones(shape, np.int32)
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind == "i":
        return rng.integers(1, 4, shape).astype(np.int32)
    if "logp" in name:
        return -2 * rng.random(shape)
    if name in ("noise", "uniforms", "accuracy"):
        return rng.random(shape)
    if "tokens" in name or name in ("entropy", "weights", "singular", "shortest", "longest"):
        return 0.1 + 3 * rng.random(shape)
    if "ratio" in name:
        return np.exp(0.4 * rng.normal(size=shape))
    return rng.normal(size=shape)


def find(name: str) -> Callable:
    """``losses.policy.cispo_loss`` as a function."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"jaxrl_llm.{module}"), function)


def draw(name: str, row: Row, seed: int = 0) -> Case:
    """A case of the function ``name`` (what follows a colon only names a variant)."""
    function = row.through or find(name.partition(":")[0])
    rng = np.random.default_rng(seed)
    arrays, axes = {}, {}
    hints = typing.get_type_hints(function)
    for argument, parameter in inspect.signature(function).parameters.items():
        found = _axes(hints.get(argument, parameter.annotation))
        left_out = parameter.default is not parameter.empty and argument not in (*row.optional, *row.inputs)
        if argument in row.settings or left_out or (found is None and argument not in row.inputs):
            continue
        axes[argument], kind = found if found else ((), "f")
        if argument in row.inputs:
            given = row.inputs[argument]
            arrays[argument] = given(rng) if callable(given) else given
            arrays[argument] = jax.tree.map(_as_array, arrays[argument])
            continue
        shape = tuple(int(a) if a.isdigit() else SIZES[a] for a in axes[argument])
        arrays[argument] = _as_array(np.asarray(_by_name(argument, shape, kind, rng)))
    return Case(functools.partial(function, **row.settings), arrays, axes, row)


def _as_array(x):
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def counts(case: Case, name: str):
    """Where an argument counts, by every mask whose axes it has; True where no mask speaks of it."""
    out = np.ones(np.shape(case.arrays[name]) if case.axes[name] else (), bool)
    for mask_name, mask in case.masks().items():
        wanted, own = case.axes[mask_name], case.axes[name]
        # ``valid`` of a sequence speaks of its reward, not of its tokens
        if name == mask_name or not set(wanted) <= set(own) or (len(wanted) == 1 and own != wanted):
            continue
        columns = [i for i, axis in enumerate(own) if axis == wanted[-1]]
        for column in columns:  # maps [B, T, T] are masked on both sides
            places = [own.index(wanted[0]), column] if len(wanted) == 2 else [column]
            shape = [1] * len(own)
            for place, size in zip(places, np.shape(mask), strict=True):
                shape[place] = size
            out = out & np.asarray(mask).reshape(shape)
    return out


def poisoned(case: Case, value: float) -> dict[str, Any]:
    """The arrays with garbage in every place that no mask counts."""
    garbage = {"f": value, "i": 2**30, "b": True}
    out = {}
    for name, array in case.arrays.items():
        if name in MASKS or name.endswith("_ids") or not case.axes[name]:
            out[name] = array
        else:
            fill = jnp.asarray(garbage[_kind(array)], array.dtype)
            out[name] = jnp.where(jnp.asarray(counts(case, name)), array, fill)
    return out


def _kind(array) -> str:
    return "b" if array.dtype == bool else "f" if jnp.issubdtype(array.dtype, jnp.floating) else "i"


def padded(case: Case, value: float) -> dict[str, Any]:
    """The arrays with further rows and columns that no mask counts, full of garbage."""
    covered = {axis for mask in case.masks() for axis in case.axes[mask]}
    out = {}
    for name, array in case.arrays.items():
        axes = case.axes[name]
        if not axes:
            out[name] = array
            continue
        grow = [(0, PADDED[n] - n if axis in covered else 0) for axis, n in zip(axes, array.shape, strict=True)]
        if name == "group_ids":  # the new rows are a group of their own
            out[name] = jnp.pad(array, grow, constant_values=array.shape[0])
        else:
            fill = {"f": value, "i": 0 if name == "segment_ids" else 3, "b": name not in MASKS}[_kind(array)]
            out[name] = jnp.pad(array, grow, constant_values=fill)
    return out


def cropped(results):
    """Without the rows and columns of ``padded``; axes are known by their size."""
    back = {v: k for k, v in PADDED.items()}
    return jax.tree.map(lambda x: np.asarray(x)[tuple(slice(back.get(n)) for n in np.shape(x))], results)


def along_rows(case: Case, arrays: dict[str, Any], pick) -> dict[str, Any]:
    """``pick(array, axis)`` on each argument that has rows."""
    out = {}
    for name, array in arrays.items():
        axis = next((i for i, a in enumerate(case.axes[name]) if a in ROW_AXES), None)
        out[name] = array if axis is None else pick(array, axis)
    return out


def result_rows(results, pick):
    """``pick(array, axis)`` on each result that has rows; others stay."""

    def one(x):
        x = np.asarray(x)
        return pick(x, x.shape.index(SIZES["B"])) if SIZES["B"] in x.shape else x

    return jax.tree.map(one, results)


def has_rows(case: Case) -> bool:
    return any(axis in ROW_AXES for axes in case.axes.values() for axis in axes)


def dependence(case: Case) -> str:
    """What the result of a row depends on."""
    return case.row.rows or ("group" if "group_ids" in case.arrays else "each")


def floats(tree) -> list:
    """The float leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def cast(arrays: dict[str, Any], dtype) -> dict[str, Any]:
    """The float arrays in another precision."""
    return {k: v.astype(dtype) if floats(v) else v for k, v in arrays.items()}


def compiled(case: Case):
    """Results, and the gradient of a weighted sum of them by every float argument, as one compiled program.

    Of a loss it is the gradient of the loss: diagnostics are reduced without any.
    """
    names = {k for k, v in case.arrays.items() if floats(v)}

    def total(given, rest):
        results = case.call(**given, **rest)
        smooth = floats(results.loss if isinstance(results, TokenTerms | PairTerms) else results)
        value = sum(jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)) for x in smooth)
        return jnp.asarray(value, jnp.float32), results

    program = jax.jit(lambda given, rest: jax.grad(total, has_aux=True)(given, rest)[::-1])

    def split(arrays):
        return {k: v for k, v in arrays.items() if k in names}, {k: v for k, v in arrays.items() if k not in names}

    ready = program.lower(*split(case.arrays)).compile(compiler_options=FAST)
    return lambda arrays: ready(*split(arrays))


def together(cases: dict[str, Case], arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of many cases by one compiled program, which costs half of as many programs."""
    program = jax.jit(lambda given: {name: case.run(**given[name]) for name, case in cases.items()})
    return program.lower(arrays).compile(compiler_options=FAST)(arrays)
