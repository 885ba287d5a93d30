"""Jitted generation: every prompt prefilled once, its cache shared by the group, one compiled decode loop."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.sample import check_sampling, draw
from jaxrl_llm.types import Cache, Key, Params, Policy, Trajectories


def _ends(tokens: Int[Array, " B"], eos_ids: Sequence[int]) -> Bool[Array, " B"]:
    return jnp.any(tokens[:, None] == jnp.asarray(list(eos_ids), jnp.int32)[None, :], axis=1)


def _prefill(
    policy: Policy, params: Params, tokens: Array, valid: Array, group_size: int, length: int, columns: int = 0
):
    """Cache of every sequence, the logits of its first new token, and its next position.

    ``columns``: at most so many columns of the prompts at a time, which bounds the activations; 0: all at once.
    """
    positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
    segments = valid.astype(jnp.int32)
    cache, width = policy.init_cache(tokens.shape[0], length), tokens.shape[1]
    rest = width % columns if 0 < columns < width else width
    hidden = None
    if rest:  # what does not fill a chunk comes first: there is the padding
        hidden, cache = policy.extend(params, cache, *(x[:, :rest] for x in (tokens, positions, segments)), 0)
        hidden = hidden[:, -1]
    if rest < width:

        def one(cache, start):
            part = (jax.lax.dynamic_slice_in_dim(x, start, columns, 1) for x in (tokens, positions, segments))
            hidden, cache = policy.extend(params, cache, *part, start)
            return cache, hidden[:, -1]

        cache, last = jax.lax.scan(one, cache, jnp.arange(rest, width, columns, dtype=jnp.int32))
        hidden = last[-1]
    logits = policy.unembed(params, hidden)
    following = jnp.sum(segments, axis=1)
    if group_size > 1:
        cache = policy.repeat_cache(cache, group_size)
        logits, following = (jnp.repeat(x, group_size, axis=0) for x in (logits, following))
    return cache, logits, positions, segments, following


def generate(
    policy: Policy,
    params: Params,
    prompt_tokens: Int[Array, "P L"],
    prompt_valid: Bool[Array, "P L"],
    keys: Key,
    *,
    group_size: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int = 0,
    temperature: float | Float[Array, " B"] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, " B"] | None = None,
    min_p: float | None = None,
    problem_ids: Int[Array, " P"] | None = None,
    early_exit: bool = True,
    stop: stops.StopStrings | None = None,
    grammar: grammars.Grammar | None = None,
    prefill_columns: int = 0,
    cache_stages: int = 1,
) -> Trajectories:
    """Samples ``group_size`` responses to each left-padded prompt.

    Token and log-probability are written in the same place of the same loop, so they cannot disagree; the mask is the
    sampler's own record: the drawn tokens up to and including the first end id, or the token that completes a stop
    string (text behind it in the same token stays).

    Args:
      keys: one per sequence ``[P * group_size]``, see ``rollout.keys``; step ``t`` uses ``fold_in(key, t)``.
      eos_ids: every id that ends a response.
      temperature, top_p: of all sequences, or one for each (float32 ``[P * group_size]``).
      early_exit: leave the loop when all sequences ended (same result; use False under ``vmap``, where a loop of
        fixed length is faster).
      stop: texts that end a response as end ids do, see ``rollout.stop.make_stop_strings``; prompts never count.
      grammar: responses keep to it, and log-probabilities are over what it allows: train with
        ``rollout.grammar.make_score``.
      prefill_columns: prompts are read so many columns at a time, for the memory of long ones; 0: at once.
      cache_stages: the cache grows in so many steps, each with a loop of its own: a token reads the columns there are
        so far instead of all that there will be. Compiles a decode step for each.

    Returns:
      ``T = L + max_new_tokens`` columns; ``sampler_logp`` as ``rollout.sample.draw`` defines it.
    """
    how = make_choice(max_new_tokens, eos_ids, pad_id, temperature, top_k, top_p, min_p, stop, grammar)
    check_columns(prefill_columns)
    ends = stage_ends(max_new_tokens, cache_stages)
    prompts, width = prompt_tokens.shape
    check_keys(keys, prompts * group_size)
    cache, logits, positions, segments, following = _prefill(
        policy, params, prompt_tokens, prompt_valid, group_size, width + ends[0], prefill_columns
    )
    pick = partial(_pick, how, _step_keys(keys, 0, max_new_tokens))
    tokens, logp, mask, alive = _decode(
        policy,
        params,
        cache,
        logits,
        following,
        jnp.ones((prompts * group_size,), bool),
        pick,
        width=width,
        new=max_new_tokens,
        pad_id=pad_id,
        early_exit=early_exit,
        ends=ends,
    )
    return _assemble(
        prompt_tokens, positions, segments, following, tokens, logp, mask, alive, group_size, pad_id, problem_ids
    )


def go_on(
    policy: Policy,
    params: Params,
    rows: Trajectories,
    keys: Key,
    *,
    done: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Trajectories:
    """Up to ``max_new_tokens`` further tokens of every response that has not ended: a rollout in several parts.

    The parameters may have changed since: caches are computed anew. Under the same parameters the parts draw the tokens
    that ``generate`` draws in one go, with log-probabilities up to rounding.

    From "Kimi k1.5: Scaling Reinforcement Learning with LLMs", arXiv:2501.12599, section 2.6.2 (partial rollouts).

    Args:
      rows: of ``generate`` or of an earlier part; those that are not ``truncated`` have ended and stay as they are.
      keys: those of the first part; token ``t`` of a response uses ``fold_in(key, t)`` in whichever part it is drawn.
      done: columns of the response that are there, the last ones of ``rows``.

    Returns:
      ``max_new_tokens`` columns more; ``extras`` as they were.
    """
    how = make_choice(max_new_tokens, eos_ids, pad_id, temperature, top_k, top_p, min_p, None, None)
    width = rows.tokens.shape[1]
    if not 0 < done < width:
        raise ValueError(f"done={done} must lie in 1 .. {width - 1}")
    check_keys(keys, rows.tokens.shape[0])
    cache, logits, _, _, following = _prefill(
        policy, params, rows.tokens, rows.segment_ids > 0, 1, width + max_new_tokens - 1
    )
    pick = partial(_pick, how, _step_keys(keys, done, max_new_tokens))
    tokens, logp, mask, alive = _decode(
        policy, params, cache, logits, following, rows.truncated, pick, width=width, new=max_new_tokens, pad_id=pad_id,
        early_exit=True, ends=stage_ends(max_new_tokens, 1),
    )  # fmt: skip
    steps = following[:, None] + jnp.arange(max_new_tokens, dtype=jnp.int32)[None, :]

    def beside(left: Array, right: Array) -> Array:
        return jnp.concatenate([left, right], axis=1)

    return rows._replace(
        tokens=beside(rows.tokens, tokens),
        segment_ids=beside(rows.segment_ids, mask.astype(jnp.int32)),
        positions=beside(rows.positions, jnp.where(mask, steps, 0)),
        mask=beside(rows.mask, mask),
        sampler_logp=beside(rows.sampler_logp, logp),
        truncated=alive,
    )


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


def check_columns(prefill_columns: int) -> None:
    """ValueError for a number of columns that is none."""
    if prefill_columns < 0:
        raise ValueError(f"prefill_columns={prefill_columns} must not be negative; 0 reads a prompt at once")


def stage_ends(new: int, stages: int) -> tuple[int, ...]:
    """The number of tokens in the cache at the end of each stage; the last token of a response is never in it.

    >>> stage_ends(128, 4), stage_ends(2, 8)
    ((32, 64, 96, 127), (1,))

    Raises:
      ValueError: for less than one stage.
    """
    if stages < 1:
        raise ValueError(f"cache_stages={stages} must be at least 1")
    last = new - 1  # the last token needs no forward pass after it
    return tuple(sorted({min(-(-new * k // stages), last) for k in range(1, stages + 1)} - {0})) or (0,)


def check_keys(keys: Key, rows: int) -> None:
    """ValueError unless there is one key per sequence."""
    if keys.shape != (rows,):
        raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")


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
    ended = _ends(token, how.eos_ids)
    if how.stop is not None:
        read, found = stops.advance(how.stop, read, token)
        ended |= found
    return token, jnp.where(alive, logp, 0.0), ended, (read, state)


def _step_keys(keys: Key, first: int, new: int) -> Key:
    """Keys ``[new, B]`` of tokens ``first`` to ``first + new - 1``, made in one pass instead of one a token."""
    steps = jnp.arange(first, first + new, dtype=jnp.int32)
    return jax.vmap(lambda t: jax.vmap(lambda key: jax.random.fold_in(key, t))(keys))(steps)


def _pick(how: Choice, step_keys: Key, t, logits, written):
    """Draws column ``t`` of every live row and writes token, log-probability and mask in the same place."""
    alive, reading, tokens, logp, mask = written
    token, token_logp, ended, reading = choose(how, step_keys[t], logits, alive, reading)

    def put(array, value):
        return jax.lax.dynamic_update_index_in_dim(array, value, t, 1)

    written = (put(tokens, token), put(logp, token_logp), put(mask, alive))
    return token, (alive & ~ended, reading, *written)


def _grown(policy: Policy, cache: Cache, rows: int, length: int) -> Cache:
    """The same cache with room for ``length`` columns."""
    empty = policy.init_cache(rows, length)
    return jax.tree.map(lambda large, x: jax.lax.dynamic_update_slice(large, x, (0,) * x.ndim), empty, cache)


def _decode(policy, params, cache, logits, following, alive, pick, *, width, new, pad_id, early_exit, ends):
    """Tokens, log-probabilities, mask ``[B, new]`` and which rows never ended."""

    def one(t, carry):
        cache, logits, written = carry
        alive = written[0]
        token, written = pick(t, logits, written)
        hidden, cache = policy.extend(
            params, cache, token[:, None], (following + t)[:, None], alive.astype(jnp.int32)[:, None], width + t
        )
        return cache, policy.unembed(params, hidden[:, 0]), written

    rows = following.shape[0]
    blank = (
        jnp.full((rows, new), pad_id, jnp.int32),
        jnp.zeros((rows, new), jnp.float32),
        jnp.zeros((rows, new), bool),
    )
    carry = (cache, logits, (alive, unread(rows), *blank))
    for start, end in zip((0, *ends), ends, strict=False):
        if start:
            carry = (_grown(policy, carry[0], rows, width + end), *carry[1:])
        if early_exit:
            _, carry = jax.lax.while_loop(
                lambda c, end=end: (c[0] < end) & jnp.any(c[1][2][0]),
                lambda c: (c[0] + 1, one(c[0], c[1])),
                (jnp.int32(start), carry),
            )
        else:
            carry, _ = jax.lax.scan(lambda c, t: (one(t, c), None), carry, jnp.arange(start, end, dtype=jnp.int32))
    _, (alive, _, tokens, logp, mask) = pick(new - 1, carry[1], carry[2])
    return tokens, logp, mask, alive


def _assemble(
    prompt_tokens, positions, segments, following, tokens, logp, mask, alive, group_size, pad_id, problem_ids
) -> Trajectories:
    prompts, width = prompt_tokens.shape
    rows, new = tokens.shape

    def beside(left: Array, right: Array) -> Array:
        return jnp.concatenate([jnp.repeat(left, group_size, axis=0), right], axis=1)

    steps = following[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    ids = jnp.arange(prompts, dtype=jnp.int32) if problem_ids is None else problem_ids.astype(jnp.int32)
    return Trajectories(
        tokens=beside(jnp.where(segments > 0, prompt_tokens, pad_id), tokens),
        segment_ids=beside(segments, mask.astype(jnp.int32)),
        positions=beside(positions, jnp.where(mask, steps, 0)),
        mask=beside(jnp.zeros((prompts, width), bool), mask),
        sampler_logp=beside(jnp.zeros((prompts, width), jnp.float32), logp),
        truncated=alive,
        group_ids=jnp.repeat(jnp.arange(prompts, dtype=jnp.int32), group_size),
        problem_ids=jnp.repeat(ids, group_size),
    )
