"""Given responses made more likely (supervised fine-tuning) or less (unlearning: ascent and its bounded form)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import reduce
from jaxrl_llm.types import PairTerms, TokenTerms


def sft_loss(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Negative log-likelihood of the masked tokens: ``-logp_t``."""
    reduce.check_tokens(mask, logp)
    return TokenTerms(-jnp.where(mask, logp.astype(jnp.float32), 0.0), {})


def weighted_sft_loss(logp: Float[Array, "B T"], weights: Float[Array, " B"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Negative log-likelihood of the masked tokens times the weight of their sequence: ``-w_i logp_it``.

    Reduce with ``seq_mean`` for ``mean_i w_i NLL_i``, NLL the mean over the tokens of a sequence. A weight of 0 leaves
    the likelihood of a sequence out, not its place in the mean; the weights get no gradient. A NaN as the weight of a
    sequence without masked tokens stands in its terms; ``reduce`` replaces it, and its gradient is 0.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3, whose
    weights are ``advantages.selection.exponential_weights``.
    """
    reduce.check_rows(mask, weights)
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return TokenTerms(weights[:, None] * sft_loss(logp, mask).loss, {})


def ascent_loss(logp: Float[Array, " B"], weights: Float[Array, " B"]) -> PairTerms:
    """``w log pi(y)``: minimising it pushes the response down, without a bound.

    From "Unlearning to Align" (U2A), arXiv:2504.06659, the inner objective.
    """
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return PairTerms(weights * logp.astype(jnp.float32), {"weight": weights})


def npo_loss(logp: Float[Array, " B"], ref_logp: Float[Array, " B"], *, beta: float = 0.1) -> PairTerms:
    """``-2 / beta log sigmoid(-beta log(pi / ref))``: ascent whose pull fades as the response becomes unlikely.

    From "Negative Preference Optimization", arXiv:2404.05868, eq. 3. At ``logp = ref_logp`` the gradient is that of
    ascent with weight 1; for ``beta`` to 0 it is everywhere.

    >>> import jax.numpy as jnp
    >>> round(float(npo_loss(jnp.zeros(1), jnp.zeros(1), beta=0.5).loss[0]), 4)
    2.7726
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive; for the limit 0 use ascent_loss")
    ratio = logp.astype(jnp.float32) - jax.lax.stop_gradient(ref_logp.astype(jnp.float32))
    pull = jax.lax.stop_gradient(2.0 * jax.nn.sigmoid(beta * ratio))
    return PairTerms(-2.0 / beta * jax.nn.log_sigmoid(-beta * ratio), {"weight": pull})
