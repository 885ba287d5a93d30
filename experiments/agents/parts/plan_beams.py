"""The most probable plans that a policy may write under a grammar, found by beam search in one compiled loop."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.parts.strings import PAD
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.types import Params, Policy, Trajectories


def _next_logp(policy: Policy, params: Params, tokens: Array, there: Array, count: Array) -> Float[Array, "B V"]:
    """Of the token behind the first ``count`` columns of every row, of which those are read that are ``there``."""
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    seen = (there & (column < count)).astype(jnp.int32)
    hidden = policy.hidden(params, tokens, (jnp.cumsum(seen, axis=1) - 1) * seen, seen)
    return policy.unembed(params, jax.lax.dynamic_index_in_dim(hidden, count - 1, axis=1, keepdims=False))


def _heads(prompts: Array, width: int, end: int, pad: int) -> tuple[Array, Array]:
    """Each prompt ``width`` times, and which of its columns are no filling."""
    head = jnp.repeat(prompts.astype(jnp.int32), width, axis=0, total_repeat_length=prompts.shape[0] * width)
    return jnp.where(head == pad, end, head), head != pad


def beams(
    policy: Policy, params: Params, prompts: Int[Array, "P L"], kept: grammars.Grammar, *, width: int, new: int,
    end: int, pad: int = PAD,
) -> tuple[Int[Array, "P W T"], Float[Array, "P W T"]]:  # fmt: skip
    """``width`` plans of each prompt and the log-probabilities of their tokens, the most probable plan first.

    A step keeps, of all ways to go on with the kept beginnings, those of greatest ``sum log p``. Behind its end a plan
    repeats the end at no cost. Where there are fewer plans the rest have log-probabilities of minus infinity.

    Args:
      pad: what fills up the left of shorter prompts; it is not read.
    """
    count, length = prompts.shape
    rows, vocabulary = count * width, policy.vocab_size
    head, asked = _heads(prompts, width, end, pad)
    there = jnp.concatenate([asked, jnp.ones((rows, new), bool)], axis=1)
    alone = jnp.arange(vocabulary, dtype=jnp.int32)[None, :] == end
    first = jnp.arange(rows, dtype=jnp.int32) % width == 0  # one beginning of each prompt, until they differ

    def step(t: Array, carry: Any) -> Any:
        tokens, logp, total, state, over = carry
        text = jnp.concatenate([head, tokens], axis=1)
        logits = grammars.restricted(kept, state, _next_logp(policy, params, text, there, length + t))
        each = jnp.where(over[:, None], jnp.where(alone, 0.0, -jnp.inf), jax.nn.log_softmax(logits, axis=1))
        total_each = (total[:, None] + each).reshape(count, width * vocabulary)
        best, place = jax.lax.top_k(total_each, width)
        parent = (jnp.arange(count, dtype=jnp.int32)[:, None] * width + place // vocabulary).reshape(-1)
        token = (place % vocabulary).astype(jnp.int32).reshape(-1)
        tokens = tokens[parent].at[:, t].set(token)
        logp = logp[parent].at[:, t].set(each[parent, token])
        state = grammars.advanced(kept, state[parent], token)
        return tokens, logp, best.reshape(-1), state, over[parent] | (token == end)

    start = (
        jnp.full((rows, new), end, jnp.int32), jnp.zeros((rows, new), jnp.float32), jnp.where(first, 0.0, -jnp.inf),
        jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool),
    )  # fmt: skip
    tokens, logp, total, _, _ = jax.lax.fori_loop(0, new, step, start)
    logp = jnp.where(jnp.isfinite(total)[:, None], logp, -jnp.inf)
    return tokens.reshape(count, width, new), logp.reshape(count, width, new)


def as_rows(
    prompts: Int[Array, "P L"], plans: Int[Array, "P W T"], logp: Float[Array, "P W T"], problem_ids: Int[Array, " P"],
    *, end: int, pad: int = PAD,
) -> Trajectories:  # fmt: skip
    """Plans as rollouts; a plan that there is not has no token in the mask. ``pad`` as of ``beams``."""
    count, width, new = plans.shape
    said, of_token = plans.reshape(-1, new), logp.reshape(-1, new)
    ended = jnp.cumsum((said == end).astype(jnp.int32), axis=1)
    mine = (ended - (said == end).astype(jnp.int32) == 0) & jnp.isfinite(of_token)
    head, asked = _heads(prompts, width, end, pad)
    there = jnp.concatenate([asked, mine], axis=1)
    places = jnp.cumsum(there.astype(jnp.int32), axis=1) - 1
    nothing = jnp.zeros(head.shape, jnp.float32)
    return Trajectories(
        tokens=jnp.concatenate([head, said], axis=1),
        segment_ids=there.astype(jnp.int32),
        positions=jnp.where(there, places, 0),
        mask=jnp.concatenate([jnp.zeros(head.shape, bool), mine], axis=1),
        sampler_logp=jnp.concatenate([nothing, jnp.where(mine, of_token, 0.0)], axis=1),
        truncated=ended[:, -1] == 0,
        group_ids=jnp.repeat(jnp.arange(count, dtype=jnp.int32), width, total_repeat_length=count * width),
        problem_ids=jnp.repeat(problem_ids.astype(jnp.int32), width, total_repeat_length=count * width),
        extras={},
    )
