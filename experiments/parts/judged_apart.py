"""Rows of one batch that several judges share out: each sees its own rows, numbered as it knows them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.types import Rewards, Trajectories

Judge = Callable[[Trajectories], Rewards]


def judged_apart(judges: Sequence[tuple[np.ndarray, Judge]]) -> Judge:
    """A judge on the host of a table whose rows belong to several others.

    Args:
      judges: of each its numbers ``[N]`` of the table's rows, -1 where a row is not its own, and the judge. A row that
        is nobody's gets an invalid reward.
    """

    def score(rows):
        rows = hosts.gathered(rows)
        ids = np.asarray(rows.problem_ids)
        value, valid = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, bool)
        for numbers, judge in judges:
            at = np.flatnonzero(numbers[ids] >= 0)
            if at.size:
                part = jax.tree.map(lambda x, at=at: np.asarray(x)[at], rows)
                got = judge(part._replace(problem_ids=numbers[ids[at]].astype(np.int32)))
                value[at], valid[at] = np.asarray(got.value), np.asarray(got.valid)
        return Rewards(jnp.asarray(value), jnp.asarray(valid))

    return score
