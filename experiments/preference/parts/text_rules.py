"""Problems of one's own in the place of the puzzles of ``knights``, judged by the rules of TRPA.

Levels are: 1 right; 2 a wrong answer where one was to be given (``<answer>``, ``\\boxed{}`` or ``####``); 3 such a
place that is empty; 4 none. A puzzle of two, three or four people is a problem of the third with the shortest, the
middle or the longest solutions; all that is measured is held out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.parts import text_problems, text_rows
from experiments.preference.parts.knights import MOST, Puzzles
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.verifiers import answers

Settings = text_problems.Settings


def level_of(text: str, right: bool) -> int:
    r"""The level of one response.

    >>> [level_of(text, False) for text in ("so 3", r"\boxed{3}", "<answer> </answer>")], level_of("3", True)
    ([4, 2, 3], 1)
    """
    if right:
        return 1
    part = answers.final_part(text)
    if part == text.strip() and answers.tagged(text) is None:
        return 4
    return 2 if part else 3


def open_task(settings: Any) -> Opened:
    """The ``Puzzles`` of the rows of the settings."""
    found = text_problems.opened(settings)
    decode, ends = found.rows.model.tokenizer.decode, np.asarray(found.rows.model.tokenizer.eos_ids)

    def levels(responses: Any, good: Any) -> np.ndarray:
        said = []
        for response, fine in zip(np.asarray(responses), np.asarray(good), strict=True):
            stop = np.flatnonzero(np.isin(response, ends))
            said.append(level_of(decode(response[: stop[0] if len(stop) else None].tolist()), bool(fine)))
        return np.asarray(said, np.int32)

    def rule_levels(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, " N"]:
        shape = jax.ShapeDtypeStruct((prompts.shape[0],), jnp.int32)
        right = found.right(prompts, responses)
        return jax.pure_callback(levels, shape, responses, right, vmap_method="sequential")

    def draw_puzzles(key: Array, n: int, *, people: tuple[int, ...], heldout: bool = False) -> tuple[Array, Array]:
        prompts = found.of_kinds(key, n, tuple(MOST - k for k in people))
        return prompts, found.solution(prompts)

    def draw_untidy(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
        return draw_puzzles(key, n, people=(2, 3))

    return Opened(Puzzles(found.world, draw_puzzles, rule_levels, draw_untidy), text_rows.finish(found.rows))
