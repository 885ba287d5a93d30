"""Problems of one's own in the place of the sums of ``spurious_steps``.

Steps are four parts of a response, each a quarter of its own length. What is said behind the cue is asked of problems
whose prompt is not longer than the median; broken problems are the longer ones.
"""

from typing import Any

import jax.numpy as jnp

from experiments.parts import strings, text_problems, text_rows
from experiments.preference.parts.spurious_steps import PAYS, Steps
from jaxrl_llm.experiment.own_rows.tasks import Opened

Settings = text_problems.Settings
CUTS = 4


def open_task(settings: Any) -> Opened:
    """The ``Steps`` of the rows of the settings."""
    found = text_problems.opened(settings)
    width = found.world.response_tokens

    def draw_training(key, n):
        return found.cued(key, n, cue=0.5, pays=PAYS)

    def draw_attempts(key, n):
        prompts = draw_training(key, n)
        return prompts, found.solution(prompts)

    def begins(responses):
        length = jnp.sum(strings.spoken(found.world, responses).astype(jnp.int32), axis=1, keepdims=True)
        return length * jnp.arange(CUTS, dtype=jnp.int32)[None, :] // CUTS

    places = tuple(width * k // CUTS for k in range(CUTS))  # of the longest response
    begin = jnp.asarray(places, jnp.int32)
    task = Steps(
        found.world, places, lambda steps: begin[steps], found.right, found.solution, found.cued, draw_training,
        draw_attempts, begins,
    )  # fmt: skip
    return Opened(task, text_rows.finish(found.rows))
