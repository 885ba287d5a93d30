"""Tasks on devices in virtual time: when each begins and ends, how long devices stand idle, what memory they need.

Written here and not with a simulation library: durations are known beforehand, so nothing waits or interrupts, and a
search asks for the makespan of a hundred thousand plans. As a function of arrays one compiled program does them at
once, where a library such as SimPy runs one plan at a time through Python generators (and has no resource that is a
set of overlapping blocks of devices).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Timeline(NamedTuple):
    """Seconds at which every task begins and ends; NaN for one that never becomes ready."""

    start: Float[Array, " N"]
    end: Float[Array, " N"]

    @property
    def makespan(self) -> Float[Array, ""]:
        """When the last task ends; NaN where the dependencies have a cycle."""
        return jnp.max(self.end)


def schedule(seconds: Float[Array, " N"], devices: Bool[Array, "N D"], after: Bool[Array, "N N"]) -> Timeline:
    """Runs the tasks in the order in which they become ready, on devices that do one thing at a time.

    ``start_i = max(max over j that i waits for of end_j, max over devices of i of the end of their last task)``,
    ``end_i = start_i + seconds_i``. The next task is always the one whose predecessors ended first, of equals the one
    that stands first; it never gives way to one that could begin sooner.

    From "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation", arXiv:2406.14088,
    section 5.1 (Algorithm 1). There a queue is kept for every mesh and a task joins those of all meshes that overlap
    with its own; a time for every device is the same.

    Args:
      seconds: of each task.
      devices: ``[i, d]``: task ``i`` needs device ``d``, all of them together. None: it waits for no device.
      after: ``[i, j]``: task ``i`` begins after task ``j`` has ended.
    """
    count = seconds.shape[0]

    def one(_, carry):
        free, start, end = carry
        done = ~jnp.isnan(end)
        ready_at = jnp.max(jnp.where(after & done[None, :], end[None, :], 0.0), axis=1)
        ready = ~done & jnp.all(~after | done[None, :], axis=1)
        turn = jnp.argmin(jnp.where(ready, ready_at, jnp.inf))
        begin = jnp.maximum(ready_at[turn], jnp.max(jnp.where(devices[turn], free, 0.0)))
        finish = begin + seconds[turn]
        here = ready & (jnp.arange(count, dtype=jnp.int32) == turn)  # nowhere where nothing is ready
        free = jnp.where(devices[turn] & jnp.any(here), finish, free)
        return free, jnp.where(here, begin, start), jnp.where(here, finish, end)

    never = jnp.full((count,), jnp.nan, seconds.dtype)
    free = jnp.zeros((devices.shape[1],), seconds.dtype)
    _, start, end = jax.lax.fori_loop(0, count, one, (free, never, never))
    return Timeline(start, end)


def idle_share(timeline: Timeline, devices: Bool[Array, "N D"]) -> Float[Array, ""]:
    """Share of all devices' time until the makespan in which they do nothing."""
    busy = jnp.sum((timeline.end - timeline.start)[:, None] * devices.astype(jnp.float32))
    return jnp.maximum(1.0 - busy / (timeline.makespan * devices.shape[1]), 0.0)  # not below through rounding


def peak_bytes(
    resident: Float[Array, " N"], working: Float[Array, " N"], devices: Bool[Array, "N D"]
) -> Float[Array, ""]:
    """The most memory on one device: what its tasks keep there always, added up, and the largest of what they need
    while they run.

    Args:
      resident: bytes on each device of a task, from the first moment to the last.
      working: bytes on each device of a task while it runs.
    """
    kept = jnp.sum(jnp.where(devices, resident[:, None], 0.0), axis=0)
    return jnp.max(kept + jnp.max(jnp.where(devices, working[:, None], 0.0), axis=0))


def penalised(
    makespan: Float[Array, ""], peak: Float[Array, ""], capacity: Float[Array, ""] | float, *, factor: float = 3.0
) -> Float[Array, ""]:
    """``makespan``, ``factor`` times as long where ``peak`` exceeds ``capacity``: a search may pass through, not stay.

    From "ReaL", arXiv:2406.14088, and the published code (factor 3).
    """
    return jnp.where(peak > capacity, factor * makespan, makespan)
