"""Countdown with one number from 13 to 25 among those from 1 to 12 that the base models have read."""

import numpy as np

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import countdown

LEVELS = countdown.LEVELS
LARGEST = 25


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a solvable problem of ``level`` numbers."""
    return countdown.make(rng, level, largest=LARGEST)
