"""What a policy thinks of a right answer of several tokens before each of its turns, in episodes of text."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm import reduce
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.online import Online, answers_of
from jaxrl_llm.types import Batch, Params, Policy, Rewards, Trajectories

BEFORE = "<answer>"  # stands in front of the answer, and is in no probability


def golds(tokenizer: Tokenizer, problems: Sequence[Problem], before: str = BEFORE) -> dict[str, np.ndarray]:
    """``gold [N, A]``: ``before`` and the first right answer; ``gold_kind``: 1 for the former, 2 the latter, 0 none."""
    first, rows = tokenizer.encode(before), []
    for problem in problems:
        value = problem.answer["value"]
        rows.append(tokenizer.encode(str(value[0] if isinstance(value, list | tuple) else value)))
    width = len(first) + max(map(len, rows))
    tokens = np.full((len(rows), width), tokenizer.pad_id, np.int32)
    kind = np.zeros((len(rows), width), np.int32)
    for k, row in enumerate(rows):
        tokens[k, : len(first) + len(row)] = [*first, *row]
        kind[k, : len(first) + len(row)] = [1] * len(first) + [2] * len(row)
    return {"gold": tokens, "gold_kind": kind}


def answer_chances(
    policy: Policy, params: Params, rows: Trajectories, answers: dict[str, Array]
) -> Float[Array, "B K"]:
    """The geometric mean of the probabilities of the right answer's tokens, written in place of each turn's action.

    0 where no action was taken. One pass over all rows a turn, without a gradient. From "Information Gain-based Policy
    Optimization", arXiv:2510.14967, section 3. Differs from the paper in that no thought stands before the answer.

    Args:
      answers: ``golds`` of each row's problem.
    """
    found, width = turns_of(rows), answers["gold"].shape[1]

    def longer(array: Array) -> Array:
        return jnp.pad(array, ((0, 0), (0, width)))

    tokens, segments, positions, turn, mask = map(
        longer, (rows.tokens, rows.segment_ids, rows.positions, found.turn, rows.mask)
    )
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]

    def before(k: Array) -> Array:
        begin = jnp.argmax(mask & (turn == k), axis=1).astype(jnp.int32)[:, None]
        place = jnp.clip(column - begin, 0, width - 1)
        gold, kind = (jnp.take_along_axis(answers[name], place, axis=1) for name in ("gold", "gold_kind"))
        kind = jnp.where((column >= begin) & (column < begin + width), kind, 0)
        at = jnp.take_along_axis(positions, begin, axis=1)
        written = rows._replace(
            tokens=jnp.where(column < begin, tokens, gold).astype(jnp.int32),
            segment_ids=jnp.where(column < begin, segments, (kind > 0).astype(jnp.int32)).astype(jnp.int32),
            positions=jnp.where(column < begin, positions, jnp.where(kind > 0, at + column - begin, 0)).astype(
                jnp.int32
            ),
        )
        logp, _ = score_tokens(policy, params, written)
        return jnp.exp(reduce.sequences(jnp.where(kind == 2, logp, 0.0), kind == 2, mode="mean"))

    chance = jax.lax.map(before, jnp.arange(found.taken.shape[1], dtype=jnp.int32)).T
    return jax.lax.stop_gradient(jnp.where(found.taken, chance, 0.0))


def with_chances(online: Online) -> Online:
    """A method whose advantages find ``answer_chances`` among the rows' extras as ``chance``.

    Its problems are of ``host_places.questions`` with ``golds``.
    """

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        found = answer_chances(online.policy, params, rows, answers_of(online, rows))
        return online.estimate(params, extras, rows._replace(extras=rows.extras | {"chance": found}), rewards)

    return online._replace(estimate=estimate)
