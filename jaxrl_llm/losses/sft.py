"""Supervised fine-tuning."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import TokenTerms


def sft_loss(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Negative log-likelihood of the masked tokens: ``-logp_t``."""
    return TokenTerms(-jnp.where(mask, logp.astype(jnp.float32), 0.0), {})


def weighted_sft_loss(logp: Float[Array, "B T"], weights: Float[Array, " B"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Negative log-likelihood of the masked tokens times the weight of their sequence: ``-w_i logp_it``.

    Reduce with ``seq_mean`` for ``mean_i w_i NLL_i``, NLL the mean over the tokens of a sequence. A weight of 0 leaves
    the likelihood of a sequence out, not its place in the mean; the weights get no gradient.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3, whose
    weights are ``advantages.selection.exponential_weights``.
    """
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return TokenTerms(weights[:, None] * sft_loss(logp, mask).loss, {})
