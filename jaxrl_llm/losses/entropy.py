"""Entropy terms and the covariance mechanisms that keep it from collapsing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked


def entropy_bonus_terms(entropy: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``-H_t``: add with a coefficient to a loss. ``entropy`` is exact, from ``logprobs``, and keeps its gradient."""
    return -jnp.where(mask, entropy, 0.0)


def sampled_entropy(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``-logp`` of the sampled token: an unbiased *value* of the entropy on-policy only. No gradient."""
    return jax.lax.stop_gradient(-jnp.where(mask, logp.astype(jnp.float32), 0.0))


def token_covariance(
    logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """``(logp - mean logp) (A - mean A)`` over the masked tokens; its mean is the covariance that drives entropy down.

    From "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617, eq. 9.
    """
    logp, advantages = masked(mask, logp, advantages)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    centred = (logp - jnp.sum(logp) / count) * (advantages - jnp.sum(advantages) / count)
    return jax.lax.stop_gradient(jnp.where(mask, centred, 0.0))


def clip_cov_keep(
    covariance: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    noise: Float[Array, "B T"],
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Bool[Array, "B T"]:
    """Clip-Cov: which tokens keep their gradient; ``fraction`` of all tokens, drawn at random among those whose
    covariance lies in ``[low, high]``, is detached.

    Args:
      noise: uniform numbers in [0, 1) that decide the draw.

    From arXiv:2505.22617, eq. 11.
    """
    inside = mask & (covariance >= low) & (covariance <= high)
    wanted = jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(jnp.float32))), 1.0)
    order = jnp.where(inside, noise, 2.0).ravel()
    rank = jnp.argsort(jnp.argsort(order)).reshape(mask.shape).astype(jnp.float32)
    return mask & ~(inside & (rank < wanted))


def kl_cov_select(
    covariance: Float[Array, "B T"], mask: Bool[Array, "B T"], *, fraction: float = 2e-3
) -> Bool[Array, "B T"]:
    """KL-Cov: the ``fraction`` of tokens with the largest covariance, which get a KL penalty to the old policy.

    From arXiv:2505.22617, eq. 13.
    """
    wanted = jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(jnp.float32))), 1.0)
    order = jnp.where(mask, -covariance, jnp.inf).ravel()
    rank = jnp.argsort(jnp.argsort(order)).reshape(mask.shape).astype(jnp.float32)
    return mask & (rank < wanted)
