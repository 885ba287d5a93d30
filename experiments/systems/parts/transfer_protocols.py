"""How one controller hands a batch to a group of ranks and takes what they return: pairs of pure functions.

Inside one program ``rules.shard_batch`` does the same, and the compiler moves the rows. These are for controllers whose
workers are programs of their own, and to say in a line who gets what.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.systems.parts import regroup
from experiments.systems.parts.regroup import Layout

Tree = Any  # arrays with a leading row axis


class Protocol(NamedTuple):
    """``distribute``: what every rank gets, in order; ``collect``: what the controller makes of what they return."""

    distribute: Callable[[Tree, Layout], list[Tree]]
    collect: Callable[[list[Tree], Layout], Any]


def spread(run: Callable[[Tree], Tree], protocol: Protocol, layout: Layout) -> Callable[[Tree], Any]:
    """A call of the controller: every rank of the layout runs ``run`` on what the protocol hands it.

    From "HybridFlow", arXiv:2409.19256, section 4 (transfer protocols of registered methods). Differs from the paper
    in that the ranks run one after the other in this process, and nothing is a future.
    """
    return lambda tree: protocol.collect([run(part) for part in protocol.distribute(tree, layout)], layout)


def _split(tree: Tree, parts: int) -> list[Tree]:
    for x in jax.tree.leaves(tree):
        if x.shape[0] % parts:
            raise ValueError(f"{x.shape[0]} rows are no multiple of {parts} parts; choose a multiple")
    return [
        jax.tree.map(lambda x, k=k: x[k * (x.shape[0] // parts) : (k + 1) * (x.shape[0] // parts)], tree)
        for k in range(parts)
    ]


def _concatenate(parts: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _copies(tree: Tree, layout: Layout) -> list[Tree]:
    return [tree] * layout.ranks


def _each(returned: list[Tree], layout: Layout) -> list[Tree]:
    return returned


def _to_everyone(returned: list[Tree], layout: Layout) -> list[Tree]:
    return _copies(_concatenate(returned), layout)


Ranks = Callable[[Layout], np.ndarray]  # [pipeline, replica, tensor]


def _to_replicas(tree: Tree, layout: Layout, *, ranks: Ranks) -> list[Tree]:
    grid = ranks(layout)
    parts = _split(tree, grid.shape[1])
    place = {int(rank): replica for (_, replica, _), rank in np.ndenumerate(grid)}
    return [parts[place[rank]] for rank in range(layout.ranks)]


def _from_last_stages(returned: list[Tree], layout: Layout, *, ranks: Ranks) -> Tree:
    return _concatenate([returned[rank] for rank in ranks(layout)[-1, :, 0].tolist()])


def replicas(ranks: Ranks) -> Protocol:
    """Every replica of the model gets a share of the rows, all its ranks the same; its last stage's first rank answers.

    Args:
      ranks: the ranks of a layout as an array ``[pipeline, replica, tensor]``.
    """
    return Protocol(partial(_to_replicas, ranks=ranks), partial(_from_last_stages, ranks=ranks))


def micro(*, pipeline: int, tensor: int) -> Protocol:
    """``THREE_D`` for the replicas of generation in the ranks of training, see ``regroup.strided``."""

    def ranks(layout: Layout) -> np.ndarray:
        found = regroup.strided(layout, pipeline=pipeline, tensor=tensor)
        return found.reshape(pipeline, -1, tensor)

    return replicas(ranks)


ONE_TO_ALL = Protocol(_copies, _each)  # the same to every rank, a list of what they return
DP = replicas(lambda layout: np.arange(layout.ranks).reshape(1, -1, 1))  # every rank a replica
THREE_D = replicas(lambda layout: layout.grid)
DP_ALLGATHER = Protocol(DP.distribute, _to_everyone)  # and every rank gets the whole of what all of them return
