"""Judgements about judgements: a response that ends in a label, true or false, of somebody else's solution."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.types import Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verdict

_CONCLUSION = re.compile(r"\\conclusion\{([^{}]{0,80})\}|#([^#]*)$")
SOLVE, FALSE, TRUE = 0, 1, 2  # what a row of a mixed table asks for


def conclusion(response: str) -> str | None:
    r"""The label of the last ``\conclusion{...}``, or the text after a closing ``#``; None without either.

    >>> conclusion(r"so \conclusion{F}, no: \conclusion{T}"), conclusion("3+5=8#F"), conclusion("T")
    ('T', 'F', None)
    """
    found = list(_CONCLUSION.finditer(response[-20_000:]))
    if not found:
        return None
    inside, behind = found[-1].groups()
    return inside if inside is not None else behind


def verify_label(answer: dict[str, Any], response: str) -> Verdict:
    r"""1 when the conclusion is ``T`` for a right solution (``answer["label"]``) or ``F`` for a wrong one; else 0.

    The critique before it earns nothing. From "Critique-Coder", arXiv:2509.22824, section 3.

    >>> verify_label({"label": True}, r"\conclusion{T}").value, verify_label({"label": True}, r"\conclusion{X}").reason
    (1.0, "'X' is neither T nor F")
    """
    given = conclusion(response)
    if given is None:
        return Verdict(0.0, True, "no conclusion")
    if given not in ("T", "F"):
        return Verdict(0.0, True, f"{given[:20]!r} is neither T nor F")
    return Verdict(1.0, True, "right") if (given == "T") == bool(answer["label"]) else Verdict(0.0, True, "wrong label")


def make_label_verifier(
    encode: Callable[[str], list[int]], eos_ids: Sequence[int]
) -> Callable[[Any, Trajectories], Rewards]:
    """The jittable form for the ``#`` marker: 1 when ``#T`` or ``#F`` and the end follow the last ``#``, as asked.

    ``answers["label"] [B]``: ``FALSE`` or ``TRUE``; with ``SOLVE`` the reward is 0.

    Raises:
      ValueError: when ``#``, ``T`` or ``F`` is not one token.
    """
    ids = {}
    for text in "#TF":
        found = encode(text)
        if len(found) != 1:
            raise ValueError(f"{text!r} is {len(found)} tokens; jittable verifiers need one token a character")
        ids[text] = found[0]

    def verify(answers, trajectories):
        tokens, mask = trajectories.tokens, trajectories.mask
        columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        at = jnp.max(jnp.where(mask & (tokens == ids["#"]), columns[None, :], -1), axis=1)

        def chosen(offset):
            place = jnp.clip(at + offset, 0, tokens.shape[1] - 1)[:, None]
            token, real = (jnp.take_along_axis(x, place, axis=1)[:, 0] for x in (tokens, mask))
            return jnp.where(real & (at >= 0) & (at + offset < tokens.shape[1]), token, -1)

        label, end = chosen(1), chosen(2)
        ended = jnp.any(end[:, None] == jnp.asarray(list(eos_ids), jnp.int32)[None, :], axis=1)
        wanted = jnp.where(answers["label"] == TRUE, ids["T"], ids["F"])
        right = ended & (label == wanted) & (answers["label"] != SOLVE)
        return Rewards(right.astype(jnp.float32), jnp.ones(right.shape, bool))

    return verify
