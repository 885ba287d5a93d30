"""Which unlabelled pairs are worth a label: scores from the margins of DPO, higher first."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.types import Key

EPS = 1e-6


def sharpe_ratio(margin: Float[Array, " N"], prior: Float[Array, " N"]) -> Float[Array, " N"]:
    """``[q (1 - p) + (1 - q) p] / (sqrt(q (1 - q)) |1 - 2p| + eps)`` with ``p = sigmoid(margin)``.

    The mean over its deviation of the gradient norm that a label would give: ``beta (1 - p) |d|`` if the first
    response wins, ``beta p |d|`` if the second does; ``beta |d|`` cancels, so no gradient is needed.

    From "Sharpe Ratio-Guided Active Learning for Preference Optimization in RLHF", arXiv:2503.22137. Differs from the
    paper in that the prior is an argument.

    Args:
      prior: ``q = P(first wins)`` before the label: 1/2 (SHARP), a judge's or the model's own (W-SHARP).

    >>> import jax.numpy as jnp
    >>> h = jnp.array([0.5, 2.0])
    >>> [round(float(x), 4) for x in sharpe_ratio(h, jnp.array([0.5, 0.5]))]
    [4.083, 1.313]
    """
    p, q = jax.nn.sigmoid(margin.astype(jnp.float32)), jnp.clip(prior.astype(jnp.float32), EPS, 1.0 - EPS)
    mean = q * (1.0 - p) + (1.0 - q) * p
    return mean / (jnp.sqrt(q * (1.0 - q)) * jnp.abs(1.0 - 2.0 * p) + EPS)


# What a pair is worth: ``(margin, judged, slope) -> [N]``. The last two are functions without arguments, a judge's
# prior and the norms of the margins' gradients, called only where they are used.


def any_pair(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """All are worth the same."""
    return jnp.zeros(margin.shape, jnp.float32)


def certain_pair(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """``|margin|``: what the model tells apart best."""
    return jnp.abs(margin.astype(jnp.float32))


def open_pair(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """Entropy of the label under the model: largest at margin 0, so it ranks as ``w_sharp`` does."""
    p = jax.nn.sigmoid(margin.astype(jnp.float32))
    return -(p * jax.nn.log_sigmoid(margin) + (1.0 - p) * jax.nn.log_sigmoid(-margin))


def sharp(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """SHARP: the ratio without prior knowledge, ``1 / |tanh(h / 2)|``."""
    return sharpe_ratio(margin, jnp.full(margin.shape, 0.5, jnp.float32))


def w_sharp(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """W-SHARP with the model's own prior, ``1 / |sinh(h / 2)|``."""
    return sharpe_ratio(margin, jax.nn.sigmoid(margin))


def w_sharp_judged(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """W-SHARP with a judge's prior."""
    return sharpe_ratio(margin, judged())


def expected_slope(margin: Float[Array, " N"], judged: Callable, slope: Callable) -> Float[Array, " N"]:
    """``2 p (1 - p) |d|``: the expected gradient norm itself."""
    p = jax.nn.sigmoid(margin.astype(jnp.float32))
    return 2.0 * p * (1.0 - p) * slope()


def top(scores: Float[Array, " N"], key: Key, n: int) -> Int[Array, " n"]:
    """The ``n`` highest scores; equal ones in random order, so that a constant score is a uniform choice."""
    if not 1 <= n <= scores.shape[0]:
        raise ValueError(f"n={n} must lie in 1 .. {scores.shape[0]}, the size of the pool")
    order = jax.random.permutation(key, scores.shape[0])
    best = jnp.argsort(-scores[order], stable=True)[:n]
    return order[best].astype(jnp.int32)
