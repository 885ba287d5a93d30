"""Foreign models as a ``Policy``: a plain forward function, an Equinox module or a Flax (nnx) module.

The foreign model sees whole sequences: ``forward(params, tokens, positions, segment_ids) -> logits [B, T, V]``. It must
follow the one attention rule (same segment, segment > 0, earlier position), or be used without padding. The adapter's
cache keeps the tokens and every decode step runs the model again: right for a first experiment, slow for long texts.

An Equinox module needs no adapter of its own::

    params, static = eqx.partition(model, eqx.is_inexact_array)
    forward = lambda params, *inputs: eqx.combine(params, static)(*inputs)
    policy = policy_from_forward(forward, vocab_size, init)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.types import Cache, Key, Params, Policy


def policy_from_forward(forward: Callable[..., Array], vocab_size: int, init: Callable[[Key], Params]) -> Policy:
    """Builds a ``Policy`` whose "hidden states" are the logits and whose ``unembed`` only casts to float32.

    Args:
      forward: ``(params, tokens [B, T], positions [B, T], segment_ids [B, T]) -> logits [B, T, vocab_size]``.
      init: ``key -> params``, any tree of arrays.

    Raises:
      ValueError: at trace time, when the logits have another shape.
    """

    def hidden(params, tokens, positions, segment_ids):
        logits = forward(params, tokens, positions, segment_ids)
        if logits.shape != (*tokens.shape, vocab_size):
            raise ValueError(
                f"forward returned logits of shape {logits.shape} for tokens of shape {tokens.shape}; "
                f"vocab_size={vocab_size} wants {(*tokens.shape, vocab_size)}"
            )
        return logits

    def init_cache(batch: int, length: int) -> Cache:
        return {name: jnp.zeros((batch, length), jnp.int32) for name in ("tokens", "positions", "segment_ids")}

    def extend(params, cache, tokens, positions, segment_ids, column):
        new = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], new[name].astype(jnp.int32), column, 1)
            for name in new
        }
        logits = hidden(params, cache["tokens"], cache["positions"], cache["segment_ids"])
        return jax.lax.dynamic_slice_in_dim(logits, column, tokens.shape[1], 1), cache

    return Policy(
        init=init,
        hidden=hidden,
        unembed=lambda params, hidden: hidden.astype(jnp.float32),
        init_cache=init_cache,
        extend=extend,
        repeat_cache=lambda cache, repeats: jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), cache),
        vocab_size=vocab_size,
    )


def policy_from_nnx(build: Callable[..., Any], vocab_size: int) -> Policy:
    """Builds a ``Policy`` of a Flax module; its parameters become an ordinary nested dict.

    Args:
      build: ``build(rngs=nnx.Rngs(...))`` returns a module that is called with ``(tokens, positions, segment_ids)`` and
        returns logits ``[B, T, vocab_size]``. The module is split at birth and merged again only while tracing.

    Raises:
      ValueError: when the module holds state that is no parameter (dropout keys, running statistics): a policy is a
        pure function of its parameters.
    """
    from flax import nnx

    def blank() -> tuple[Any, Any]:
        graph, params, rest = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))), nnx.Param, ...)
        others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
        if others:
            raise ValueError(f"the module holds state that is no nnx.Param: {', '.join(others)}; remove it")
        return graph, params

    def init(key: Key) -> Params:
        blank()
        return nnx.to_pure_dict(nnx.state(build(rngs=nnx.Rngs(params=key)), nnx.Param))

    def forward(params, tokens, positions, segment_ids):
        graph, state = blank()
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(tokens, positions, segment_ids)

    return policy_from_forward(forward, vocab_size, init)
