"""How the next token of every row is drawn, and what ends a response: one step of every decoding loop."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.sample import check_sampling, draw
from jaxrl_llm.types import Key


def is_end(tokens: Int[Array, " B"], eos_ids: Sequence[int]) -> Bool[Array, " B"]:
    """Which tokens are one of the ids that end a response; of none, none."""
    return jnp.any(tokens[:, None] == jnp.asarray(list(eos_ids), jnp.int32)[None, :], axis=1)


class Choice(NamedTuple):
    """How a token is drawn and what ends a response; the names are those of ``generate``."""

    eos_ids: tuple[int, ...]
    pad_id: int
    temperature: float | Array
    top_k: int | None
    top_p: float | Array | None
    min_p: float | None
    stop: stops.StopStrings | None
    grammar: grammars.Grammar | None


def make_choice(
    max_new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
    min_p: float | None,
    stop: stops.StopStrings | None,
    grammar: grammars.Grammar | None,
) -> Choice:
    """The ``Choice`` of a rollout; ValueError for what is out of range."""
    check_sampling(temperature, top_k, top_p, min_p)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not eos_ids:
        raise ValueError("eos_ids is empty; name at least one id that ends a response")
    return Choice(tuple(eos_ids), pad_id, temperature, top_k, top_p, min_p, stop, grammar)


Reading = tuple[Array, Array]  # states of the stop strings and of the grammar, both [B]


def unread(rows: int) -> Reading:
    """Of responses without a token."""
    return stops.start(rows), jnp.zeros((rows,), jnp.int32)


def choose(
    how: Choice, step_keys: Key, logits: Array, alive: Array, reading: Reading
) -> tuple[Array, Array, Array, Reading]:
    """Draws a token of every row: ``(token, log-probability, whether it ends the response, reading)``.

    Rows that are not alive get ``pad_id`` and 0. ``step_keys [B]``: token ``t`` of a row uses ``fold_in(its key, t)``.
    """
    read, state = reading
    if how.grammar is not None:
        logits = grammars.restricted(how.grammar, state, logits)
    token, logp = draw(
        logits, step_keys, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, min_p=how.min_p
    )
    if how.grammar is not None:
        state = grammars.advanced(how.grammar, state, token)
    token = jnp.where(alive, token, how.pad_id)
    ended = is_end(token, how.eos_ids)
    if how.stop is not None:
        read, found = stops.advance(how.stop, read, token)
        ended |= found
    return token, jnp.where(alive, logp, 0.0), ended, (read, state)
