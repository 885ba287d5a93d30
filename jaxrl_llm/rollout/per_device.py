"""A rollout that every device runs for its own rows: loops that end when these rows do, slots of their own.

XLA divides the arrays of one program, so a loop over divided rows goes on until the last row of all devices has ended,
and a queue is one queue. Here each device has a program of its own: nothing is exchanged until all are done.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed.mesh import BATCH, batch_parts
from jaxrl_llm.types import Trajectories


def per_device(rollout: Callable[..., Trajectories], mesh: Mesh) -> Callable[..., Trajectories]:
    """``rollout`` on the prompts of each device along the batch axes; the samples are those of one device.

    Weights are whole on every device meanwhile, and devices along ``tensor`` and ``context`` repeat each other's work.
    Prompts that do not divide are run by every device.

    Args:
      rollout: ``(params, tokens [P, L], valid [P, L], keys [Q], problem_ids [P]) -> Trajectories`` of a policy for one
        device, without the arguments of ``distributed.model_parallel.on_mesh``; ``slots`` are those of each device.
    """
    parts = batch_parts(mesh)

    def alone(params, tokens, valid, keys, problem_ids):
        out = rollout(params, tokens, valid, keys, problem_ids)
        first = jax.lax.axis_index(BATCH) * tokens.shape[0]
        return out._replace(group_ids=out.group_ids + first.astype(out.group_ids.dtype))

    def run(params, tokens, valid, keys, problem_ids):
        divides = tokens.shape[0] % parts == 0
        rows = P(BATCH) if divides else P()
        program = jax.shard_map(
            alone if divides else rollout,
            mesh=mesh,
            in_specs=(P(), rows, rows, rows, rows),
            out_specs=rows,
            check_vma=False,  # what a loop carries begins the same everywhere and ends otherwise on each device
        )
        return program(params, tokens, valid, keys, problem_ids)

    return run
