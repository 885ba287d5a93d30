"""Updates on minibatches that are read step by step: a table need not fit on the device, nor on one host.

The place in the data (``stream.get_state()``) stands in the note of a checkpoint beside the state, so that a run that
was killed goes on with the next row.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.distributed.mesh import BATCH, batch_sharding
from jaxrl_llm.errors import UserError
from jaxrl_llm.train.host import never
from jaxrl_llm.train.offline import Offline, update_on
from jaxrl_llm.types import Metrics, TrainState

PLACE = "stream"  # in the note of a checkpoint


def placed(batch: Any, mesh: Mesh | None = None) -> Any:
    """This process's rows on its devices; on a mesh all processes' rows are one array.

    Raises:
      UserError: for a mesh on which several processes hold the same rows, as they have read different ones.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    processes = jax.process_count()

    def whole(x: Any) -> jax.Array:
        made = jax.make_array_from_process_local_data(batch_sharding(mesh), x)
        if made.shape[0] != processes * x.shape[0]:
            axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH)
            raise UserError(f"{axes} do not divide rows over {processes} processes, each of which reads rows of its "
                            f"own; let their product be a multiple of {processes}")  # fmt: skip
        return made

    return jax.tree.map(whole, batch)


def make_step(
    method: Offline, *, place: Callable[[TrainState], TrainState] | None = None
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """A compiled update on a given minibatch; the state is donated.

    Args:
      place: inside ``jit``, keeps the new state where it was, see ``host.make_host_loop``.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update_on(method, state, batch, state.sampler)
        return (state if place is None else place(state)), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=options_of())


def run(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    stream: Iterator[Any],
    *,
    steps: int,
    mesh: Mesh | None = None,
    stop: Callable[[], bool] = never,
) -> tuple[TrainState, list[Metrics]]:
    """``steps`` updates on the next minibatches of a stream: the state behind them and the metrics of each.

    Args:
      stop: whether to end behind the update under way, with fewer; asked before every minibatch, which is then not
        read.
    """
    history: list[Metrics] = []
    while len(history) < steps and not stop():
        state, metrics = step(state, placed(next(stream), mesh))
        jax.block_until_ready(history[-1:])  # no more than one update waits for a device, which stops behind it
        history.append(metrics)
    return state, history
