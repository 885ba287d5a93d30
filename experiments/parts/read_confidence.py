"""Confidence stated in text: a field that a prompt asks for, read back, and the chance of a verdict's first token."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.errors import UserError
from jaxrl_llm.run.parts import Model
from jaxrl_llm.types import Params, Trajectories

ASK = "\nEnd with a line 'Confidence: N %' where N from 0 to 100 is the chance that your answer is right."
_FIELD = re.compile(r"confidence(?:\s+is)?\W{0,8}([0-9]{1,3}(?:\.[0-9]+)?)(?![0-9.]*\s*/)", re.IGNORECASE)
MAX_CHARACTERS = 20_000
VERDICT = "\n\nIs the answer above right? Answer Yes or No:"


def read_confidence(response: str) -> float | None:
    """The last stated confidence as a share in [0, 1]; None where none can be read.

    A number is read as percent; above 100 it is none.

    >>> read_confidence("#12\\nConfidence: 85 %"), read_confidence("**Confidence:** 7%"), read_confidence("sure")
    (0.85, 0.07, None)
    """
    found = _FIELD.findall(response[-MAX_CHARACTERS:])
    if not found:
        return None
    value = float(found[-1])
    return value / 100.0 if value <= 100.0 else None


def verdict_chances(model: Model, params: Params, rows: Trajectories, *, at_once: int = 32) -> Float[Array, " B"]:
    """P(True) of every response: ``p(Yes) / (p(Yes) + p(No))`` of the next token when ``VERDICT`` follows it.

    The question is put in the same turn, behind the response without its end token. Where the two words begin with the
    same tokens, these belong to the question.

    From "Language Models (Mostly) Know What They Know", arXiv:2207.05221, section 3.

    Raises:
      UserError: where responses and the question exceed the context.
    """
    words = [model.tokenizer.encode(word) for word in (" Yes", " No")]
    shared = next(k for k, (a, b) in enumerate(zip(*words, strict=False)) if a != b)
    asked = [*model.tokenizer.encode(VERDICT), *words[0][:shared]]
    found, size = [], rows.tokens.shape[1] + len(asked)
    if size > model.config.max_positions:
        limit = model.config.max_positions - len(asked)
        raise UserError(
            f"a prompt, its response and the question for a verdict take {size} tokens, the context is "
            f"{model.config.max_positions}: prompt and --max-new-tokens may take {limit} together"
        )
    ends, real = set(model.tokenizer.eos_ids), np.asarray(rows.segment_ids) > 0
    for row, there in zip(np.asarray(rows.tokens), real, strict=True):
        ids = row[there].tolist()
        found.append([*(ids[:-1] if ids and ids[-1] in ends else ids), *asked])
    chances = []
    for first in range(0, len(found), at_once):
        part = found[first : first + at_once] + [asked] * max(0, first + at_once - len(found))
        tokens, there = np.zeros((at_once, size), np.int32), np.zeros((at_once, size), np.int32)
        for n, ids in enumerate(part):
            tokens[n, : len(ids)], there[n, : len(ids)] = ids, 1
        last = jnp.asarray([len(ids) - 1 for ids in part], jnp.int32)
        yes, no = _next_logits(model, params, tokens, there, last, [word[shared] for word in words])
        chances.append(jax.nn.sigmoid(yes - no))
    return jnp.concatenate(chances)[: len(found)]


def _next_logits(model: Model, params: Params, tokens, there, last: Array, words: list[int]) -> tuple[Array, Array]:
    """The logits of two tokens behind the last one of each row."""
    positions = jnp.maximum(jnp.cumsum(jnp.asarray(there), axis=1) - 1, 0)
    hidden = model.policy.hidden(params, jnp.asarray(tokens), positions, jnp.asarray(there))
    at = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    logits = model.policy.unembed(params, at).astype(jnp.float32)
    return logits[:, words[0]], logits[:, words[1]]
