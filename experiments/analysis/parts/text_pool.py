"""Problems of one's own in the place of the sums of ``beyond_base``: what is easy has a short worked solution."""

from typing import Any

from experiments.analysis.parts.beyond_base import POOL, Pool
from experiments.parts import text_problems, text_rows
from jaxrl_llm.experiment.own_rows.tasks import Opened

Settings = text_problems.Settings


def open_task(settings: Any) -> Opened:
    """The ``Pool`` of the rows of the settings."""
    found = text_problems.opened(settings)

    def draw_problems(key, n, kinds=POOL):
        return found.of_kinds(key, n, kinds)

    def draw_attempts(key, n):
        prompts = found.draw(key, n)
        return prompts, found.solution(prompts)

    def easy(prompts):
        return found.kind(prompts) == max(POOL)

    task = Pool(found.world, draw_problems, found.draw, found.right, found.solution, draw_attempts, easy)
    return Opened(task, text_rows.finish(found.rows))
