"""Which ranks hold which weights when a model trains in one 3D layout and generates in another, and what moves.

Ranks are numbered tensor first, then data, then pipeline. A model is a grid of ``p t d`` equal cells: a pipeline stage
and a tensor part of it are ``d`` cells, which only fully sharded data take apart.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Layout(NamedTuple):
    """Sizes ``p``, ``d`` and ``t`` of pipeline, data and tensor parallel groups."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """Of the whole layout."""
        return self.pipeline * self.data * self.tensor

    @property
    def grid(self) -> Int[np.ndarray, "P D T"]:
        """The rank at every place."""
        return np.arange(self.ranks, dtype=np.int32).reshape(self)


class Costs(NamedTuple):
    """Of one change of layout, on the device that has the most of each, as shares of the model's bytes."""

    communication: float  # received
    peak: float  # of the model's weights that lie there at the same moment
    redundant: float  # kept for training although generation has no use for them; in closed form the most it can be


class Transition(NamedTuple):
    """Who has what, who needs what, and among whom it is gathered; ``costs`` in closed form."""

    held: Bool[np.ndarray, "N C"]  # cells of every rank in training
    wanted: Bool[np.ndarray, "N C"]  # and in generation
    groups: Int[np.ndarray, "G M"]  # every group of ranks gathers all that its members hold
    costs: Costs


def _check(train: Layout, pipeline: int, tensor: int) -> None:
    for name, whole, part in (("pipeline", train.pipeline, pipeline), ("tensor", train.tensor, tensor)):
        if part < 1 or whole % part:
            raise ValueError(f"{name}={part} of generation does not divide the {whole} of training; choose a divisor")


def strided(train: Layout, *, pipeline: int, tensor: int) -> Int[np.ndarray, "PG D DG TG"]:
    """The ranks of generation, its tensor groups at stride ``t / t_g`` of those of training, the pipeline likewise.

    So the cells that a rank trains are among those that it generates with. ``[i, k, u, j]``: pipeline stage ``i`` and
    tensor part ``j`` of the replica ``u`` that the ranks of data index ``k`` make among themselves; there are
    ``d_g = p t / (p_g t_g)`` of them.

    From "HybridFlow: A Flexible and Efficient RLHF Framework", arXiv:2409.19256, section 5.

    >>> strided(Layout(1, 2, 4), pipeline=1, tensor=2).reshape(-1, 2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    _check(train, pipeline, tensor)
    cut = train.grid.reshape(pipeline, -1, train.data, tensor, train.tensor // tensor)
    return cut.transpose(0, 2, 1, 4, 3).reshape(pipeline, train.data, -1, tensor)


def consecutive(train: Layout, *, pipeline: int, tensor: int) -> Int[np.ndarray, "PG D DG TG"]:
    """The same with neighbours as tensor groups, as a mesh of the same devices in the same order has them.

    >>> consecutive(Layout(1, 2, 4), pipeline=1, tensor=2).reshape(-1, 2).tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    _check(train, pipeline, tensor)
    cut = train.grid.reshape(-1, pipeline, train.data, train.tensor // tensor, tensor)
    return cut.transpose(1, 2, 0, 3, 4).reshape(pipeline, train.data, -1, tensor)


def micro_groups(ranks: Int[np.ndarray, "PG D DG TG"]) -> Int[np.ndarray, "G DG"]:
    """The micro data-parallel groups: ranks that generate with the same weights.

    >>> micro_groups(strided(Layout(1, 2, 4), pipeline=1, tensor=2)).tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    return np.moveaxis(ranks, 2, 3).reshape(-1, ranks.shape[2])


def _trained(train: Layout) -> Bool[np.ndarray, "N C"]:
    """Cells of the 3D layout."""
    p, d, t = train
    found = np.zeros((train.ranks, p, t, d), bool)
    for (i, _, j), rank in np.ndenumerate(train.grid):
        found[rank, i, j] = True
    return found.reshape(train.ranks, -1)


def _generated(train: Layout, ranks: Int[np.ndarray, "PG D DG TG"]) -> Bool[np.ndarray, "N C"]:
    p, d, t = train
    stages, parts = p // ranks.shape[0], t // ranks.shape[3]
    found = np.zeros((train.ranks, p, t, d), bool)
    for (i, _, _, j), rank in np.ndenumerate(ranks):
        found[rank, i * stages : (i + 1) * stages, j * parts : (j + 1) * parts] = True
    return found.reshape(train.ranks, -1)


def hybrid_engine(train: Layout, *, pipeline: int, tensor: int) -> Transition:
    """``strided`` ranks; every micro data-parallel group gathers: ``(t p - t_g p_g) / (t_g p_g t p)`` comes, no copy.

    From "HybridFlow", arXiv:2409.19256, section 5 (table of transition overheads).
    """
    ranks = strided(train, pipeline=pipeline, tensor=tensor)
    whole, part = train.pipeline * train.tensor, pipeline * tensor
    costs = Costs((whole - part) / (part * whole), 1 / part, 0.0)
    return Transition(_trained(train), _generated(train, ranks), micro_groups(ranks), costs)


def vanilla(train: Layout, *, pipeline: int, tensor: int) -> Transition:
    """``consecutive`` ranks; every replica of training gathers the whole model: ``(t p - 1) / (t p)`` comes.

    A rank whose part of training is not in its part of generation keeps both, ``1 / (t p)`` more; there is one where
    generation cuts layers or columns into fewer parts than training, but more than one.

    From "HybridFlow", arXiv:2409.19256, section 5 (HybridFlow-V).
    """
    ranks = consecutive(train, pipeline=pipeline, tensor=tensor)
    whole = train.pipeline * train.tensor
    costs = Costs((whole - 1) / whole, 1.0, 1 / whole)
    groups = train.grid.transpose(1, 0, 2).reshape(train.data, -1)
    return Transition(_trained(train), _generated(train, ranks), groups, costs)


def fully_sharded(train: Layout, *, pipeline: int, tensor: int) -> Transition:
    """Every rank trains one cell (ZeRO-3, as DeepSpeed-Chat): all ranks gather all, ``(t p d - 1) / (t p d)`` comes.

    A rank whose cell is not in its part of generation keeps it, ``1 / (t p d)`` more.

    From "HybridFlow", arXiv:2409.19256, section 5 (DS-Chat).
    """
    ranks = consecutive(train, pipeline=pipeline, tensor=tensor)
    count = train.ranks
    costs = Costs((count - 1) / count, 1.0, 1 / count)
    everyone = np.arange(count, dtype=np.int32)[None]
    return Transition(np.eye(count, dtype=bool), _generated(train, ranks), everyone, costs)


def counted(change: Transition) -> Costs:
    """The costs of a transition from its cells, rank by rank.

    Raises:
      ValueError: where a group does not hold all that one of its members needs.
    """
    cells = change.held.shape[1]
    received, peak = np.zeros((2, len(change.held)), np.int64)
    for group in change.groups:
        gathered = change.held[group].any(axis=0)
        if (change.wanted[group] & ~gathered).any():
            raise ValueError(f"the ranks {group.tolist()} do not hold all that they need; gather in larger groups")
        received[group] = (gathered & ~change.held[group]).sum(axis=1)
        peak[group] = gathered.sum()
    redundant = (change.held & ~change.wanted).sum(axis=1)
    return Costs(*(int(x.max()) / cells for x in (received, peak, redundant)))
