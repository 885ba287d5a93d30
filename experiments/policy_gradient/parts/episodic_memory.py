"""Episodic memory as arrays: what was answered well and badly before, and rewards for resembling or avoiding it.

A memory holds a bank of response embeddings for each of ``C`` queries. Embeddings are unit vectors, so a product is a
cosine. Everything is fixed in size; the oldest entry is overwritten first.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts.beside import load_beside
from jaxrl_llm.rewards.shaping import group_extremes
from jaxrl_llm.run import parts as job
from jaxrl_llm.types import Params, Policy

SAME_QUERY = 0.9999  # cosine from which two queries are one


class Memory(NamedTuple):
    """Queries, their banks of responses, and where the next ones go."""

    queries: Float[Array, "C D"]
    responses: Float[Array, "C R D"]
    filled: Bool[Array, "C R"]
    written: Int[Array, " C"]  # responses written to each bank so far
    opened: Int[Array, ""]  # banks opened so far


def empty_memory(queries: int, responses: int, width: int) -> Memory:
    """Room for so many queries and responses to each, embeddings of ``width`` numbers.

    Raises:
      ValueError: for a size below 1.
    """
    if min(queries, responses, width) < 1:
        raise ValueError(f"queries={queries}, responses={responses} and width={width} must all be at least 1")
    return Memory(
        jnp.zeros((queries, width), jnp.float32),
        jnp.zeros((queries, responses, width), jnp.float32),
        jnp.zeros((queries, responses), bool),
        jnp.zeros((queries,), jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def ngram_embedding(
    tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, width: int = 64, n: int = 2
) -> Float[Array, "B D"]:
    """Hashed counts of the n-grams of the masked tokens, as a unit vector; 0 for a row with fewer than n tokens.

    A stand-in for a sentence encoder that needs no model: equal texts have cosine 1.
    """
    if n < 1 or width < 2:
        raise ValueError(f"n={n} must be at least 1 and width={width} at least 2")
    size = tokens.shape[1] - n + 1
    code, inside = jnp.zeros((tokens.shape[0], size), jnp.uint32), jnp.ones((tokens.shape[0], size), bool)
    for k in range(n):
        code = code * jnp.uint32(1000003) + tokens[:, k : k + size].astype(jnp.uint32) + jnp.uint32(1)
        inside &= mask[:, k : k + size]
    bucket = ((code ^ (code >> 15)) % jnp.uint32(width)).astype(jnp.int32)
    counts = jnp.sum(jnp.where(inside[:, :, None], jax.nn.one_hot(bucket, width), 0.0), axis=1)
    length = jnp.sqrt(jnp.sum(counts**2, axis=1, keepdims=True))
    return counts / jnp.maximum(length, 1e-12)


def state_embedding(
    policy: Policy, params: Params, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B D"]:
    """Mean of a model's final hidden states over the masked tokens, as a unit vector; 0 for a row without any.

    The masked tokens are read as a text of their own: what stands before them is not seen.
    """
    real = mask.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    hidden = jax.lax.stop_gradient(policy.hidden(params, tokens, positions, real)).astype(jnp.float32)
    total = jnp.sum(jnp.where(mask[:, :, None], hidden, 0.0), axis=1)
    length = jnp.sqrt(jnp.sum(total**2, axis=1, keepdims=True))
    return total / jnp.maximum(length, 1e-12)


Encoder = Callable[[Array, Array], Array]  # (tokens, mask) -> unit vectors [B, D]


def make_encoder(name: str, model: job.Model, *, width: int, tokens: int) -> tuple[Encoder, int]:
    """What texts are found by, and its width: a model's hidden states, or hashed pairs of tokens.

    Args:
      name: ``base``, the model itself; a folder or a bundled model of its vocabulary; empty: pairs, ``width`` numbers.
      tokens: of the longest text.

    Raises:
      UserError: as ``load_beside``.
    """
    if not name:
        return partial(ngram_embedding, width=width), width
    by = model if name == "base" else load_beside("--encoder-model", name, model, tokens=tokens)
    return partial(state_embedding, by.policy, by.params), by.config.hidden_size


def remembered(
    memory: Memory, queries: Float[Array, "B D"], responses: Float[Array, "B D"], chosen: Bool[Array, " B"]
) -> Memory:
    """The memory after the chosen rows, one after another: into the bank of their query, or a new one.

    A full bank overwrites its oldest response, a full memory its oldest query with all its responses.
    """
    capacity, room = memory.filled.shape

    def write(state, row):
        query, response, wanted = row
        open_banks = jnp.arange(capacity, dtype=jnp.int32) < jnp.minimum(state.opened, capacity)
        near = jnp.where(open_banks, state.queries @ query, -1.0)
        known = jnp.max(near) >= SAME_QUERY
        bank = jnp.where(known, jnp.argmax(near).astype(jnp.int32), state.opened % capacity)
        count = jnp.where(known, state.written[bank], 0)
        kept = jnp.where(known, state.filled[bank], jnp.zeros((room,), bool))
        slot = count % room
        new = Memory(
            state.queries.at[bank].set(query),
            state.responses.at[bank, slot].set(response),
            state.filled.at[bank].set(kept.at[slot].set(True)),
            state.written.at[bank].set(count + 1),
            state.opened + jnp.where(known, 0, 1),
        )
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, state), None

    return jax.lax.scan(write, memory, (queries, responses, chosen))[0]


def closeness(
    memory: Memory, queries: Float[Array, "B D"], responses: Float[Array, "B D"], *, neighbours: int = 1
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Largest cosine of each response with those in the banks of its query's nearest neighbours, and whether any is.

    Args:
      neighbours: how many of the nearest remembered queries are asked.

    >>> import jax.numpy as jnp
    >>> m = remembered(empty_memory(4, 4, 2), jnp.array([[1.0, 0], [1.0, 0]]), jnp.eye(2), jnp.array([True, True]))
    >>> near, found = closeness(m, jnp.array([[1.0, 0.0]]), jnp.array([[0.6, 0.8]]))
    >>> round(float(near[0]), 4), bool(found[0])
    (0.8, True)
    """
    capacity = memory.filled.shape[0]
    if not 1 <= neighbours <= capacity:
        raise ValueError(f"neighbours={neighbours} must lie in [1, {capacity}], the queries that the memory holds")
    there = jnp.any(memory.filled, axis=1)
    similar = jnp.where(there[None, :], queries @ memory.queries.T, -jnp.inf)
    best, asked = jax.lax.top_k(similar, neighbours)
    usable = memory.filled[asked] & jnp.isfinite(best)[:, :, None]
    cosine = jnp.einsum("bkrd,bd->bkr", memory.responses[asked], responses)
    near = jnp.max(jnp.where(usable, cosine, -jnp.inf), axis=(1, 2))
    found = jnp.any(usable, axis=(1, 2))
    return jnp.where(found, near, 0.0), found


def group_min_max(values: Float[Array, " B"], group_ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """``(x - min) / (max - min)`` within each group; 0 where all are equal.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in group_min_max(jnp.array([0.2, 0.5, 0.8]), jnp.zeros(3, jnp.int32))]
    [0.0, 0.5, 1.0]
    """
    low, high = group_extremes(values, group_ids)
    spread = high - low
    return jnp.where(spread > 0, (values - low) / jnp.where(spread > 0, spread, 1.0), 0.0)


class Nearness(NamedTuple):
    """How close each response is to what is remembered, and whether anything is."""

    near: Float[Array, " B"]
    known: Bool[Array, " B"]
    far: Float[Array, " B"]
    failed: Bool[Array, " B"]


def nearness(
    successes: Memory,
    failures: Memory,
    queries: Float[Array, "B D"],
    responses: Float[Array, "B D"],
    *,
    neighbours: int = 1,
) -> Nearness:
    """Closeness to the successes, and one minus that to the failures; 0 where nothing is remembered."""
    near, known = closeness(successes, queries, responses, neighbours=neighbours)
    close, failed = closeness(failures, queries, responses, neighbours=neighbours)
    return Nearness(near, known, jnp.where(failed, 1.0 - close, 0.0), failed)


class History(NamedTuple):
    """The last values of a term, by which the next are scaled, and what it has faded to."""

    values: Float[Array, " H"]  # NaN where there is none yet
    written: Int[Array, ""]
    factor: Float[Array, ""]


def first_history(size: int = 100) -> History:
    """Before the first value."""
    return History(jnp.full((size,), jnp.nan, jnp.float32), jnp.zeros((), jnp.int32), jnp.ones((), jnp.float32))


Scaled = tuple[Float[Array, " B"], History]


def by_group(
    history: History, values: Float[Array, " B"], there: Bool[Array, " B"], group_ids: Int[Array, " B"]
) -> Scaled:
    """To [0, 1] within each group, whatever came before; ``there``: rows for which something is remembered."""
    return group_min_max(values, group_ids), history


def by_last_values(
    history: History,
    values: Float[Array, " B"],
    there: Bool[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    fade: float = 1.0,
) -> Scaled:
    """To [0, 1] by the least and the largest of the last values, one response after another, each among them itself.

    From the public code of Memory-R+ (thaihungle/Memory-R, ``FastKNNMemory.novelty_score_max``), whose class lets the
    term fade by 0.99 with every response and whose script sets 1.

    >>> import jax.numpy as jnp
    >>> x, every = jnp.array([0.2, 0.6, 0.4, 0.1]), jnp.ones(4, bool)
    >>> [round(float(v), 4) for v in by_last_values(first_history(3), x, every, jnp.zeros(4, jnp.int32))[0]]
    [0.0, 1.0, 0.5, 0.0]
    """
    if not 0 < fade <= 1:
        raise ValueError(f"fade={fade} must lie in (0, 1]: what is left of the term after each response")

    def one(state, row):
        value, wanted = row
        last = state.values.at[state.written % state.values.shape[0]].set(value)
        low, high = jnp.nanmin(last), jnp.nanmax(last)
        scaled = jnp.where(high > low, (value - low) / jnp.where(high > low, high - low, 1.0), 0.0)
        new = History(last, state.written + 1, state.factor * fade)
        kept = jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, state)
        return kept, jnp.where(wanted, state.factor * scaled, 0.0)

    history, scaled = jax.lax.scan(one, history, (values, there))
    return scaled, history


def paid(
    terms: Nearness,
    histories: tuple[History, History],
    group_ids: Int[Array, " B"],
    *,
    resemble: float,
    avoid: float,
    scaled: Callable[..., Scaled] = by_group,
) -> tuple[Float[Array, " B"], tuple[History, History]]:
    """Memory-R+: ``resemble`` for being close to a known success, ``avoid`` for being far from known failures.

    ``resemble scaled(max cos to successes) + avoid scaled(1 - max cos to failures)``, and the histories after it. By
    group, a term without anything remembered is 0 for the whole group, so that empty memories leave GRPO as it is.

    From "Reasoning Under 1 Billion: Memory-Augmented Reinforcement Learning for Large Language Models" (Memory-R+),
    arXiv:2504.02273. Differs from its public code (thaihungle/Memory-R), which scales by the last values, remembers a
    response before it is compared, rewards being close to the mean of the successes, and pays novelty 1 where no
    failure is remembered.
    """
    exploit, first = scaled(histories[0], terms.near, terms.known, group_ids)
    explore, second = scaled(histories[1], terms.far, terms.failed, group_ids)
    return resemble * exploit + avoid * explore, (first, second)
