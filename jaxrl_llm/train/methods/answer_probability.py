"""What a policy thinks of a right answer of several tokens before each of its turns, in episodes of text."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.train.methods.builders import in_row_parts, rows_within
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
    policy: Policy, params: Params, rows: Trajectories, answers: dict[str, Array], *, most_bytes: int = 2**30
) -> Float[Array, "B K *V"]:
    """The geometric mean of the probabilities of the right answer's tokens, written in place of each turn's action.

    0 where no action was taken. Each episode is read once into a cache; before a turn the cache is what came before it,
    and the answer alone is read on. No gradient. From "Information Gain-based Policy Optimization", arXiv:2510.14967,
    section 3. Differs from the paper in that no thought stands before the answer.

    Args:
      answers: ``golds`` of each row's problem, ``[B, A]``, or those of ``V`` answers to it, ``[B, V, A]``: then
        ``[B, K, V]`` comes back.
      most_bytes: of the caches that exist at once; rows are taken in parts, at least one at a time.
    """
    found = turns_of(rows)
    gold, kind = (jnp.asarray(answers[name]) for name in ("gold", "gold_kind"))
    several = gold.ndim == 3
    if not several:
        gold, kind = gold[:, None], kind[:, None]
    given = {"tokens": rows.tokens, "segment_ids": rows.segment_ids, "positions": rows.positions, "mask": rows.mask,
             "turn": found.turn, "gold": gold, "kind": kind, "taken": found.taken}  # fmt: skip
    length = rows.tokens.shape[1] + gold.shape[2]
    cache = jax.eval_shape(lambda: policy.init_cache(1, length))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    chance = in_row_parts(partial(_chances, policy, params), given, at_once=rows_within(most_bytes, size))
    return jax.lax.stop_gradient(chance if several else chance[:, :, 0])


def _chances(policy: Policy, params: Params, given: dict[str, Array]) -> Float[Array, "B K V"]:
    count, width = given["tokens"].shape
    most, answer = given["taken"].shape[1], given["gold"].shape[2]
    _, cache = policy.extend(
        params, policy.init_cache(count, width + answer), given["tokens"], given["positions"], given["segment_ids"], 0
    )
    column = jnp.arange(cache["segment_ids"].shape[1], dtype=jnp.int32)[None, :]

    def before(index: Array) -> Array:
        k, v = index // given["gold"].shape[1], index % given["gold"].shape[1]
        gold, kind = (jnp.take(given[name], v, axis=1) for name in ("gold", "kind"))
        acting = given["mask"] & (given["turn"] == k)
        begin = jnp.argmax(acting, axis=1).astype(jnp.int32)[:, None]
        at = jnp.take_along_axis(given["positions"], begin, axis=1)
        # what came later is hidden from the answer: the cache holds the turns before alone
        seen = cache | {"segment_ids": jnp.where(column < begin, cache["segment_ids"], 0)}
        there = (kind > 0).astype(jnp.int32)
        places = jnp.where(kind > 0, at + jnp.arange(answer, dtype=jnp.int32)[None, :], 0).astype(jnp.int32)
        hidden, _ = policy.extend(params, seen, gold.astype(jnp.int32), places, there, width)
        logp, _ = logprobs.chunked(hidden, partial(policy.unembed, params), gold, segment_ids=there)
        return jnp.exp(reduce.sequences(jnp.where(kind == 2, logp, 0.0), kind == 2, mode="mean"))

    every = jax.lax.map(before, jnp.arange(most * given["gold"].shape[1], dtype=jnp.int32))
    chance = jnp.moveaxis(every.reshape(most, -1, count), 2, 0)
    return jnp.where(given["taken"][:, :, None], chance, 0.0)


class Likely(NamedTuple):
    """Extras of trajectories: how likely the right answer is before each turn."""

    chance: Float[Array, "B K"]


def with_chances(online: Online) -> Online:
    """A method whose advantages find ``answer_chances`` among the rows' extras: ``Likely``.

    Its problems are of ``catalog.questions`` with ``golds``.
    """

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        found = answer_chances(online.policy, params, rows, answers_of(online, rows))
        return online.estimate(params, extras, rows._replace(extras=rows.extras | Likely(found)._asdict()), rewards)

    return online._replace(estimate=estimate)
