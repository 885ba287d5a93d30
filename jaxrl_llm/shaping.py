"""Shaping of reward arrays ``[B]``: length penalties and clipping."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def overlong_penalty(length_tokens: Int[Array, " B"], *, limit_tokens: int, buffer_tokens: int) -> Float[Array, " B"]:
    """DAPO's soft overlong punishment: 0 up to ``limit - buffer``, then linearly to -1 at ``limit``, -1 beyond.

    From "DAPO", arXiv:2503.14476, eq. 13.

    >>> import jax.numpy as jnp
    >>> overlong_penalty(jnp.array([10, 15, 20, 30]), limit_tokens=20, buffer_tokens=10).tolist()
    [-0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer_tokens <= limit_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must lie in (0, limit_tokens={limit_tokens}]")
    over = (length_tokens.astype(jnp.float32) - (limit_tokens - buffer_tokens)) / buffer_tokens
    return jnp.clip(-over, -1.0, 0.0)


def length_reward(
    length_tokens: Int[Array, " B"], right: Bool[Array, " B"], shortest: Float[Array, " B"], longest: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Kimi k1.5's length reward: ``lam = 0.5 - (len - min) / (max - min)``; wrong answers get ``min(0, lam)``.

    Args:
      shortest: least length in the group of each sequence, ``longest`` the greatest; equal ones give 0.

    From "Kimi k1.5", arXiv:2501.12599, section 2.3.3.
    """
    spread = longest - shortest
    share = (length_tokens.astype(jnp.float32) - shortest) / jnp.maximum(spread, 1.0)
    lam = jnp.where(spread > 0, 0.5 - share, 0.0)
    return jnp.where(right, lam, jnp.minimum(lam, 0.0))


def cosine_length_reward(
    length_tokens: Int[Array, " B"],
    right: Bool[Array, " B"],
    *,
    limit_tokens: int,
    right_short: float = 2.0,
    right_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
) -> Float[Array, " B"]:
    """Cosine between a value at length 0 and one at the limit, for right and wrong answers.

    From "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv:2502.03373, section 4.1.
    """
    if limit_tokens < 1:
        raise ValueError(f"limit_tokens={limit_tokens} must be at least 1")
    phase = jnp.clip(length_tokens.astype(jnp.float32) / limit_tokens, 0.0, 1.0)
    share = 0.5 * (1 + jnp.cos(jnp.pi * phase))  # 1 at length 0, 0 at the limit
    low, high = jnp.where(right, right_long, wrong_long), jnp.where(right, right_short, wrong_short)
    return low + (high - low) * share


def clipped_rewards(rewards: Float[Array, " B"], *, low: float, high: float) -> Float[Array, " B"]:
    """Rewards bounded to ``[low, high]``."""
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    return jnp.clip(rewards.astype(jnp.float32), low, high)
