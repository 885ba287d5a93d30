"""Categories of prompts by level and target, and what a curriculum over them spends on each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm import reduce
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.types import declared


def target_categories(found: Bench, rows: np.ndarray) -> np.ndarray:
    """Categories of the given training rows, easy first: levels, each cut in two at its median target if it has any."""
    level = np.asarray(found.train.level)[rows]
    numbers = found.train.answers.get("target") if isinstance(found.train.answers, dict) else None
    part = np.zeros(rows.size, int)
    if numbers is not None:
        target = np.asarray(numbers)[rows]
        for k in np.unique(level):
            part[level == k] = target[level == k] > np.median(target[level == k])
    return np.unique(2 * level + part, return_inverse=True)[1]


class Drawn(NamedTuple):
    """Extras of a batch: the category of each row's problem, -1 for none."""

    category: Int[Array, " B"]


def spending(categories: np.ndarray, rows: np.ndarray | None = None) -> dict[str, Callable]:
    """Slots of ``make_single_turn_grpo`` that log ``drawn/<k>``, the share of responses that went to category k.

    Args:
      categories: of every training row, or of the chosen ``rows``; others count in none.
    """
    chosen = np.arange(categories.size) if rows is None else rows
    table = np.full(int(chosen.max()) + 1, -1, np.int32)
    table[chosen] = categories
    of_row = jnp.asarray(table)

    def row_extras(extras: Any, trajectories: Any, rewards: Any) -> dict[str, Array]:
        ids = trajectories.problem_ids
        return Drawn(jnp.where(ids < of_row.shape[0], of_row[jnp.minimum(ids, of_row.shape[0] - 1)], -1))._asdict()

    def figures(batch: Any, metrics: Any) -> dict[str, Array]:
        drawn = declared(Drawn, batch.extras).category
        return {
            f"drawn/{k}": reduce.scalars((drawn == k).astype(jnp.float32)) for k in range(int(categories.max()) + 1)
        }

    return {"row_extras": row_extras, "figures": figures}
