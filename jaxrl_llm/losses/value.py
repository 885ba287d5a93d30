"""Losses of value functions, per token, 0 outside the mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked
from jaxrl_llm.types import TokenTerms


def squared_value_loss(
    values: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """``(V - R)^2 / 2``; gradient ``V - R``.

    >>> import jax.numpy as jnp
    >>> float(squared_value_loss(jnp.array([[1.0]]), jnp.array([[3.0]]), jnp.array([[True]])).loss[0, 0])
    2.0
    """
    values, returns = masked(mask, values, returns)
    error = values - jax.lax.stop_gradient(returns)
    return TokenTerms(0.5 * error**2, {"value_error": jnp.abs(error)})


def clipped_value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip: float = 0.2,
) -> TokenTerms:
    """``max((V - R)^2, (old + clip(V - old, +-clip) - R)^2) / 2``, as PPO implementations use it.

    ``aux``: ``value_clipped``, 1 where the second square is the larger one, as in verl. In float32 ``old + (V - old)``
    need not be ``V``, and where that makes it larger a value within the clip is counted, too; its loss and gradient
    are right to rounding.
    """
    if clip <= 0:
        raise ValueError(f"clip={clip} must be positive")
    values, old_values, returns = masked(mask, values, old_values, returns)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    free, bounded = (values - returns) ** 2, (near - returns) ** 2
    aux = {"value_error": jnp.abs(values - returns), "value_clipped": (bounded > free).astype(jnp.float32)}
    return TokenTerms(0.5 * jnp.maximum(free, bounded), aux)


def _check_bins(low: float, high: float, bins: int) -> None:
    if bins < 2 or low >= high:
        raise ValueError(f"bins={bins} must be at least 2 and low={low} below high={high}")


def two_hot(targets: Float[Array, "B T"], *, low: float, high: float, bins: int) -> Float[Array, "B T K"]:
    """Each target as weights on its two neighbouring bin centres; the expectation is the target (clipped to range).

    >>> import jax.numpy as jnp
    >>> two_hot(jnp.array([[0.75]]), low=0.0, high=2.0, bins=3).tolist()
    [[[0.25, 0.75, 0.0]]]
    """
    _check_bins(low, high, bins)
    place = (jnp.clip(targets.astype(jnp.float32), low, high) - low) / (high - low) * (bins - 1)
    left = jnp.clip(jnp.floor(place), 0, bins - 2)
    share = (place - left)[..., None]
    index = left.astype(jnp.int32)
    return (1 - share) * jax.nn.one_hot(index, bins) + share * jax.nn.one_hot(index + 1, bins)


def hl_gauss(
    targets: Float[Array, "B T"], *, low: float, high: float, bins: int, sigma: float | None = None
) -> Float[Array, "B T K"]:
    """Each target as a Gaussian histogram over the bins: the mass of ``N(target, sigma)`` between the bin edges.

    Centres are those of ``two_hot``, edges lie halfway. Targets are clipped to ``[low, high]``, mass outside is
    shared out by normalising, so the mean equals the target only away from the ends.

    Args:
      sigma: default 0.75 of a bin, the paper's choice.

    From "Stop Regressing: Training Value Functions via Classification", arXiv:2403.03950, section 3 (HL-Gauss).
    """
    _check_bins(low, high, bins)
    width = (high - low) / (bins - 1)
    sigma = 0.75 * width if sigma is None else sigma
    if sigma <= 0:
        raise ValueError(f"sigma={sigma} must be positive, in units of the value")
    edges = jnp.linspace(low - width / 2, high + width / 2, bins + 1)
    place = (edges[None, None, :] - jnp.clip(targets.astype(jnp.float32), low, high)[..., None]) / sigma
    mass = jnp.diff(jax.scipy.stats.norm.cdf(place), axis=-1)
    return mass / jnp.sum(mass, axis=-1, keepdims=True)


def expected_values(logits: Float[Array, "B T K"], *, low: float, high: float) -> Float[Array, "B T"]:
    """Mean of the distribution over the bin centres ``linspace(low, high, K)``: the value that a head predicts."""
    centres = jnp.linspace(low, high, logits.shape[-1])
    return jnp.sum(jax.nn.softmax(logits.astype(jnp.float32), axis=-1) * centres[None, None, :], axis=-1)


def categorical_value_loss(
    logits: Float[Array, "B T K"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
    targets: Callable[..., Float[Array, "B T K"]] = two_hot,
) -> TokenTerms:
    """Cross-entropy of a distribution over K bins against the return as a distribution.

    Args:
      targets: ``two_hot`` or ``hl_gauss`` (with ``functools.partial`` for another sigma).

    From "Stop Regressing: Training Value Functions via Classification", arXiv:2403.03950, section 3.
    """
    (returns,) = masked(mask, returns)
    logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
    target = jax.lax.stop_gradient(targets(returns, low=low, high=high, bins=logits.shape[-1]))
    # a bin of target 0 adds 0 also where its log-probability is -inf
    weighted = jnp.where(target > 0, target * jax.nn.log_softmax(logits, axis=-1), 0.0)
    error = jnp.abs(expected_values(logits, low=low, high=high) - returns)
    return TokenTerms(jnp.where(mask, -jnp.sum(weighted, axis=-1), 0.0), {"value_error": jnp.where(mask, error, 0.0)})
