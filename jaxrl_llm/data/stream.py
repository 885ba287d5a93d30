"""Batches of rows that need not fit on a device, by Grain: shuffled epochs, split by process, resumed where they were.

The iterator's ``get_state()`` is a small JSON value, the same on every process; ``train.streamed`` keeps it in the
checkpoint, and ``set_state`` goes on from there without reading what lies before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from jaxrl_llm.errors import UserError


def make_stream(
    rows: Sequence[Any],
    make: Callable[[Any], dict[str, np.ndarray]],
    *,
    batch: int,
    seed: int = 0,
    process: tuple[int, int] = (0, 1),
) -> grain.DatasetIterator:
    """Endless batches ``{name: [batch / processes, ...]}``; every epoch has an order of its own.

    The batches of all processes together are those of one process, step by step.

    Args:
      rows: whatever has a length and can be indexed: a list, an array-record source, a data set of TFDS.
      make: one row as arrays of fixed shapes; it runs in Grain's reading threads.
      batch: rows of a step over all processes.
      process: which one this is, and how many there are: ``(jax.process_index(), jax.process_count())``.

    Raises:
      UserError: for no rows, or a batch that does not divide over the processes.
    """
    index, count = process
    if not len(rows):
        raise UserError("the data set is empty; give at least one row")
    if batch < 1 or batch % count:
        raise UserError(f"batch={batch} does not divide over {count} processes; choose a multiple")
    # repeated before it is split, so that an epoch that does not divide leaves nobody with other steps
    order = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    return iter(order[index::count].map(make).batch(batch // count).to_iter_dataset())
