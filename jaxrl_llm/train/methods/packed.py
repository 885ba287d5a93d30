"""Scoring in another arrangement of the tokens: packed rows, or trees of shared prefixes."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import logprobs
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.train.packing import LAYOUT, Layout
from jaxrl_llm.types import Params, Policy, Trajectories


def recorded(rows: Any) -> dict[str, Array]:
    """Which experts computed the tokens of trajectories or a batch when they were sampled, where that is known."""
    extras = getattr(rows, "extras", {})
    return {EXPERTS: extras[EXPERTS]} if EXPERTS in extras else {}


def without_record(rows: Trajectories) -> Trajectories:
    """Trajectories whose experts another model chooses for itself."""
    return rows._replace(extras={name: x for name, x in rows.extras.items() if name != EXPERTS})


def layout_of(rows: Any) -> Layout | None:
    """What the host has planned for trajectories, a batch, or supervised rows; None: they are computed as they are."""
    return rows.extras.get(LAYOUT) if hasattr(rows, "extras") else getattr(rows, "layout", None)


def hidden_of(policy: Policy, params: Params, rows: Any, layout: Layout) -> tuple[Array, Array]:
    """Tokens ``[R, C]`` as the layout arranges those of ``rows``, and their hidden states."""
    real = layout.source >= 0

    def taken(x: Array) -> Array:
        return jnp.where(real, x.reshape(-1)[jnp.maximum(layout.source, 0)], 0)

    tokens, positions = taken(rows.tokens), taken(rows.positions)
    experts = {}
    for name, x in recorded(rows).items():
        there = x.reshape(-1, x.shape[2])[jnp.maximum(layout.source, 0)]
        experts[name] = jnp.where(real[:, :, None], there, -1)
    if layout.pages is None:
        return tokens, policy.hidden(params, tokens, positions, layout.segments, **experts)
    if policy.hidden_pages is None:
        raise ValueError("this policy has no hidden_pages, which trees of prefixes need; give --layout packed")
    return tokens, policy.hidden_pages(params, tokens, positions, layout.segments, layout.pages, **experts)


def score_laid_out(
    policy: Policy, params: Params, rows: Any, layout: Layout, *, temperature: float = 1.0, chunk: int = 128
) -> tuple[Array, Array]:
    """``(logp, entropy)`` ``[B, T]`` of the tokens that the layout asks for, 0 elsewhere.

    The product with the vocabulary is of those tokens alone.
    """
    tokens, hidden = hidden_of(policy, params, rows, layout)
    said = jnp.take_along_axis(hidden, layout.before[:, :, None], axis=1)
    targets = jnp.take_along_axis(tokens, jnp.maximum(layout.target, 0), axis=1)
    # a row of a layout may be as long as many of the batch: as many logits at once as of those
    chunk = policy.steps_at_once(tokens.shape[0], max(chunk, chunk * tokens.shape[1] // rows.tokens.shape[1]))
    # ``chunked`` shifts by one: index k of the states speaks of index k + 1 of the tokens
    found = logprobs.chunked(
        jnp.pad(said, ((0, 0), (0, 1), (0, 0))),
        lambda h: policy.unembed(params, h),
        jnp.pad(targets, ((0, 0), (1, 0))),
        temperature=temperature,
        chunk=chunk,
        scored=policy.scored and partial(policy.scored, params),
    )
    asked = layout.place >= 0

    def back(x: Array) -> Array:
        return jnp.where(asked, x[:, 1:].reshape(-1)[jnp.maximum(layout.place, 0)], 0.0)

    logp, entropy = (back(x) for x in found)
    return logp, entropy
