"""Responses that one policy begins and another ends: roll-in with the one, roll-out with the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout import given_responses, rollout_cost
from jaxrl_llm.run import parts as job
from jaxrl_llm.tools import endpoints
from jaxrl_llm.types import Params, Trajectories

_SALT = 0x52000  # of the keys that cut, and of those that continue


def cut_lengths(
    length_tokens: Int[Array, " B"], chance: Float[Array, " B"], place: Float[Array, " B"], *, share: float
) -> Int[Array, " B"]:
    """How much of each roll-in stays: with probability ``share`` a number drawn evenly from 1 .. l - 1, else nothing.

    A roll-in of fewer than two tokens is dropped.

    From "Learning to Generate Better Than Your LLM", arXiv:2306.11816, algorithm 1.

    Args:
      chance, place: uniform numbers in [0, 1); the first decides whether, the second where.

    >>> import jax.numpy as jnp
    >>> five, places = jnp.full(5, 5), jnp.array([0.0, 0.3, 0.6, 0.99, 0.5])
    >>> cut_lengths(five, jnp.array([0.1, 0.1, 0.1, 0.1, 0.9]), places, share=0.6).tolist()
    [1, 2, 3, 4, 0]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]: it is a probability")
    choices = jnp.maximum(length_tokens - 1, 0)
    kept = 1 + jnp.floor(place * choices.astype(jnp.float32)).astype(jnp.int32)
    kept = jnp.minimum(kept, choices)  # rounding of place * choices
    return jnp.where((chance < share) & (choices > 0), kept, 0)


def whole_response(rows: Trajectories, *, new_tokens: int) -> Bool[Array, "B T"]:
    """Every token of the response, whoever chose it: the real ones of the last ``new_tokens`` columns."""
    columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    return (rows.segment_ids > 0) & (columns >= rows.tokens.shape[1] - new_tokens)[None, :]


def whole(rows: Trajectories, *, new_tokens: int) -> Trajectories:
    """The rows with all of their response in the mask: what a verifier reads."""
    return rows._replace(mask=whole_response(rows, new_tokens=new_tokens))


def either(own: Bool[Array, ""], yes: Params, no: Params) -> Params:
    """One of two parameter trees of the same shape, chosen inside a compiled program."""
    return jax.tree.map(lambda a, b: jnp.where(own, a, b), yes, no)


class Writer(NamedTuple):
    """A model that writes: its rollout in whole groups, and the one in groups of one, which goes on behind rows."""

    groups: Callable[..., Trajectories]
    singles: Callable[..., Trajectories]


def behind_address(
    complete: endpoints.Completion, model: job.Model, *, new_tokens: int, group_size: int, workers: int
) -> Writer:
    """A model behind an address that shares the policy's vocabulary, asked by token ids in the middle of a program.

    What it writes is read as text and encoded anew: its own tokens may have parted the text otherwise, and are asked
    for nothing. Its tokens count as sampled with log-probability 0.

    Args:
      complete: who goes on behind token ids; each row is a draw of its own.
      workers: questions under way at once.
    """
    tokenizer = model.tokenizer

    def one(prompt: Any, valid: Any, key: Any) -> tuple[Any, Any, bool]:
        try:
            said = complete(prompt[valid].tolist(), endpoints.draw_of(key))
        except endpoints.Unanswered as error:
            raise UserError(f"--guide: {error}") from error
        ids = tokenizer.encode(said.text) + ([tokenizer.eos_ids[0]] if said.ended else [])
        cut = len(ids) > new_tokens or not said.ended
        row, there = np.full(new_tokens, tokenizer.pad_id, np.int32), np.arange(new_tokens) < len(ids)
        row[there] = ids[:new_tokens]
        return row, there, cut

    def write(tokens: Any, valid: Any, keys: Any) -> tuple[Any, Any, Any]:
        with ThreadPoolExecutor(workers) as pool:
            rows = list(pool.map(one, *(np.asarray(x) for x in (tokens, valid, keys))))
        return tuple(np.stack([np.asarray(row[k]) for row in rows]) for k in range(3))

    def asked(tokens: Array, valid: Array, keys: Array) -> tuple[Array, Array, Array]:
        rows = tokens.shape[0]
        shapes = (
            jax.ShapeDtypeStruct((rows, new_tokens), jnp.int32), jax.ShapeDtypeStruct((rows, new_tokens), jnp.bool_),
            jax.ShapeDtypeStruct((rows,), jnp.bool_),
        )  # fmt: skip
        return jax.pure_callback(write, shapes, tokens, valid, keys, vmap_method="sequential")

    ask_whole = meshes.around_callback(asked, model.mesh)

    def rollout(times: int, params: Params, tokens: Array, valid: Array, keys: Array, problem_ids: Array):
        tokens, valid, ids = (jnp.repeat(x, times, axis=0) for x in (tokens, valid, problem_ids))
        data = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
        written, there, cut = ask_whole(tokens, valid, data)
        prompt = jnp.concatenate([tokens, jnp.zeros_like(written)], axis=1)
        real = jnp.concatenate([valid, jnp.zeros_like(there)], axis=1)
        places = jnp.cumsum(real.astype(jnp.int32), axis=1) - 1
        empty = Trajectories(
            tokens=prompt, segment_ids=real.astype(jnp.int32), positions=jnp.where(real, places, 0),
            mask=jnp.zeros(real.shape, bool), sampler_logp=jnp.zeros(real.shape, jnp.float32),
            truncated=jnp.zeros(ids.shape, bool), group_ids=jnp.arange(ids.shape[0], dtype=jnp.int32) // times,
            problem_ids=ids,
        )  # fmt: skip
        every = jnp.ones(ids.shape, bool)
        return given_responses.with_responses(empty, every, written, there, truncated=cut)

    return Writer(partial(rollout, group_size), partial(rollout, 1))


Mixed = Callable[..., tuple[Trajectories, Bool[Array, "B T"]]]


def make_mixed_rollout(begin: Writer, end: Writer, *, new_tokens: int, share: float, pad_id: int) -> Mixed:
    """``(params_in, params_out, tokens, valid, keys, problem_ids) -> (trajectories, which tokens are roll-in)``.

    Args:
      begin, end: who writes the roll-in and the roll-out; the first is never asked for probabilities of what the second
        wrote, nor the other way round.
      share: of the rows that keep a part of their roll-in; 0 is one plain rollout of ``end``.
    """

    def rollout(params_in: Params, params_out: Params, tokens: Array, valid: Array, keys: Array, problem_ids: Array):
        if share == 0:
            rows = end.groups(params_out, tokens, valid, keys, problem_ids)
            return rows, jnp.zeros(rows.mask.shape, bool)
        rows = begin.groups(params_in, tokens, valid, keys, problem_ids)
        salted = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(keys)
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(salted)
        length = jnp.sum(rows.mask.astype(jnp.int32), axis=1)
        keep = given_responses.prefix(rows.mask, cut_lengths(length, drawn[:, 0], drawn[:, 1], share=share))
        prompt = (rows.segment_ids > 0) & ~whole_response(rows, new_tokens=new_tokens)
        asked = given_responses.left_padded(rows.tokens, prompt | keep, pad_id=pad_id)
        onwards = jax.vmap(lambda key: jax.random.fold_in(key, _SALT + 1))(keys)
        rest = end.singles(params_out, *asked, onwards, rows.problem_ids)
        tokens = rollout_cost.response_tokens(rows) + rollout_cost.response_tokens(rest)
        both, begun = given_responses.joined(rows, keep, rest, new_tokens=new_tokens)
        return rollout_cost.with_cost(both, jnp.full(tokens.shape, 2.0, jnp.float32), tokens), begun

    return rollout


def in_one_program(writer: Writer, **sizes: Any) -> Mixed:
    """``(own, policy, guide, ...)`` for parameters of one shape: a coin ``own`` chooses who ends, and so who begins.

    Args:
      sizes: as ``make_mixed_rollout`` wants them.
    """
    mixed = make_mixed_rollout(writer, writer, **sizes)

    def rollout(own: Bool[Array, ""], policy: Params, guide: Params, *asked: Array):
        return mixed(either(own, guide, policy), either(own, policy, guide), *asked)

    return rollout


def in_two_programs(policy: Writer, guide: Writer, **sizes: Any) -> Mixed:
    """As ``in_one_program`` for two models of any shape, of which one program at a time runs."""
    policy_ends = make_mixed_rollout(guide, policy, **sizes)
    guide_ends = make_mixed_rollout(policy, guide, **sizes)

    def rollout(own: Bool[Array, ""], ours: Params, theirs: Params, *asked: Array):
        return jax.lax.cond(own, lambda: policy_ends(theirs, ours, *asked), lambda: guide_ends(ours, theirs, *asked))

    return rollout
