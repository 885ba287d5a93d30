"""One token from logits: temperature, top-k, top-p and min-p, with a key per row."""

from collections.abc import Callable

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
    Ties keep the lower id first.

    Nothing is sorted: the smallest logit that stays is found by halving the range of float32 numbers, 32 passes over
    the vocabulary, and by halving the ids which of those that are equal to it stay.
    """
    ids = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :], logits.shape)
    order = _ordered(logits)
    keep = jnp.isfinite(logits)
    if top_k is not None:

        def enough(least: Array) -> Array:  # more than top_k tokens are above: least is too small
            return _count(order > least) < top_k

        last = _smallest(enough, order)
        keep &= _first(order, last, ids, top_k - _count(order > last))
    probs = jax.nn.softmax(logits, axis=-1)
    if isinstance(top_p, Array) or (top_p is not None and top_p < 1):
        mass = jnp.broadcast_to(jnp.asarray(top_p, jnp.float32).reshape(-1, 1), (logits.shape[0], 1))

        def above(least: Array) -> Array:  # mass of the strictly more likely tokens
            return jnp.sum(jnp.where(order > least, probs, 0.0), axis=1, keepdims=True)

        last = _smallest(lambda least: above(least) < mass, order)
        one = jnp.max(jnp.where(order == last, probs, 0.0), axis=1, keepdims=True)
        number = jnp.ceil((mass - above(last)) / jnp.where(one > 0, one, 1.0))
        number = jnp.clip(number, 1, logits.shape[1]).astype(jnp.int32)
        # the sum of a long vocabulary reaches 1 before its end in float32: 1 filters nothing
        keep &= _first(order, last, ids, number) | (mass >= 1)
    if min_p is not None:
        keep &= probs >= min_p * jnp.max(probs, axis=-1, keepdims=True)
    return keep | (ids == first_largest(logits)[:, None])


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Whole numbers in the order of the float32 ``x``: 0 and -0 are one number.

    >>> _ordered(jnp.array([[-jnp.inf, -2.0, -0.0, 0.0, 1e-30, jnp.inf]])).argsort().tolist()
    [[0, 1, 2, 3, 4, 5]]
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x.astype(jnp.float32)), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _count(x: Bool[Array, "B V"]) -> Int[Array, "B 1"]:
    return jnp.sum(x, axis=1, keepdims=True, dtype=jnp.int32)


def _smallest(holds: Callable[[Array], Array], order: Int[Array, "B V"]) -> Int[Array, "B 1"]:
    """The smallest number from the row's least to its largest for which ``holds``, which is true of all above it."""

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # of two whole numbers whose sum may not fit
        found = holds(middle)
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    ends = (jnp.min(order, axis=1, keepdims=True), jnp.max(order, axis=1, keepdims=True))
    return jax.lax.fori_loop(0, 32, halve, ends)[1]


def _first(order: Array, last: Array, ids: Array, number: Array) -> Bool[Array, "B V"]:
    """Tokens above ``last``, and of those equal to it the ``number`` with the lowest ids."""
    equal = order == last

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # among ids below low are at most so many, and below high + 1 more
        middle = (low + high + 1) // 2
        fits = _count(equal & (ids < middle)) <= number
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    ends = (jnp.zeros_like(last), jnp.full_like(last, order.shape[1]))
    bound = jax.lax.fori_loop(0, order.shape[1].bit_length(), halve, ends)[0]
    return (order > last) | (equal & (ids < bound))


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
    top_p = None if not isinstance(top_p, Array) and top_p == 1 else top_p  # no filter
    if any(x is not None for x in (top_k, top_p, min_p)):
        allowed = jnp.where(support(scaled, top_k=top_k, top_p=top_p, min_p=min_p), scaled, -jnp.inf)
    if drawn is not False:
        noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:], jnp.float32))(keys)
        allowed = allowed + (noise if drawn is True else jnp.where(drawn, noise, 0.0))
    tokens = first_largest(allowed)
    picked = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, picked - jax.nn.logsumexp(scaled, axis=-1)
