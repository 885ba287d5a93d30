"""The largest arrays that a traced step forms, and whether the devices hold them: read from its jaxpr, nothing runs."""

import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from jaxrl_llm.errors import UserError

# What compilers write to memory: elementwise work and broadcasts are fused into what reads them, and are not counted.
_WRITTEN = frozenset({
    "argsort", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax", "cumprod", "cumsum", "dot_general",
    "dynamic_update_slice", "eigh", "gather", "pure_callback", "qr", "ragged_dot", "scan", "scatter", "scatter-add",
    "sort", "svd", "top_k", "while",
})  # fmt: skip


class Formed(NamedTuple):
    """An array that a step forms: its shape, its size and the line that makes it."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}] of {readable(self.bytes)} ({self.where})"


def readable(size: int) -> str:
    """A number of bytes for people.

    >>> readable(3 * 2**30), readable(1536), readable(5 * 2**40)
    ('3.0 GiB', '1.5 KiB', '5.0 TiB')
    """
    power = min(4, max(0, (size.bit_length() - 1) // 10))
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{size} B"


def _bytes(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(shape) * dtype.itemsize


def _equations(jaxpr: Any) -> Iterable[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(getattr(inner, "jaxpr", inner))


def largest(traced: Iterable[Any]) -> Formed:
    """The largest array that any of the traced programs writes to memory, all devices together.

    Inside a loop the arrays of one turn count, and what the loop stacks or carries.
    """
    found = Formed((), "float32", 0, "")
    for one in traced:
        for equation in _equations(one.jaxpr):
            if equation.primitive.name not in _WRITTEN:
                continue
            for variable in equation.outvars:
                if (size := _bytes(variable.aval)) > found.bytes:
                    where = source_info_util.summarize(equation.source_info)
                    found = Formed(tuple(variable.aval.shape), str(variable.aval.dtype), size, where)
    return found


def memory(devices: int) -> int:
    """Bytes of so many devices of this process's kind: the device's own limit, on a CPU the machine's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit) * devices
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(arm: str, traced: Iterable[Any], devices: int) -> Formed:
    """The largest array of an arm's programs.

    Raises:
      UserError: where all devices together do not hold it.
    """
    found, room = largest(traced), memory(devices)
    if found.bytes > room:
        raise UserError(
            f"arm {arm} forms {found}, and {devices} device{'s' * (devices > 1)} hold {readable(room)}: lower "
            "--prompts-per-step, --group-size or --max-new-tokens, or give more devices and --mesh"
        )
    return found
