"""Countdown with numbers from 13 to 25, in the place of those from 1 to 12 that the base models have read."""

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import countdown

LEVELS = countdown.LEVELS
LEAST, MOST = countdown.MAX_NUMBER + 1, 25


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a solvable problem with ``level`` of them."""
    return countdown.make(rng, level, least=LEAST, most=MOST)
