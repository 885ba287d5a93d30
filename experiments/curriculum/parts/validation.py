"""Validation problems that are asked beside those that train, and decide when a stage ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.curriculum.parts import plateau
from jaxrl_llm.errors import UserError


def until_flat(settings: Any, stages: Sequence[np.ndarray]) -> dict[str, Any]:
    """Slots of ``make_single_turn_grpo`` by which a stage ends where the reward of validation problems is flat.

    Args:
      settings: ``validation`` prompts of a step, ``validation_rows`` of the table held back for them, ``window`` and
        ``patience`` of ``plateau.past_plateau``.
      stages: as in ``plateau.make_validated``.

    Raises:
      UserError: where the problems are too few.
    """
    try:
        held = plateau.held_rows(stages[0].size, settings.validation_rows)
        numbers = {"count": settings.validation, "window": settings.window, "patience": settings.patience}
        sampler = plateau.make_validated(stages, held, **numbers)
    except ValueError as error:
        raise UserError(f"--validation {settings.validation}: {error}; give more --train-problems") from error
    return {
        "sampler": sampler,
        "prompts_per_step": settings.prompts_per_step + settings.validation,
        "keep": lambda rows, rewards: plateau.not_validation(held, rows.problem_ids),
    }
