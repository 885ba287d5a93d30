"""Supervised fine-tuning."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import TokenTerms


def sft_loss(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Negative log-likelihood of the masked tokens: ``-logp_t``."""
    return TokenTerms(-jnp.where(mask, logp.astype(jnp.float32), 0.0), {})
