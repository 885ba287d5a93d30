"""Updates on streamed batches: the state and the place in the data are one checkpoint."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.distributed.mesh import batch_sharding
from jaxrl_llm.train import checkpoint
from jaxrl_llm.types import Metrics, TrainState

PLACE = "stream"  # in the note of a checkpoint


def placed(batch: Any, mesh: Mesh | None = None) -> Any:
    """This process's rows on its devices; on a mesh all processes' rows are one array."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh), x), batch)


def run(
    update: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    stream: Any,
    *,
    steps: int,
    folder: str | pathlib.Path,
    every: int,
    mesh: Mesh | None = None,
) -> tuple[TrainState, list[dict[str, float]]]:
    """Runs to step ``steps`` from the newest checkpoint of ``folder``, if there is one: ``(state, metrics by step)``.

    Args:
      update: of ``train.step.make_update``; it is compiled here, the state donated.
      stream: of ``data.stream.make_stream``, as it was made: its place comes from the checkpoint.
      every: steps between checkpoints; the last step has one in any case.

    Raises:
      ValueError: for an interval that is no positive number.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1 step")
    path = checkpoint.latest(folder)
    if path is not None:
        stream.set_state(checkpoint.note(path)[PLACE])
        state = checkpoint.restore(path, state)
    step = jax.jit(update, donate_argnums=0, compiler_options=options_of())
    history = []
    while int(state.step) < steps:
        state, metrics = step(state, placed(next(stream), mesh))
        state = state._replace(step=state.step + 1)
        history.append({name: float(value) for name, value in metrics.items()})
        if int(state.step) % every == 0 or int(state.step) == steps:
            checkpoint.save(folder, state, note={PLACE: stream.get_state()})
    return state, history
