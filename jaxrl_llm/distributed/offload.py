"""Arrays that wait in host memory: a reference, the optimiser's moments, whatever idles while a phase runs.

The moves are part of the compiled program, so that XLA overlaps them with what does not need them. Where memory is one
(a CPU) they are copies.
"""

from typing import Any

import jax
import optax


def _numbers(x: jax.Array) -> bool:
    """Keys and counters stay: they are small, and a key is no plain array."""
    return x.ndim > 0 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _moved(tree: Any, space: jax.memory.Space) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space) if _numbers(x) else x, tree)


def parked(tree: Any) -> Any:
    """The same arrays in the host's memory, laid out over devices as before; inside ``jit`` or outside."""
    return _moved(tree, jax.memory.Space.Host)


def fetched(tree: Any) -> Any:
    """The same arrays in the devices' memory."""
    return _moved(tree, jax.memory.Space.Device)


class Parked(optax.GradientTransformation):
    """What ``parked_state`` makes; ``inner`` is the transformation whose state lies on the devices."""

    inner: optax.GradientTransformation


def parked_state(tx: optax.GradientTransformation) -> Parked:
    """``tx`` whose state waits in host memory between two updates: of AdamW eight bytes a weight.

    ``train.step.make_update`` takes ``inner`` and moves the state itself, once in and once out, so that whatever else
    it does with the state is done on the devices: what reads an array where it waits is computed by the host.
    """

    def init(params: Any) -> Any:
        return parked(tx.init(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(grads, fetched(state), params)
        return updates, parked(state)

    made = Parked(init, update)
    made.inner = tx
    return made
