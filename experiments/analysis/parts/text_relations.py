"""Problems of one's own in the place of the puzzles of ``relations``: how far solutions carry beyond their length.

Near are the two thirds of the problems with the shorter solutions, of which the base learns, far the others. An answer
alone is the last line of a solution. Rows have one calculus: arms of another would be those there are, under another
name, and are left out. Consistent is a response that gives an answer.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.analysis.parts.relations import Questions
from experiments.parts import strings, text_problems, text_rows
from jaxrl_llm import reduce
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.verifiers import answers

Settings = text_problems.Settings
NEAR, FAR = (1, 2), (0,)
TABLE = 2048  # prompts that RL draws from


def answer_line(solution: str) -> str:
    r"""The last line of a solution.

    >>> answer_line("3+4=7\n#### 7\n")
    '#### 7'
    """
    return solution.strip().splitlines()[-1]


def of_one_calculus(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The arms that change no calculus."""
    return {name: changes for name, changes in arms.items() if "calculus" not in changes}


def open_task(settings: Any) -> Opened:
    """The ``Questions`` of the rows of the settings."""
    found = text_problems.opened(settings)
    rows, tokenizer = found.rows, found.rows.model.tokenizer
    number_of, width, end = text_rows.numbers_of(rows), found.world.response_tokens, tokenizer.eos_ids[0]
    said, valid = encode_responses(tokenizer, [answer_line(row.chosen) for row in rows.sources], width=width)
    alone = jnp.where(valid, said, end).astype(jnp.int32)

    def answered(responses: Any) -> np.ndarray:
        texts = [tokenizer.decode([t for t in row.tolist() if t != end]) for row in np.asarray(responses)]
        return np.asarray([answers.final_part(text) != text.strip() for text in texts])

    @lru_cache(maxsize=1)
    def asked_once():
        return found.of_kinds(jax.random.key(0), TABLE, NEAR)

    def worked(key, n):
        prompts = found.of_kinds(key, n, NEAR)
        return prompts, found.solution(prompts)

    def direct(key, n):
        prompts = found.of_kinds(key, n, NEAR)
        return prompts, alone[number_of(prompts)]

    def asked(make):
        prompts = asked_once()
        return prompts, lambda responses, ids: found.right(prompts[ids], responses)

    def figures(say, draws):
        def measure(params, key):
            shown = {}
            for k, (name, kinds) in enumerate((("near", NEAR), ("far", FAR))):
                prompts = found.of_kinds(jax.random.fold_in(key, 2 * k), draws, kinds)
                responses = say(params, prompts, jax.random.fold_in(key, 2 * k + 1))
                shape = jax.ShapeDtypeStruct((draws,), jnp.bool_)
                gives = jax.pure_callback(answered, shape, responses, vmap_method="sequential")
                shown[f"{name}/accuracy"] = reduce.scalars(found.right(prompts, responses).astype(jnp.float32))
                shown[f"{name}/consistent"] = reduce.scalars(gives.astype(jnp.float32))
            both = 0.5 * (shown["near/consistent"] + shown["far/consistent"])
            drop, room = shown["near/accuracy"] - shown["far/accuracy"], 1.0 - shown["near/accuracy"]
            return shown | {"eval/drop": drop, "near/room": room, "eval/consistent": both}

        return measure

    @lru_cache(maxsize=2)
    def measured(make, draws):
        return figures(lambda params, prompts, key: strings.sample(found.world, params, prompts, key), draws)

    @lru_cache(maxsize=2)
    def solved(make, draws):
        return figures(lambda params, prompts, key: found.solution(prompts), draws)

    task = Questions(lambda make: found.world, lambda make: worked, lambda make: direct, asked, measured, solved)
    return Opened(task, text_rows.finish(rows), of_one_calculus)
