"""Meshes by name: ``data=2,fsdp=4`` -> a ``jax.sharding.Mesh``; who goes where is decided by path rules.

``data``: copies of the model on other rows. ``fsdp``: rows too, and every matrix cut along them. ``expert``: rows too,
and each device has its share of a mixture's experts. ``context``: the queries of a long row. ``tensor``: heads and
inner widths, between the closest devices.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import UserError

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH = ("data", "fsdp", "expert")  # what rows are split over
AnyMesh = Mesh | AbstractMesh  # an abstract one has shapes without devices: what a plan is made of


def parse_sizes(spec: str, flag: str = "--mesh") -> dict[str, int]:
    """The sizes of all ``AXES`` from ``axis=size,...``; absent axes have size 1. No device is asked.

    Raises:
      UserError: for an unknown or repeated axis, or a size that is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, spec.split(",")):
        name, _, size = (text.strip() for text in part.partition("="))
        if name not in AXES:
            raise UserError(f"{flag} {spec}: unknown axis {name!r}; the axes are {', '.join(AXES)}")
        if not size.isdigit() or int(size) < 1:
            raise UserError(f"{flag} {spec}: {name}={size!r} is not a positive number")
        if name in sizes:
            raise UserError(f"{flag} {spec}: axis {name} is given twice")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


_DEVICES: contextvars.ContextVar[Sequence[jax.Device]] = contextvars.ContextVar("devices", default=())


@contextlib.contextmanager
def on_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Meshes that are built by name inside are of these devices."""
    before = _DEVICES.set(tuple(devices))
    try:
        yield
    finally:
        _DEVICES.reset(before)


def parse_mesh(spec: str, devices=None, *, flag: str = "--mesh") -> Mesh:
    """Builds a mesh from ``axis=size,...`` over the first devices, see ``parse_sizes``.

    Args:
      devices: default: those of ``on_devices``, or all.
      flag: what the user gave ``spec`` to, for messages.

    Raises:
      UserError: as ``parse_sizes``, for a product of sizes that does not divide the number of devices, and for a mesh
        that has no device of one of several processes, which would have nothing to run.
    """
    devices = (_DEVICES.get() or jax.devices()) if devices is None else devices
    shape = tuple(parse_sizes(spec, flag).values())
    needed = math.prod(shape)
    if needed > len(devices) or len(devices) % needed:
        simulated = f"; XLA_FLAGS=--xla_force_host_platform_device_count={needed} simulates that many on a CPU"
        more = simulated if devices and devices[0].platform == "cpu" else ""
        there = f"the {len(devices)} there are{more}"
        raise UserError(f"{flag} {spec} needs {needed} devices, which does not divide {there}")
    if needed < len(devices) and jax.process_count() > 1:
        left_out = {device.process_index for device in devices[needed:]}
        left_out -= {device.process_index for device in devices[:needed]}
        if left_out:
            raise UserError(f"{flag} {spec} has none of the devices of process {min(left_out)}: give sizes for all "
                            f"{len(devices)} devices, or start fewer processes by --hosts")  # fmt: skip
    return Mesh(np.asarray(devices[:needed]).reshape(shape), AXES)


def devices_apart(mesh: Mesh, spec: str, flag: str) -> list[jax.Device]:
    """The devices behind those of ``mesh``, as many as a second mesh needs.

    Raises:
      UserError: where there are too few.
    """
    needed, there = math.prod(parse_sizes(spec, flag).values()), jax.devices()
    if mesh.size + needed > len(there):
        raise UserError(
            f"{flag} {spec} needs {needed} devices beside the {mesh.size} of --mesh; there are {len(there)}"
        )
    return there[mesh.size : mesh.size + needed]


def given_mesh(spec: str) -> Mesh | None:
    """``parse_mesh`` of a flag that may be empty: None is one device."""
    return parse_mesh(spec) if spec else None


def batch_parts(mesh: AnyMesh) -> int:
    """How many ways the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def check_rows(mesh: Mesh, rows: int, name: str) -> None:
    """Raises UserError where ``rows`` cannot be split over the batch axes."""
    parts = batch_parts(mesh)
    if rows % parts:
        raise UserError(f"{name}={rows} does not divide over {' x '.join(BATCH)} = {parts} devices; choose a multiple")


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows over the batch axes."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """The same everywhere."""
    return NamedSharding(mesh, P())


def around_callback(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """A function with a callback in it, whose arrays are whole on every device of the mesh; without one as it is.

    A callback is of the first device alone, and what follows of all.
    """
    if mesh is None:
        return function
    everywhere = partial(jax.lax.with_sharding_constraint, shardings=replicated(mesh))
    return jax.jit(lambda *given: everywhere(function(*everywhere(given))))
