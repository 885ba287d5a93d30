"""A loss that every device computes for its own rows, with a gradient that is added up once, as one vector.

XLA adds up the gradient of every parameter by itself, and on a CPU each sum waits for all devices: of a small model
with many parameters, that takes longer than what a second device saves.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxrl_llm.distributed.mesh import BATCH, batch_parts
from jaxrl_llm.train.step import LossFn, numbered
from jaxrl_llm.types import Batch, Metrics, Params


def per_device_loss(loss: LossFn, mesh: Mesh) -> LossFn:
    """``loss`` with the rows of a batch divided over the batch axes of the mesh.

    Value and gradient are those of ``loss`` up to rounding: losses divide by ``batch.total`` of the whole step, so
    parts add up. Metrics are put together as those of micro-batches are, see ``train.step.accumulate``. The parameters
    are whole on every device, and are copied once into one vector: this is for small models.

    Args:
      loss: ``(params, batch) -> (scalar, metrics)`` of a policy for one device, without the arguments of
        ``distributed.model_parallel.on_mesh``.

    Raises:
      ValueError: for rows that do not divide over the batch axes. Groups that a loss compares must not be cut either.
    """
    parts = batch_parts(mesh)

    def alone(flat: Array, unravel: Any, batch: Batch) -> tuple[Array, Array, Metrics]:
        value, metrics = loss(unravel(flat), batch._replace(group_ids=numbered(batch.group_ids)))
        tokens = jnp.sum(batch.mask.astype(jnp.float32))
        return jax.tree.map(lambda x: x[None], (value, tokens, metrics))

    def run(params: Params, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        rows = batch.tokens.shape[0]
        if rows % parts:
            raise ValueError(f"a batch of {rows} sequences does not divide over the {parts} devices of its axes")
        with jax.numpy_dtype_promotion("standard"):  # leaves may differ in precision
            flat, unravel = ravel_pytree(params)
        program = jax.shard_map(
            lambda flat, batch: alone(flat, unravel, batch),
            mesh=mesh,
            in_specs=(P(), jax.tree.map(lambda x: P(BATCH) if x.ndim else P(), batch)),
            out_specs=P(BATCH),
            check_vma=False,  # what a loop carries begins the same everywhere and ends otherwise on each device
        )
        values, tokens, metrics = program(flat, batch)
        shares = tokens / jnp.maximum(jnp.sum(tokens), 1.0)
        whole = {
            name: jnp.max(x, axis=0) if name.endswith("_max") else jnp.tensordot(shares, x, axes=1)
            for name, x in metrics.items()
        }
        return jnp.sum(values), whole

    return run
