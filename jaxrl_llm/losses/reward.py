"""Training of reward models from preferences."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import PairTerms


def bradley_terry_loss(
    chosen_reward: Float[Array, " B"],
    rejected_reward: Float[Array, " B"],
    *,
    margin: Float[Array, " B"] | None = None,
    centering: float = 0.0,
) -> PairTerms:
    """``-log sigmoid(r_w - r_l - margin) + centering (r_w + r_l)^2``.

    Args:
      margin: how much better the chosen response is, from "Llama 2", arXiv:2307.09288, eq. 2.
      centering: keeps the mean reward near 0, from "Helping or Herding?", arXiv:2312.09244, appendix.
    """
    if centering < 0:
        raise ValueError(f"centering={centering} must not be negative")
    won, lost = chosen_reward.astype(jnp.float32), rejected_reward.astype(jnp.float32)
    difference = won - lost if margin is None else won - lost - margin.astype(jnp.float32)
    loss = -jax.nn.log_sigmoid(difference) + centering * (won + lost) ** 2
    shown = jax.lax.stop_gradient(won - lost)
    return PairTerms(loss, {"margin": shown, "accuracy": (shown > 0).astype(jnp.float32)})
