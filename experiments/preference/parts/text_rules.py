"""Problems of one's own in the place of the questions of ``confidence_task``, judged by the rules of TRPA.

Levels are: 1 right; 2 a wrong answer where one was to be given (``<answer>``, ``\\boxed{}`` or ``####``); 3 such a
place that is empty; 4 none. All held-out problems stand for the sums; there are no facts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.parts import strings, text_problems, text_rows
from jaxrl_llm import reduce
from jaxrl_llm.experiment.own_rows.rebound import Own
from jaxrl_llm.types import Key, Metrics, Params
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


def make(settings: Any, smoke: bool) -> Own:
    """The names that TRPA takes of ``confidence`` and ``confidence_task``, over the rows of the settings."""
    rows = text_rows.opened(settings, Settings, text_problems.solved)
    right, decode = text_problems.make_right(rows, text_problems.verifier_of(settings)), rows.model.tokenizer.decode
    number_of, ends = text_rows.numbers_of(rows), np.asarray(rows.model.tokenizer.eos_ids)
    solutions = jnp.concatenate([rows.train.chosen, rows.heldout.chosen])
    world = text_rows.world_maker(rows, settings)(0, rows.train.prompts.shape[1], rows.train.chosen.shape[1])

    def levels(responses: Any, good: Any) -> np.ndarray:
        found = []
        for response, fine in zip(np.asarray(responses), np.asarray(good), strict=True):
            stop = np.flatnonzero(np.isin(response, ends))
            found.append(level_of(decode(response[: stop[0] if len(stop) else None].tolist()), bool(fine)))
        return np.asarray(found, np.int32)

    def rule_levels(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, " N"]:
        shape = jax.ShapeDtypeStruct((prompts.shape[0],), jnp.int32)
        return jax.pure_callback(levels, shape, responses, right(prompts, responses), vmap_method="sequential")

    def draw_questions(key: Array, n: int) -> Int[Array, "N P"]:
        table = rows.now().prompts
        return table[jax.random.randint(key, (n,), 0, table.shape[0], jnp.int32)]

    def draw_untidy(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
        prompts = draw_questions(key, n)
        return prompts, solutions[number_of(prompts)]

    def measure(params: Params, key: Key, *, questions: int = 256, samples: int = 4) -> Metrics:
        prompts = draw_questions(jax.random.fold_in(key, 0), questions)
        said = strings.sample(world, params, prompts, jax.random.fold_in(key, 1), samples=samples)
        found = rule_levels(jnp.repeat(prompts, samples, axis=0), said)
        return {
            "sums/accuracy": reduce.scalars((found == 1).astype(jnp.float32)),
            "sums/readable": reduce.scalars((found <= 2).astype(jnp.float32)),
        }

    names = {
        "experiments.parts.confidence": {"rule_levels": rule_levels, "measure": measure},
        "experiments.parts.confidence_task": {
            "VOCABULARY": rows.model.config.padded_vocab_size, "PROMPT_TOKENS": world.prompt_tokens,
            "RESPONSE_TOKENS": world.response_tokens, "draw_questions": draw_questions, "draw_untidy": draw_untidy,
        },
        "experiments.parts.strings": {"make_world": text_rows.world_maker(rows, settings)},
    }  # fmt: skip
    return Own(names, text_rows.finish(rows))
