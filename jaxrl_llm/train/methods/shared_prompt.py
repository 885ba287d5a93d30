"""Scoring that runs each prompt once for its whole group, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import logprobs
from jaxrl_llm.train.methods import packed
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Params, Policy


def share_prompts(group_size: int, new_tokens: int) -> Callable[..., tuple[Array, Array]]:
    """A ``score`` for ``estimates``: like ``score_tokens`` on the response columns, 0 on the prompt's.

    Rows come in whole groups of ``group_size`` with one left-padded prompt each, the last ``new_tokens`` columns are
    the responses: what ``rollout.generate`` returns, in whole or in micro-batches of whole groups. Keys and values of
    a prompt are computed once and every response of the group attends to them, so a step costs ``P / G + N`` columns a
    row where it costs ``P + N`` without. Rows that are no whole number of groups, policies without ``hidden_groups``
    and mixtures whose experts were recorded are scored in full, and so are rows with a layout, packed as it says: then
    the prompt's columns have their log-probabilities, too, and the mask leaves them out.
    """
    if group_size < 1 or new_tokens < 1:
        raise ValueError(f"group_size={group_size} and new_tokens={new_tokens} must be at least 1")

    def score(policy: Policy, params: Params, rows: Any, *, temperature: float = 1.0, chunk: int = 128):
        number, columns = rows.tokens.shape
        width = columns - new_tokens
        if width < 1:
            raise ValueError(f"rows of {columns} columns hold no prompt before {new_tokens} new tokens")
        alone = packed.layout_of(rows) is not None or packed.recorded(rows)
        if number % group_size or policy.hidden_groups is None or alone:
            return score_tokens(policy, params, rows, temperature=temperature, chunk=chunk)
        whole = (rows.tokens, rows.positions, rows.segment_ids)
        prompts, responses = [x[::group_size, :width] for x in whole], [x[:, width:] for x in whole]
        before, after = policy.hidden_groups(params, prompts, responses)
        found = logprobs.chunked(
            jnp.concatenate([jnp.repeat(before[:, -1:], group_size, axis=0), after], axis=1),
            lambda h: policy.unembed(params, h),
            rows.tokens[:, width - 1 :],
            temperature=temperature,
            chunk=policy.steps_at_once(number, chunk),
            segment_ids=rows.segment_ids[:, width - 1 :],
            scored=policy.scored and partial(policy.scored, params),
        )
        logp, entropy = (jnp.pad(x, ((0, 0), (width - 1, 0))) for x in found)
        return logp, entropy

    return score
