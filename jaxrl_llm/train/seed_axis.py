"""Many seeds in one compiled program: spread over the devices, and on each side by side or in turn."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def use_all_cores() -> None:
    """Makes every core of a CPU a device, so that seeds run on all of them; call it before the first array is made."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cores}".strip()


def in_turn() -> bool:
    """Whether the seeds of one device run one after the other.

    They do on a CPU: work side by side fills an accelerator, but a CPU is full with one seed, whose arrays then stay in
    the cache; loops end with that seed, and conditions are conditions instead of both branches.
    """
    return jax.default_backend() == "cpu"


def over_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one seed as a function of many: every leaf of arguments and results has a leading seed axis.

    Like ``jax.vmap(function)`` up to float rounding. The seeds are divided over as many local devices as divide their
    number.
    """

    def on_one_device(*arguments):
        return jax.lax.map(lambda one: function(*one), arguments) if in_turn() else jax.vmap(function)(*arguments)

    def spread(*arguments):
        number = jax.tree.leaves(arguments)[0].shape[0]
        devices = jax.local_devices()
        count = max(n for n in range(1, min(number, len(devices)) + 1) if number % n == 0)
        if count == 1:
            return on_one_device(*arguments)
        mesh = Mesh(np.asarray(devices[:count]), ("seed",))
        split = jax.shard_map(on_one_device, mesh=mesh, in_specs=P("seed"), out_specs=P("seed"), check_vma=False)
        return split(*arguments)

    return spread
