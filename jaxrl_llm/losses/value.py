"""Losses of value functions, per token, 0 outside the mask."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked
from jaxrl_llm.types import TokenTerms


def squared_value_loss(
    values: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """``(V - R)^2 / 2``."""
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
    """``max((V - R)^2, (old + clip(V - old, +-clip) - R)^2) / 2``, as PPO implementations use it."""
    if clip <= 0:
        raise ValueError(f"clip={clip} must be positive")
    values, old_values, returns = masked(mask, values, old_values, returns)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    free, bounded = (values - returns) ** 2, (near - returns) ** 2
    aux = {"value_error": jnp.abs(values - returns), "value_clipped": (bounded > free).astype(jnp.float32)}
    return TokenTerms(0.5 * jnp.maximum(free, bounded), aux)


def two_hot(targets: Float[Array, "B T"], *, low: float, high: float, bins: int) -> Float[Array, "B T K"]:
    """Each target as weights on its two neighbouring bin centres; the expectation is the target (clipped to range)."""
    if bins < 2 or low >= high:
        raise ValueError(f"bins={bins} must be at least 2 and low={low} below high={high}")
    place = (jnp.clip(targets, low, high) - low) / (high - low) * (bins - 1)
    left = jnp.clip(jnp.floor(place), 0, bins - 2)
    share = (place - left)[..., None]
    index = left.astype(jnp.int32)
    return (1 - share) * jax.nn.one_hot(index, bins) + share * jax.nn.one_hot(index + 1, bins)


def categorical_value_loss(
    logits: Float[Array, "B T K"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
) -> TokenTerms:
    """Cross-entropy of a distribution over K bins against the two-hot return.

    From "Stop Regressing: Training Value Functions via Classification", arXiv:2403.03950, section 3 (two-hot).
    """
    (returns,) = masked(mask, returns)
    logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
    target = jax.lax.stop_gradient(two_hot(returns, low=low, high=high, bins=logits.shape[-1]))
    loss = -jnp.sum(target * jax.nn.log_softmax(logits, axis=-1), axis=-1)
    centres = jnp.linspace(low, high, logits.shape[-1])
    values = jnp.sum(jax.nn.softmax(logits, axis=-1) * centres[None, None, :], axis=-1)
    return TokenTerms(jnp.where(mask, loss, 0.0), {"value_error": jnp.where(mask, jnp.abs(values - returns), 0.0)})
