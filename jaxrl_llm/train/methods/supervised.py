"""Supervised fine-tuning: prompts with responses to imitate as rows, and the stage that trains on them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.data.chat import encode_answer, encode_prompt
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.train import offline, origins
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.types import Params, Policy, Sampler


class SupervisedRows(NamedTuple):
    """Prompts with responses to imitate."""

    tokens: Int[Array, "N T"]
    segment_ids: Int[Array, "N T"]
    positions: Int[Array, "N T"]
    mask: Bool[Array, "N T"]
    layout: Any = None  # of a minibatch, where the host arranges its rows: ``train.packing``


def supervised_rows(model: Any, pairs: Sequence[tuple[str, str]], *, width: int) -> SupervisedRows:
    """Rows ``[N, width]`` of prompt, response and end token; ``mask`` is true on response and end.

    Raises:
      UserError: for a pair that does not fit the width.
    """
    tokenizer, rows = model.tokenizer, []
    for k, (prompt, response) in enumerate(pairs):
        head = encode_prompt(tokenizer, prompt)
        tail = [*encode_answer(tokenizer, prompt, response), tokenizer.eos_ids[0]]
        if len(head) + len(tail) > width:
            raise UserError(f"pair {k} has {len(head) + len(tail)} tokens, the rows have {width}; widen them")
        rows.append(([*head, *tail], [False] * len(head) + [True] * len(tail)))
    return jax.tree.map(jnp.asarray, filled_up(rows, width=width, pad_id=tokenizer.pad_id))


def filled_up(rows: Sequence[tuple[list[int], list[bool]]], *, width: int, pad_id: int) -> SupervisedRows:
    """Ids, with which of them train, as rows of one width, filled up on the right; NumPy's."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    segments, mask = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, bool)
    for k, (ids, said) in enumerate(rows):
        tokens[k, : len(ids)], segments[k, : len(ids)], mask[k, : len(ids)] = ids, 1, said
    return SupervisedRows(tokens, segments, np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape), mask)


def joined(
    prompt_tokens: Int[Array, "N L"], prompt_valid: Bool[Array, "N L"], tokens: Int[Array, "N R"],
    valid: Bool[Array, "N R"],
) -> SupervisedRows:  # fmt: skip
    """Left-padded prompts and right-padded responses as rows ``[N, L + R]``; ``mask`` is true on the responses."""
    real = jnp.concatenate([prompt_valid, valid], axis=1)
    return SupervisedRows(
        tokens=jnp.concatenate([prompt_tokens, tokens], axis=1),
        segment_ids=real.astype(jnp.int32),
        positions=jnp.maximum(jnp.cumsum(real.astype(jnp.int32), axis=1) - 1, 0),
        mask=jnp.concatenate([jnp.zeros(prompt_valid.shape, bool), valid], axis=1),
    )


def make_supervised(
    policy: Policy,
    rows: SupervisedRows,
    *,
    rows_per_step: int,
    tx: optax.GradientTransformation,
    sampler: Sampler | None = None,
) -> Offline:
    """A stage of supervised fine-tuning on ``supervised_rows``; ``sampler=None``: uniform draws with replacement."""

    def loss(params: Params, extras: dict[str, Any], part: SupervisedRows, total: Array):
        logp, _ = builders.score_tokens(policy, params, part)
        value = reduce.tokens(sft_loss(logp, part.mask).loss, part.mask, total=total)
        return value, {"sft/loss": value, "tokens/trained": jnp.sum(part.mask.astype(jnp.float32))}

    return Offline(lambda extras: rows, sampler or make_uniform(), rows_per_step, loss, tx, whole=trained_tokens)


def trained_tokens(part: SupervisedRows) -> Array:
    """What the supervised loss of a minibatch divides by."""
    return reduce.denominator(part.mask, mode="token_mean")


def imitated_pairs(
    model: Any, pairs: Sequence[tuple[str, str]], *, width: int, steps: int, rows_per_step: int = 32,
    learning_rate: float = 1e-3, params: Params | None = None,
) -> Params:  # fmt: skip
    """``imitated`` of ``supervised_rows``: the model, or other parameters of it, after prompts with responses."""
    rows, begun = supervised_rows(model, pairs, width=width), model.params if params is None else params
    return imitated(model.policy, begun, rows, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def imitated(
    policy: Policy, params: Params, rows: SupervisedRows, *, steps: int, rows_per_step: int, learning_rate: float
) -> Params:
    """The parameters after supervised fine-tuning with Adam. Call it under ``jax.core.eval_context``.

    ``jax.ensure_compile_time_eval`` would go on folding constants inside the program, which fails on a mesh.
    """
    size, tx = min(rows_per_step, rows.tokens.shape[0]), optax.adam(learning_rate)
    method = make_supervised(policy, rows, rows_per_step=size, tx=tx)

    def trained(given: Params) -> Params:
        return offline.scan_steps(method, offline.init_state(method, given, jax.random.key(0)), steps)[0].params

    state = offline.init_state(method, jax.tree.map(jnp.copy, params), jax.random.key(0))
    return origins.made_by(trained, params, offline.make_run(method, steps)(state)[0].params)
