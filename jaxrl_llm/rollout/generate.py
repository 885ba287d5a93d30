"""Jitted generation: every prompt prefilled once, its cache shared by the group, one compiled decode loop."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.cache import EXPERTS, experts_of
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.decode import Job, batch_sizes, decode, stage_ends, step_keys
from jaxrl_llm.rollout.next_token import make_choice
from jaxrl_llm.types import Key, Params, Policy, Trajectories


def prefill(
    policy: Policy, params: Params, tokens: Array, valid: Array, group_size: int, length: int, columns: int = 0
):
    """Cache of every sequence, the logits of its first new token, and its next position.

    ``columns``: at most so many columns of the prompts at a time, which bounds the activations; 0: all at once.
    """
    positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
    segments = valid.astype(jnp.int32)
    width, grow = tokens.shape[1], policy.grow_cache
    cache = policy.init_cache(tokens.shape[0], length if grow is None else width)
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
    if grow is not None:
        cache = grow(cache, group_size, length)
    elif group_size > 1:
        cache = policy.repeat_cache(cache, group_size)
    if group_size > 1:
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
    row_stages: int = 1,
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
        ``rollout.grammar.score_legal``.
      prefill_columns: prompts are read so many columns at a time, for the memory of long ones; 0: at once.
      cache_stages: the cache grows in so many steps, each with a loop of its own: a token reads the columns there are
        so far instead of all that there will be. Compiles a decode step for each.
      row_stages: the batch shrinks in so many steps: of 4, the rows that still live go on in three quarters of it once
        there is room for them, then in half, then in a quarter. For rows of one device (see ``rollout.per_device``) on
        which a smaller batch is faster; compiles a decode step for each in every one of ``cache_stages``.

    Returns:
      ``T = L + max_new_tokens`` columns; ``sampler_logp`` as ``rollout.sample.draw`` defines it. ``EXPERTS``
      among the extras of a mixture: which experts computed each token, ``[B, T, layers x per token]``, for the trainer
      to take the same.
    """
    how = make_choice(max_new_tokens, eos_ids, pad_id, temperature, top_k, top_p, min_p, stop, grammar)
    check_columns(prefill_columns)
    if row_stages > 1 and not early_exit:
        raise ValueError(f"row_stages={row_stages} needs early_exit: a loop of fixed length has rows of a fixed number")
    ends = stage_ends(max_new_tokens, cache_stages)
    prompts, width = prompt_tokens.shape
    rows = prompts * group_size
    check_keys(keys, rows)
    cache, logits, positions, segments, following = prefill(
        policy, params, prompt_tokens, prompt_valid, group_size, width + ends[0], prefill_columns
    )
    job = Job(
        policy, policy.for_steps(params), how, step_keys(keys, 0, max_new_tokens), following, width, max_new_tokens
    )
    sizes = batch_sizes(rows, row_stages)
    everyone = jnp.ones((rows,), bool)
    written, alive = decode(job, cache, logits, everyone, ends=ends, sizes=sizes, early_exit=early_exit)
    read = experts_of(cache)
    asked = None if read is None else read[:, :width]
    return _assemble(
        prompt_tokens, positions, segments, following, written, alive, group_size, pad_id, problem_ids, asked
    )


def go_on(
    policy: Policy,
    params: Params,
    rows: Trajectories,
    keys: Key,
    *,
    done: int | Int[Array, " B"],
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
      done: columns of the response that are there, the last ones of ``rows``; or tokens of each response, in rows that
        are padded on the left alone, so that those that go on all end at the last column.

    Returns:
      ``max_new_tokens`` columns more; ``extras`` as they were.
    """
    how = make_choice(max_new_tokens, eos_ids, pad_id, temperature, top_k, top_p, min_p, None, None)
    width = rows.tokens.shape[1]
    if isinstance(done, int) and not 0 < done < width:
        raise ValueError(f"done={done} must lie in 1 .. {width - 1}")
    check_keys(keys, rows.tokens.shape[0])
    cache, logits, _, _, following = prefill(
        policy, params, rows.tokens, rows.segment_ids > 0, 1, width + max_new_tokens - 1
    )
    job = Job(
        policy, policy.for_steps(params), how, step_keys(keys, done, max_new_tokens), following, width, max_new_tokens
    )
    ends = stage_ends(max_new_tokens, 1)
    (tokens, logp, mask, experts), alive = decode(job, cache, logits, rows.truncated, ends=ends)
    steps = following[:, None] + jnp.arange(max_new_tokens, dtype=jnp.int32)[None, :]

    def beside(left: Array, right: Array) -> Array:
        return jnp.concatenate([left, right], axis=1)

    segments = beside(rows.segment_ids, mask.astype(jnp.int32))
    return rows._replace(
        tokens=beside(rows.tokens, tokens),
        segment_ids=segments,
        positions=beside(rows.positions, jnp.where(mask, steps, 0)),
        mask=beside(rows.mask, mask),
        sampler_logp=beside(rows.sampler_logp, logp),
        truncated=alive,
        extras=rows.extras | _recorded(_or_read(rows.extras.get(EXPERTS), experts_of(cache), width), experts, segments),
    )


def _or_read(recorded: Array | None, read: Array | None, width: int) -> Array | None:
    """What was recorded when the tokens were sampled, and of those that nobody had read yet what is read now."""
    if recorded is None or read is None:
        return None if read is None else read[:, :width]
    return jnp.where(recorded >= 0, recorded, read[:, :width])


def _recorded(asked: Array | None, written: Array | None, segments: Array) -> dict[str, Array]:
    """Which experts computed the prompts ``[B, L, E]`` and the responses, for the extras.

    Of padding there are none (-1), and none of the last token: whether it is read depends on what decodes beside it.
    """
    if asked is None:
        return {}
    followed = jnp.pad(segments[:, 1:] > 0, ((0, 0), (0, 1)))
    known = (segments > 0) & followed
    return {EXPERTS: jnp.where(known[:, :, None], jnp.concatenate([asked, written], axis=1), -1)}


def check_columns(prefill_columns: int) -> None:
    """ValueError for a number of columns that is none."""
    if prefill_columns < 0:
        raise ValueError(f"prefill_columns={prefill_columns} must not be negative; 0 reads a prompt at once")


def check_keys(keys: Key, rows: int) -> None:
    """ValueError unless there is one key per sequence."""
    if keys.shape != (rows,):
        raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")


def _assemble(
    prompt_tokens, positions, segments, following, written, alive, group_size, pad_id, problem_ids, asked
) -> Trajectories:
    tokens, logp, mask, experts = written
    prompts, width = prompt_tokens.shape
    rows, new = tokens.shape

    def beside(left: Array, right: Array) -> Array:
        return jnp.concatenate([jnp.repeat(left, group_size, axis=0), right], axis=1)

    steps = following[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    ids = jnp.arange(prompts, dtype=jnp.int32) if problem_ids is None else problem_ids.astype(jnp.int32)
    whole = beside(segments, mask.astype(jnp.int32))
    return Trajectories(
        tokens=beside(jnp.where(segments > 0, prompt_tokens, pad_id), tokens),
        segment_ids=whole,
        positions=beside(positions, jnp.where(mask, steps, 0)),
        mask=beside(jnp.zeros((prompts, width), bool), mask),
        sampler_logp=beside(jnp.zeros((prompts, width), jnp.float32), logp),
        truncated=alive,
        group_ids=jnp.repeat(jnp.arange(prompts, dtype=jnp.int32), group_size),
        problem_ids=jnp.repeat(ids, group_size),
        extras=_recorded(asked, experts, whole),
    )
