"""One token from logits: temperature, top-k, top-p and min-p, with a key per row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Key


def check_sampling(
    temperature: float | Array, top_k: int | None, top_p: float | Array | None, min_p: float | None
) -> None:
    """Raises ValueError for settings outside their range; arrays, of one value a row, are the caller's to check."""
    if not isinstance(temperature, Array) and temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or None")
    if top_p is not None and not isinstance(top_p, Array) and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1], or None")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p} must lie in [0, 1], or None")


def support(
    logits: Float[Array, "B V"],
    *,
    top_k: int | None = None,
    top_p: float | Float[Array, " B"] | None = None,
    min_p: float | None = None,
) -> Bool[Array, "B V"]:
    """The tokens that may be drawn: among the ``top_k`` most likely, in the smallest set of mass ``top_p``, and at
    least ``min_p`` times as likely as the most likely one. The most likely token always stays; ``top_p=1`` keeps all.
    Ties keep the lower id first."""
    order = jnp.argsort(-logits, axis=-1)
    rank = jnp.argsort(order, axis=-1)
    keep = jnp.isfinite(logits)
    if top_k is not None:
        keep &= rank < top_k
    probs = jax.nn.softmax(logits, axis=-1)
    if isinstance(top_p, Array) or (top_p is not None and top_p < 1):
        top_p = top_p[:, None] if isinstance(top_p, Array) else top_p
        ordered = jnp.take_along_axis(probs, order, axis=-1)
        before = jnp.cumsum(ordered, axis=-1) - ordered  # mass of the strictly more likely tokens
        # the sum of a long vocabulary reaches 1 before its end in float32: 1 filters nothing
        keep &= (jnp.take_along_axis(before, rank, axis=-1) < top_p) | jnp.asarray(top_p >= 1)
    if min_p is not None:
        keep &= probs >= min_p * jnp.max(probs, axis=-1, keepdims=True)
    return keep | (rank == 0)


def first_largest(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """``argmax`` of every row as two plain reductions, which a CPU runs several times faster than its one of pairs.

    >>> first_largest(jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf]])).tolist()
    [1, 0]
    """
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=1, keepdims=True), ids, x.shape[1] - 1), axis=1)


def draw(
    logits: Float[Array, "B V"],
    keys: Key,
    *,
    temperature: float | Float[Array, " B"] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, " B"] | None = None,
    min_p: float | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token a row and returns it with its log-probability.

    The log-probability is of ``softmax(logits / temperature)`` over the *whole* vocabulary, the distribution that the
    trainer scores, also where the draw is truncated (top-k, top-p, min-p): then the ratio against the trainer carries
    no bias of the truncation, but it is not the behaviour policy's. Temperature 0 is greedy; its log-probability is
    that of the untempered distribution.

    Args:
      keys: one key per row ``[B]``.
      temperature, top_p: of all rows, or of each; rows of temperature 0 are greedy beside others that are drawn.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    logits = logits.astype(jnp.float32)
    if isinstance(temperature, Array):
        drawn = temperature[:, None] > 0
        scaled = logits / jnp.where(drawn, temperature[:, None], 1.0)
    else:
        drawn = temperature > 0
        scaled = logits / temperature if drawn else logits
    allowed = scaled
    top_p = None if not isinstance(top_p, Array) and top_p == 1 else top_p  # no filter, and no sort of the vocabulary
    if any(x is not None for x in (top_k, top_p, min_p)):
        allowed = jnp.where(support(scaled, top_k=top_k, top_p=top_p, min_p=min_p), scaled, -jnp.inf)
    if drawn is not False:
        noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:], jnp.float32))(keys)
        allowed = allowed + (noise if drawn is True else jnp.where(drawn, noise, 0.0))
    tokens = first_largest(allowed)
    picked = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, picked - jax.nn.logsumexp(scaled, axis=-1)
